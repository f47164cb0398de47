"""Where each parameter lies in shared memory: a file, or a GPU's. Pure: names, shapes and offsets, no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from treadle.sync.owner import Owner

ALIGNMENT = 64  # bytes; a cache line, so that every parameter starts where vector loads are fast

BYTES_PER_ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4}


class CudaStorage(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation on the engine's GPU, as another process opens it (cuda_ipc.py)."""

    device_uuid: str
    handle: str  # base64, as are the other two
    num_bytes: int
    offset: int  # of the storage in the block that CUDA gave out
    counter_handle: str
    counter_offset: int
    event_handle: str
    needs_event: bool


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter: contiguous, in the file or in one of the GPU's storages."""

    name: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file, or of the storage
    storage: int = 0  # which of the layout's storages; a file is one

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """All weights. Tied parameters appear once, under the name the model registered first."""

    path: str  # of the file; empty when the weights lie in `storages`
    model: str  # the folder the weights were loaded from
    dtype: str
    num_bytes: int
    parameters: tuple[Placement, ...]
    storages: tuple[CudaStorage, ...] = ()
    gate: str = ""  # the file in which the engine says that it stands still (gate.py)
    # What the bytes are at this moment; the engine fills it in when it is asked.
    policy_version: int | None = None  # None: it does not say
    is_held: bool = False  # paused for a publish: the weights may be half written
    owner: Owner | None = None  # the process that made the file; None: it does not say


def plan_layout(path: str, model: str, dtype: str, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Layout:
    """Lay parameters end to end, each on an aligned offset.

    >>> plan_layout("w", "m", "bfloat16", [("a", (3,)), ("b", (2, 2))]).parameters[1].offset
    64
    """
    offset = 0
    placements = []
    for name, shape in shapes:
        placements.append(Placement(name=name, shape=shape, offset=offset))
        size = math.prod(shape) * BYTES_PER_ELEMENT[dtype]
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return Layout(path=path, model=model, dtype=dtype, num_bytes=offset, parameters=tuple(placements))
