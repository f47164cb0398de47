"""Describe where each parameter is in shared memory, and map vLLM's fused parameters to Hugging Face names. Pure.

vLLM stacks q, k and v of a layer by rows into one matrix, gate and up into another, and pads the vocabulary to whole
blocks. So each parameter of a dense model is a range of rows of one of vLLM's:

    model.layers.0.self_attn.k_proj.weight  =  model.layers.0.self_attn.qkv_proj.weight[576:768]

If vLLM is split over several workers (tensor parallel), each has a part of these: rows of q, k, v, gate, up and the
vocabulary, columns of o and down, all of a norm. Each worker stacks its own rows of q, k and v. With fewer KV heads
than workers, several workers have the same head.

Anything that does not fit exactly (experts, quantized weights) is refused by name: a wrong mapping would train and
serve nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from treadle.errors import SyncError
from treadle.sync.gate import ProcessIdentity
from treadle.wire.bridge import WeightPart

ALIGNMENT = 64  # bytes; a cache line, so that every parameter starts where vector loads are fast

BYTES_PER_ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4}


class CudaStorage(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation on the engine's GPU, as exported by CUDA IPC (shared_memory.py)."""

    device_uuid: str
    handle: bytes  # base64 in JSON, like the other two
    num_bytes: int
    offset: int  # of the storage in CUDA's allocation
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    needs_event: bool


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """One contiguous parameter, in the file or in one of the GPU storages."""

    name: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file, or of the storage
    storage: int = 0  # index into the layout's storages; 0 for a file


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """All weights. A tied parameter appears once, under the name that the model registered first."""

    path: str  # of the file; empty if the weights are in `storages`
    model: str  # the folder the weights were loaded from
    dtype: str
    num_bytes: int
    parameters: tuple[Placement, ...]
    storages: tuple[CudaStorage, ...] = ()
    gate: str = ""  # the file at which the engine pauses (gate.py)
    # The current state, filled in by the engine on request.
    policy_version: int | None = None  # None: unknown
    is_held: bool = False  # paused for a publish: the weights may be half written
    owner: ProcessIdentity | None = None  # the process that created the file; None: unknown


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


# ---- fused parameters of vLLM

Shape = tuple[int, ...]

VOCABULARY_BLOCK = 64  # vLLM pads the rows of embeddings and output layer to a multiple of this
_ADAPTER_WRAP = ".base_layer."  # in the names of parameters that are wrapped for adapters
_REPLICATED = ("k_proj", "v_proj")  # where there are fewer KV heads than workers
REFUSAL_FIX = "only dense, unquantised models take weights; of others train adapters (--weight-bridge-mode lora_only)"


@dataclass(frozen=True)
class Worker:
    """One of the processes that vLLM splits a model over (tensor parallel)."""

    rank: int = 0
    num_workers: int = 1

    def share_of(self, size: int, num_parts: int) -> tuple[int, int]:
        """(start, length) of this worker's part of `size` rows or columns in `num_parts` equal parts; with fewer parts
        than workers, workers in sequence have the same one. Length 0: it cannot be divided.

        >>> [Worker(rank, 4).share_of(32, 2) for rank in range(4)]
        [(0, 16), (0, 16), (16, 16), (16, 16)]
        """
        if size % num_parts or self.num_workers % num_parts:
            return 0, 0
        length = size // num_parts
        return self.rank // (self.num_workers // num_parts) * length, length


ONLY_WORKER = Worker()


@dataclass(frozen=True)
class Slice:
    """`part` of the Hugging Face parameter `name` is `part_shape[0]` rows of vLLM's `source`, from `first_row` on."""

    name: str
    source: str
    first_row: int
    shape: Shape  # of the whole parameter
    part: WeightPart

    @property
    def part_shape(self) -> Shape:
        return tuple(self.part.length if dim == self.part.dim else size for dim, size in enumerate(self.shape))


def map_fused(
    wanted: Mapping[str, Shape],
    served: Mapping[str, Shape],
    packed: Mapping[str, Sequence[str]],
    *,
    vocab_size: int,
    num_kv_heads: int = 0,
    worker: Worker = ONLY_WORKER,
) -> tuple[Slice, ...]:
    """Find every parameter of the Hugging Face model (`wanted`), or the worker's part of it, in vLLM's (`served`); all
    of both must be used.

    `packed` is the model's table of stacked parameters: {"qkv_proj": ["q_proj", "k_proj", "v_proj"], ...}. A tied
    parameter is named once on each side.

    >>> map_fused({"up.weight": (4, 2)}, {"both.weight": (8, 2)}, {"both": ["gate", "up"]}, vocab_size=9)
    Traceback (most recent call last):
    treadle.errors.SyncError: up.weight is stacked with gate.weight in the engine, which this model does not have
      -> only dense, unquantised models take weights; of others train adapters (--weight-bridge-mode lora_only)
    """
    sources = {plain_name(name): name for name in served}
    slices = []
    for name, shape in wanted.items():
        if name in sources:
            source = sources[name]
            found = _find_alone(name, source, shape, served[source], vocab_size, worker)
        else:
            found = _find_stacked(name, wanted, sources, served, packed, num_kv_heads, worker)
        slices.append(found)
    unused = sorted(set(served) - {s.source for s in slices})
    if unused:
        raise SyncError(f"the engine has {unused[0]}, which no parameter of this model is part of", fix=REFUSAL_FIX)
    return tuple(slices)


def place_slices(fused: Layout, slices: Sequence[Slice]) -> Layout:
    """The same memory under Hugging Face names. `fused` is the layout of vLLM's own parameters."""
    sources = {plain_name(p.name): p for p in fused.parameters}  # they may have been wrapped for adapters since
    element = BYTES_PER_ELEMENT[fused.dtype]
    placements = []
    for s in slices:
        source = sources[plain_name(s.source)]
        offset = source.offset + s.first_row * math.prod(s.part_shape[1:]) * element
        placements.append(Placement(name=s.name, shape=s.part_shape, offset=offset, storage=source.storage))
    return msgspec.structs.replace(fused, parameters=tuple(placements))


def plain_name(name: str) -> str:
    """A parameter's name without the prefix that wrapping for adapters adds.

    >>> plain_name("model.layers.0.mlp.down_proj.base_layer.weight")
    'model.layers.0.mlp.down_proj.weight'
    """
    return name.replace(_ADAPTER_WRAP, ".")


def _find_alone(name: str, source: str, shape: Shape, served: Shape, vocab_size: int, worker: Worker) -> Slice:
    """A parameter that vLLM stacks with no other: whole, or split by rows or columns, or a padded vocabulary."""
    if served == shape:
        return Slice(name, source, 0, shape, WeightPart(0, 0, shape[0]))
    for dim in range(len(shape)):
        start, length = worker.share_of(shape[dim], worker.num_workers)
        if length and served == (*shape[:dim], length, *shape[dim + 1 :]):
            return Slice(name, source, 0, shape, WeightPart(dim, start, length))
    padded = -(-vocab_size // VOCABULARY_BLOCK) * VOCABULARY_BLOCK
    start, length = worker.share_of(padded, worker.num_workers)
    if length and shape[:1] == (vocab_size,) and served == (length, *shape[1:]):
        start = min(start, vocab_size)  # the last workers may have few rows, or none, besides the padding
        return Slice(name, source, 0, shape, WeightPart(0, start, min(length, vocab_size - start)))
    raise _misfit(name, shape, source, served, worker)


def _find_stacked(
    name: str,
    wanted: Mapping[str, Shape],
    sources: Mapping[str, str],
    served: Mapping[str, Shape],
    packed: Mapping[str, Sequence[str]],
    num_kv_heads: int,
    worker: Worker,
) -> Slice:
    module, _, leaf = name.rpartition(".")
    owner, _, part = module.rpartition(".")
    prefix = f"{owner}." if owner else ""
    for stack, parts in packed.items():
        source = sources.get(f"{prefix}{stack}.{leaf}")
        if part not in parts or source is None:
            continue
        siblings = [f"{prefix}{sibling}.{leaf}" for sibling in parts]
        absent = [sibling for sibling in siblings if sibling not in wanted]
        if absent:
            raise SyncError(
                f"{name} is stacked with {absent[0]} in the engine, which this model does not have", fix=REFUSAL_FIX
            )
        shares = [
            worker.share_of(wanted[sibling][0], min(worker.num_workers, num_kv_heads or worker.num_workers))
            if label in _REPLICATED
            else worker.share_of(wanted[sibling][0], worker.num_workers)
            for label, sibling in zip(parts, siblings, strict=True)
        ]
        rows, position = [length for _, length in shares], parts.index(part)
        if not all(rows) or served[source] != (sum(rows), *wanted[name][1:]):
            raise _misfit(name, wanted[name], source, served[source], worker)
        return Slice(name, source, sum(rows[:position]), wanted[name], WeightPart(0, *shares[position]))
    raise SyncError(f"the engine has no parameter that {name} is part of", fix=REFUSAL_FIX)


def _misfit(name: str, shape: Shape, source: str, served: Shape, worker: Worker) -> SyncError:
    split = f" on worker {worker.rank} of {worker.num_workers}" if worker.num_workers > 1 else ""
    return SyncError(
        f"{name} has the shape {list(shape)}, the engine's {source} {list(served)}{split}: one is no part of the other",
        fix=REFUSAL_FIX,
    )
