"""Folders that appear whole or not at all, and that prove later that they are whole.

.step_25.partial/   being written, or half deleted       .step_25.old/   being replaced
step_25/            complete: every file synced, then the folder renamed, then its parent synced
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from treadle.errors import DiskFull

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
SMALL_BYTES = 1 << 20
SHARD_BYTES = 128 << 20  # a file is copied in memory while it is written, so state is written in pieces


def write_folder(root: Path, name: str, fill: Callable[[Path], None], *, is_durable: bool = True) -> Path:
    """Let `fill` write the files of a folder, then make it `root/name`, in place of one that is there already.
    `is_durable`: what is written outlives a loss of power. It outlives the end of this process in any case.

    When `fill` fails, what it wrote is removed and nothing has changed; a full disk is DiskFull, wherever it was met.
    """
    staging, target, old = staging_folder(root, name), root / name, root / f".{name}.old"
    shutil.rmtree(staging, ignore_errors=True)
    with room_for(target):
        try:
            staging.mkdir()
            fill(staging)
            if is_durable:
                for file in staging.iterdir():
                    _sync(file)
                _sync(staging)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        if target.exists():
            target.rename(old)
        staging.rename(target)
        if is_durable:
            _sync(root)
    shutil.rmtree(old, ignore_errors=True)
    return target


def staging_folder(root: Path, name: str) -> Path:
    """Where the files of `root/name` are while it is being written."""
    return root / f".{name}.partial"


def remove_folder(folder: Path) -> None:
    """Delete a folder such that it is never seen half deleted."""
    doomed = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def clear_leftovers(root: Path) -> None:
    """What a killed process left: half-written folders go; a replaced one stays when nothing took its place."""
    for half in root.glob(".*.partial"):
        shutil.rmtree(half)
    for old in root.glob(".*.old"):
        target = root / old.name.removeprefix(".").removesuffix(".old")
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)


def write_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    save_file(_gathered(tensors), file, metadata={"format": "pt", **(metadata or {})})


def _gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous. Small ones on a GPU are brought to the host together: a card that others use too is waited for once
    and not for each of them."""
    found = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    small = {name: tensor for name, tensor in found.items() if tensor.is_cuda and tensor.nbytes <= SMALL_BYTES}
    return found | host_copies(small)


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """
    >>> host_copies({"a": torch.ones(2, 2), "b": torch.zeros(3)})["a"].tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    found: dict[str, Tensor] = {}
    for kind in {(tensor.device, tensor.dtype) for tensor in tensors.values()}:
        same = {name: tensor for name, tensor in tensors.items() if (tensor.device, tensor.dtype) == kind}
        together = torch.cat([tensor.view(-1) for tensor in same.values()]).cpu()
        parts = together.split([tensor.numel() for tensor in same.values()])
        found |= {name: part.view(same[name].shape) for name, part in zip(same, parts, strict=True)}
    return found


def shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, in dicts of about SHARD_BYTES."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def seal(path: Path) -> str:
    """Make a written file durable; its sha256."""
    _sync(path)
    return sha256(path)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_all(paths: list[Path]) -> list[str]:
    with ThreadPoolExecutor() as pool:  # hashing does not hold the interpreter's lock
        return list(pool.map(sha256, paths))


@contextmanager
def room_for(folder: Path) -> Iterator[None]:
    """Tell a full disk, or a full quota, from all other errors."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not _is_full(error):
            raise
        raise DiskFull(
            f"the disk is full while writing {folder}; the checkpoint before it is kept",
            fix="free some space and continue with treadle run --resume",
        ) from error


def _is_full(error: OSError | SafetensorError) -> bool:
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    # safetensors puts the operating system's errors in words of its own: "... No space left on device (os error 28)"
    return any(f"(os error {number})" in str(error) for number in NO_ROOM)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
