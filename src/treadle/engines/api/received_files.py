"""Keep files of a published version that a trainer sends, because this engine does not see the trainer's folder.

    POST /bridge/files/weights_v7/model.safetensors?offset=0&size=N       parts, in order
    POST /reload_weights {"path": ".../weights_v7", "files": [...]}       loads them if sizes and hashes are right

    ROOT/engine-XXXXXXXX/weights_v7/model.safetensors                     deleted when the engine has loaded it

The folder of an engine is locked while the engine runs. Folders of killed engines are deleted by the next one.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.errors import EngineError, RequestError
from treadle.wire.bridge import SentFile

MAX_PART_BYTES = 64 << 20
MAX_FILES = 4096
_PREFIX = "engine-"
_FOLDER = re.compile(r"(weights|delta|adapter)_v\d{1,19}", re.ASCII)
_FILE = re.compile(r"[A-Za-z0-9][\w.-]{0,199}\.(safetensors|json)", re.ASCII)
_NUMBER = re.compile(r"\d{1,15}", re.ASCII)


@dataclass(frozen=True)
class FilePart:
    """Where the bytes of a request belong."""

    folder: str
    name: str
    offset: int
    size: int  # of the whole file

    def check_length(self, num_bytes: int) -> None:
        """Refuse more bytes than were announced, before they are kept."""
        if num_bytes > MAX_PART_BYTES:
            raise RequestError(f"a part of a file is larger than {MAX_PART_BYTES >> 20} MiB", fix="send smaller parts")
        if self.offset + num_bytes > self.size:
            raise RequestError(f"{self.name} was announced with {self.size} bytes, and more were sent")


def read_part(folder: str, name: str, query: Mapping[str, str]) -> FilePart:
    """Only names of published versions and of their files are accepted, so no path leads out of the folder.

    >>> read_part("weights_v7", "model.safetensors", {"offset": "0", "size": "12"})
    FilePart(folder='weights_v7', name='model.safetensors', offset=0, size=12)
    """
    if not _FOLDER.fullmatch(folder) or not _FILE.fullmatch(name):
        raise RequestError(
            f"{folder[:100]}/{name[:100]} is not a file of a published version",
            fix="send *.safetensors and *.json of weights_vN, delta_vN or adapter_vN",
        )
    numbers = [query.get(key, "") for key in ("offset", "size")]
    if not all(map(_NUMBER.fullmatch, numbers)):
        raise RequestError("offset and size of the part are missing", fix="?offset=0&size=BYTES_OF_THE_FILE")
    return FilePart(folder, name, *map(int, numbers))


@dataclass
class _Arriving:
    size: int
    num_bytes: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


class ReceivedFiles:
    """At most one folder at a time: a further one replaces it. Any thread."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._own: Path | None = None  # made when the first file arrives
        self._held = -1  # descriptor of its lock
        self._folder = ""
        self._files: dict[str, _Arriving] = {}

    def write(self, part: FilePart, data: bytes | bytearray) -> int:
        """Append a part; returns the bytes of the file so far. A part at offset 0 begins the file."""
        part.check_length(len(data))
        with self._lock:
            try:
                if part.offset == 0:
                    self._begin(part)
                return self._append(part, data)
            except OSError as error:
                raise EngineError(
                    f"{part.name} cannot be kept in {self._root}: {error.strerror or error}",
                    fix="free some space there, or set TREADLE_CACHE to a folder on another disk",
                ) from None

    def _append(self, part: FilePart, data: bytes | bytearray) -> int:
        arriving = self._files.get(part.name) if part.folder == self._folder else None
        if arriving is None or self._own is None or (part.offset, part.size) != (arriving.num_bytes, arriving.size):
            raise RequestError(
                f"a part of {part.name} was sent at {part.offset}, and the engine has "
                f"{0 if arriving is None else arriving.num_bytes} bytes of it",
                fix="send the file again, from offset 0",
            )
        with (self._own / part.folder / part.name).open("ab" if part.offset else "wb") as file:
            file.write(data)
        arriving.digest.update(data)
        arriving.num_bytes += len(data)
        return arriving.num_bytes

    @asynccontextmanager
    async def taken(self, path: str, files: Sequence[SentFile]) -> AsyncIterator[Path]:
        """The folder named by the last part of `path`, if it has exactly these files. Deleted at the end, in a thread:
        that of a large file takes long."""
        folder = await asyncio.to_thread(self._take, Path(path).name, files)
        try:
            yield folder
        finally:
            await asyncio.to_thread(shutil.rmtree, folder.parent, ignore_errors=True)

    def _take(self, name: str, files: Sequence[SentFile]) -> Path:
        """Move the folder to where it is loaded from, so that the next version may arrive."""
        with self._lock:
            folder = self._check(name, files)
            self._folder, self._files = "", {}
            shutil.rmtree(folder.parent / "loading", ignore_errors=True)
            loading = folder.parent / "loading" / name
            loading.parent.mkdir()
            return folder.rename(loading)

    def close(self) -> None:
        with self._lock:
            if self._own is not None:
                shutil.rmtree(self._own, ignore_errors=True)
                os.close(self._held)
                self._own = None

    def _begin(self, part: FilePart) -> None:
        """Begin a file, and its folder if it is the first."""
        if self._own is None:
            self._own, self._held = _lock_own_folder(self._root)
        if self._folder != part.folder:
            if self._folder:
                shutil.rmtree(self._own / self._folder, ignore_errors=True)
            (self._own / part.folder).mkdir()
            self._folder, self._files = part.folder, {}
        if len(self._files) >= MAX_FILES:
            raise RequestError(f"{part.folder} has more than {MAX_FILES} files")
        self._check_room(part)
        self._files[part.name] = _Arriving(part.size)

    def _check_room(self, part: FilePart) -> None:
        free = shutil.disk_usage(self._root).free
        if part.size > free:
            raise EngineError(
                f"{part.name} has {part.size / 1e9:.1f} GB, and {self._root} has room for {free / 1e9:.1f} GB",
                fix="free some space there, or set TREADLE_CACHE to a folder on another disk",
            )

    def _check(self, name: str, files: Sequence[SentFile]) -> Path:
        announced = {file.name: file for file in files}
        if self._own is None or name != self._folder or announced.keys() != self._files.keys():
            here = ", ".join(sorted(self._files)[:5]) or "nothing"
            raise RequestError(f"the files of {name[:100]} are not those that were sent: {here}", fix="send all files")
        for file in files:
            arrived = self._files[file.name]
            if (arrived.num_bytes, arrived.digest.hexdigest()) != (file.num_bytes, file.sha256):
                raise RequestError(
                    f"{file.name} arrived with {arrived.num_bytes} bytes and the sha256 "
                    f"{arrived.digest.hexdigest()}, and {file.num_bytes} bytes with {file.sha256} were sent",
                    fix="send it again",
                )
        return self._own / name


def _lock_own_folder(root: Path) -> tuple[Path, int]:
    """A new folder of this process, and the descriptor that locks it; first those of killed engines are deleted."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # locked, or deleted by another engine
            descriptor = _lock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)
    while True:
        own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))  # only this user may read it
        with suppress(OSError):  # another engine, which starts now, took it for one of a killed engine
            descriptor = _lock(own)
            if os.fstat(descriptor).st_nlink:
                return own, descriptor
            os.close(descriptor)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
