"""Send the files of a published version to an engine that does not see the trainer's folder.

The trainer sends to the engine's own HTTP server, with the token and the publisher header of every other call: nothing
else has to listen, and only files of a published version are ever sent. A file goes in parts, because a server bounds
the size of one request. Both sides hash; the engine loads only what arrived as it was sent (received_files.py there).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from urllib.parse import quote

from safetensors import safe_open
from safetensors.torch import save_file

from treadle.background import awake_s, in_background
from treadle.errors import SyncError
from treadle.sync.delta import COMPARED, DELTA_FROM, WeightUpdate, as_tensors, find_changes, smaller_form
from treadle.sync.protocol import EngineLink
from treadle.wire.bridge import ReceivedPart, SentFile

PART_BYTES = 32 << 20


def send_files(engine: EngineLink, files: Iterable[Path], deadline_s: float) -> list[SentFile]:
    """Send files of one folder; `deadline_s`: by the clock of `awake_s`."""
    return [_send(engine, file, deadline_s) for file in files]


def _send(engine: EngineLink, path: Path, deadline_s: float) -> SentFile:
    digest, offset, size = hashlib.sha256(), 0, path.stat().st_size
    place = f"/bridge/files/{quote(path.parent.name)}/{quote(path.name)}"
    sending: Future[ReceivedPart] | None = None
    with path.open("rb") as file:
        while (part := file.read(PART_BYTES)) or sending is None:  # an empty file has one part
            digest.update(part)  # while the part before is on its way
            _wait_for(sending, engine, path, offset)
            remaining_s = deadline_s - awake_s()
            if remaining_s <= 0:
                raise SyncError(
                    f"{path.name} was not sent to {engine.url} in time: {offset / 1e6:.0f} of {size / 1e6:.0f} MB",
                    fix="give --publish-timeout-s more, or the engine a faster network",
                )
            url = f"{place}?offset={offset}&size={size}"
            sending = in_background("send-part", partial(engine.post_bytes, url, part, ReceivedPart, remaining_s))
            offset += len(part)
        _wait_for(sending, engine, path, offset)
    return SentFile(name=path.name, num_bytes=size, sha256=digest.hexdigest())


def _wait_for(sending: Future[ReceivedPart] | None, engine: EngineLink, path: Path, num_bytes: int) -> None:
    """The call ends by its own deadline."""
    received = num_bytes if sending is None else sending.result().num_bytes
    if received != num_bytes:
        raise SyncError(
            f"the engine at {engine.url} has {received} bytes of {path.name}, and {num_bytes} were sent",
            fix="use an engine of the same release",
        )


def write_delta(old: Path, new: Path, target: Path, base_version: int) -> Sequence[Path] | None:
    """Write what `new` changes in `old`, two folders of saved weights; one file and one weight at a time in memory.
    None if a delta would save nothing: the weights are not in 16 bits, or the folders differ in more than numbers."""
    names = sorted(file.name for file in new.glob("*.safetensors"))
    if not names or any(not (old / name).is_file() for name in names):
        return None
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name in names:
        updates = _changes(old / name, new / name)
        if updates is None:
            shutil.rmtree(target)
            return None
        save_file(as_tensors(updates), target / name, metadata={DELTA_FROM: str(base_version)})
    return [target / name for name in names]


def _changes(old: Path, new: Path) -> dict[str, WeightUpdate] | None:
    updates: dict[str, WeightUpdate] = {}
    with safe_open(old, framework="pt") as before, safe_open(new, framework="pt") as after:
        names = list(after.keys())
        if sorted(names) != sorted(before.keys()):
            return None
        for name in names:
            now, earlier = after.get_tensor(name), before.get_tensor(name)
            if (now.shape, now.dtype) != (earlier.shape, earlier.dtype) or now.dtype not in COMPARED:
                return None
            changes = find_changes(now, earlier)
            if len(changes.indices):
                updates[name] = smaller_form(now, changes)
    return updates
