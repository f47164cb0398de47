"""Weights that several processes see: in a file that they map, or on one GPU.

engine:  share_parameters(model, file)   puts its parameters into the file, or says where they lie on its GPU
trainer: bind_parameters(model, layout)  builds its model on the same bytes
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
import torch
from torch import nn

from treadle.errors import DiskFull, SyncError
from treadle.log import get_logger
from treadle.sync.cuda_ipc import locate_parameters, open_storage
from treadle.sync.gate import Gate, gate_beside
from treadle.sync.layout import Layout, plan_layout
from treadle.sync.owner import this_process

log = get_logger("sync")


def share_parameters(model: nn.Module, path: Path, model_folder: str) -> Layout:
    """Let a trainer reach every parameter of `model`.

    Parameters in main memory move into a new shared file at `path`; those on a GPU stay where they are (cuda_ipc.py).
    Beside it comes the gate at which the engine will stand still.
    """
    named = dict(model.named_parameters())  # a tied parameter comes once
    dtypes = {str(p.dtype).removeprefix("torch.") for p in named.values()}
    if len(dtypes) != 1:
        raise SyncError(f"shared weights have one number format, this model has {sorted(dtypes)}")
    if all(p.is_cuda for p in named.values()):
        layout = locate_parameters({n: p.data for n, p in named.items()}, model_folder, dtypes.pop())
    else:
        layout = _move_into_file(named, path, model_folder, dtypes.pop())
    gate = gate_beside(path.resolve())
    Gate.create(gate)
    layout = msgspec.structs.replace(layout, gate=str(gate))
    log.info("weights_shared", path=layout.path, megabytes=layout.num_bytes >> 20, parameters=len(named))
    return layout


def _move_into_file(named: dict[str, nn.Parameter], path: Path, model_folder: str, dtype: str) -> Layout:
    layout = plan_layout(str(path.resolve()), model_folder, dtype, ((n, tuple(p.shape)) for n, p in named.items()))
    layout = msgspec.structs.replace(layout, owner=this_process())
    _create(path, layout.num_bytes)
    views = map_weights(layout)
    for name, parameter in named.items():
        views[name].copy_(parameter.data)
        parameter.data = views[name]
    return layout


def bind_parameters(model: nn.Module, layout: Layout) -> None:
    """Make `model` (built without weights) stand on the bytes of `layout`; anything that does not map is refused."""
    views = map_weights(layout)
    missing = []
    for name, parameter in list(model.named_parameters()):
        view = views.pop(name, None)
        if view is None or view.shape != parameter.shape:
            missing.append(name)
            continue
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(view))
    if missing or views:
        raise SyncError(
            f"the engine's weights do not fit this model: not found {missing[:3]}, unused {list(views)[:3]}",
            fix="give engine and trainer the same model",
        )
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """The engine's own for as long as this lasts: two engines at one file would write over each other's weights. The
    lock goes with its process; what an engine that was killed has left behind is taken over."""
    path.parent.mkdir(parents=True, exist_ok=True)
    claim = path.with_name(path.name + ".claim")
    with _locked(claim, path):
        try:
            yield
        finally:
            remove_shared_file(path)
            claim.unlink(missing_ok=True)


def _locked(claim: Path, path: Path) -> IO[str]:
    while True:
        file = claim.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise SyncError(
                f"another engine shares its weights through {path}", fix="give each engine a --weights-file of its own"
            ) from None
        if claim.exists() and claim.stat().st_ino == os.fstat(file.fileno()).st_ino:
            return file
        file.close()  # whose it was has ended in between, and removed it


def remove_shared_file(path: Path) -> None:
    """And the gate beside it."""
    for file in (path, gate_beside(path)):
        with contextlib.suppress(FileNotFoundError):
            file.unlink()


def map_weights(layout: Layout) -> dict[str, torch.Tensor]:
    """The shared parameters, by name, in place."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    wholes = [open_storage(storage) for storage in layout.storages] or [_map_file(layout)]
    return {
        p.name: wholes[p.storage][p.offset : p.offset + p.num_elements * dtype.itemsize].view(dtype).view(p.shape)
        for p in layout.parameters
    }


def _map_file(layout: Layout) -> torch.Tensor:
    try:
        return torch.from_file(layout.path, shared=True, size=layout.num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise SyncError(
            f"cannot map the shared weights {layout.path}: {error}", fix="engine and trainer must be on one machine"
        ) from None


def _create(path: Path, num_bytes: int) -> None:
    """A new file of its full size; room is checked first, because a write to a full memory disk is a bus error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_shared_file(path)
    free = shutil.disk_usage(path.parent).free
    if free < num_bytes:
        raise DiskFull(
            f"{path.parent} has {free >> 20} MB free, the shared weights need {num_bytes >> 20} MB",
            fix="free some space there, or name another place with --weights-file",
        )
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(handle, num_bytes)
    finally:
        os.close(handle)
