"""Give an engine a version that was saved as files: all weights, or an adapter. For one engine (modes.py) and several
(fleet.py).

An engine that sees the folder loads from it. One that does not (another machine, no shared disk) is sent the files; of
16-bit weights only what changed, if it has the version before.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from treadle.background import awake_s
from treadle.errors import SyncError
from treadle.log import get_logger
from treadle.net.address import shown_url
from treadle.sync.file_transfer import send_files, write_delta
from treadle.sync.model_folders import NUM_KEPT
from treadle.sync.protocol import EngineLink, FolderNotUsable, Publishable, unload_other_adapters
from treadle.sync.verify import Compared
from treadle.wire.bridge import BridgeInfo, LoadAdapter, LoadedAdapter, ReloadWeights, Updated

WEIGHTS_PATTERN = "*.safetensors"
DELTA_PREFIX = "delta_v"
log = get_logger("sync")


@dataclass(frozen=True)
class HandedOver:
    version: int  # that the engine says it serves
    adapter: str | None = None
    held_s: float = 0.0
    sent_bytes: int | None = None  # over the network; None: the engine read the trainer's folder

    def num_bytes(self, folder_bytes: int) -> int:
        """That went to the engine."""
        return folder_bytes if self.sent_bytes is None else self.sent_bytes


class VersionFiles(Protocol):
    """Save a version once, and hand it to any engine, as often as needed."""

    compares: Compared

    def save(self, policy: Publishable, root: Path, version: int) -> Path: ...

    def hand_over(self, engine: EngineLink, folder: Path, version: int) -> HandedOver: ...

    def clean_up(self, engine: EngineLink, handed: HandedOver) -> None:
        """Free what older versions take in the engine; called when the version is proved."""


class WeightFiles:
    compares: Compared = "weights"

    def __init__(self) -> None:
        self._deltas = _Deltas()

    def save(self, policy: Publishable, root: Path, version: int) -> Path:
        folder = policy.save_model(root, f"weights_v{version}")
        self._deltas.note_saved(folder, version)
        return folder

    def hand_over(self, engine: EngineLink, folder: Path, version: int) -> HandedOver:
        deadline_s = awake_s() + engine.timeout_s
        try:
            updated = engine.post("/reload_weights", ReloadWeights(path=str(folder), policy_version=version), Updated)
        except FolderNotUsable:
            return self._send(engine, folder, version, deadline_s)
        return HandedOver(updated.policy_version, held_s=updated.held_s)

    def clean_up(self, engine: EngineLink, handed: HandedOver) -> None:
        """The new weights have replaced the old ones."""

    def _send(self, engine: EngineLink, folder: Path, version: int, deadline_s: float) -> HandedOver:
        changed = self._deltas.files_for(engine.get("/bridge/info", BridgeInfo).update_count, folder)
        if changed is not None:
            try:
                return self._send_files(engine, changed, version, deadline_s)
            except SyncError as error:
                log.warning("delta_not_loaded", engine=shown_url(engine.url), problem=error.message)
        return self._send_files(engine, sorted(folder.glob(WEIGHTS_PATTERN)), version, deadline_s)

    def _send_files(self, engine: EngineLink, files: Sequence[Path], version: int, deadline_s: float) -> HandedOver:
        started, folder = time.monotonic(), files[0].parent
        sent = send_files(engine, files, deadline_s)
        num_bytes, seconds = sum(file.num_bytes for file in sent), time.monotonic() - started
        log.info("files_sent", engine=shown_url(engine.url), files=folder.name, bytes=num_bytes, seconds=seconds)
        body = ReloadWeights(path=str(folder), policy_version=version, files=sent)
        updated = engine.post("/reload_weights", body, Updated)
        return HandedOver(updated.policy_version, held_s=updated.held_s, sent_bytes=num_bytes)


class _Deltas:
    """What the newest version changes in the one before it, written when the first engine needs it. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saved: list[tuple[int, Path]] = []  # the newest two
        self._files: Sequence[Path] | None = None
        self._is_written = False

    def note_saved(self, folder: Path, version: int) -> None:
        with self._lock:
            self._saved = [*self._saved, (version, folder)][-2:]
            self._files, self._is_written = None, False
            kept = f"{DELTA_PREFIX}{self._saved[0][0]}"  # a slow engine may still receive it
            for old in folder.parent.glob(f"{DELTA_PREFIX}*"):
                if old.name != kept:
                    shutil.rmtree(old, ignore_errors=True)

    def files_for(self, served_version: int, folder: Path) -> Sequence[Path] | None:
        """The files for an engine with that version; None: it needs all weights. The proof of the publish shows
        whether the engine really had that version."""
        with self._lock:
            if len(self._saved) < 2:
                return None
            (base, earlier), (version, newest) = self._saved
            if served_version != base or folder != newest:
                return None
            if not self._is_written:
                self._is_written = True
                self._files = write_delta(earlier, newest, newest.parent / f"{DELTA_PREFIX}{version}", base)
            return self._files


class AdapterFiles:
    """Every version is a new adapter under a new name: engines cache by name, and running requests keep their adapter.
    The newest two stay loaded."""

    compares: Compared = "adapter"

    def __init__(self) -> None:
        self._suffix = secrets.token_hex(3)  # a resumed run must not reuse an adapter's name
        self._kept: list[str] = []  # names of the newest versions

    def save(self, policy: Publishable, root: Path, version: int) -> Path:
        self._kept = [*self._kept, self._name(version)][-NUM_KEPT:]
        return policy.save_adapter(root, f"adapter_v{version}")

    def hand_over(self, engine: EngineLink, folder: Path, version: int) -> HandedOver:
        deadline_s = awake_s() + engine.timeout_s
        body = LoadAdapter(adapter_path=str(folder), adapter_name=self._name(version), policy_version=version)
        sent_bytes = None
        try:
            loaded = engine.post("/lora/load", body, LoadedAdapter)
        except FolderNotUsable:
            body.files = send_files(engine, (*folder.glob("*.json"), *folder.glob(WEIGHTS_PATTERN)), deadline_s)
            sent_bytes = sum(file.num_bytes for file in body.files)
            loaded = engine.post("/lora/load", body, LoadedAdapter)
        return HandedOver(loaded.policy_version, adapter=loaded.adapter_name, sent_bytes=sent_bytes)

    def clean_up(self, engine: EngineLink, handed: HandedOver) -> None:
        unload_other_adapters(engine, [*self._kept, *([handed.adapter] if handed.adapter else [])])

    def _name(self, version: int) -> str:
        return f"adapter_v{version}-{self._suffix}"
