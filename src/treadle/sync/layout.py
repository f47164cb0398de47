"""Describe where each parameter is in shared memory, and map vLLM's fused parameters to Hugging Face names. Pure.

vLLM stacks q, k and v of a layer by rows into one matrix, gate and up into another, and pads the vocabulary to whole
blocks. So each parameter of a dense model is a range of rows of one of vLLM's:

    model.layers.0.self_attn.k_proj.weight  =  model.layers.0.self_attn.qkv_proj.weight[576:768]

Anything that does not fit exactly (experts, quantized weights, a model split over GPUs) is refused by name: a wrong
mapping would train and serve nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from treadle.errors import SyncError
from treadle.sync.gate import ProcessIdentity

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
REFUSAL_FIX = (
    "only dense, unquantised models that are not split over GPUs take weights; of others train adapters "
    "(--weight-bridge-mode lora_only)"
)


@dataclass(frozen=True)
class Slice:
    """The Hugging Face parameter `name` is `shape[0]` rows of vLLM's `source`, starting at `first_row`."""

    name: str
    source: str
    first_row: int
    shape: Shape


def map_fused(
    wanted: Mapping[str, Shape],
    served: Mapping[str, Shape],
    packed: Mapping[str, Sequence[str]],
    *,
    vocab_size: int,
) -> tuple[Slice, ...]:
    """Find every parameter of the Hugging Face model (`wanted`) in vLLM's (`served`); all of both must be used.

    `packed` is the model's table of stacked parameters: {"qkv_proj": ["q_proj", "k_proj", "v_proj"], ...}. A tied
    parameter is named once on each side.

    >>> map_fused({"up.weight": (4, 2)}, {"both.weight": (8, 2)}, {"both": ["gate", "up"]}, vocab_size=9)
    Traceback (most recent call last):
    treadle.errors.SyncError: up.weight is stacked with gate.weight in the engine, which this model does not have
      -> only dense, unquantised models that are not split over GPUs take weights; of others train adapters \
(--weight-bridge-mode lora_only)
    """
    sources = {plain_name(name): name for name in served}
    slices = []
    for name, shape in wanted.items():
        if name in sources:
            source, first_row, num_rows = sources[name], 0, shape[0]
        else:
            source, first_row, num_rows = _find_stacked(name, wanted, sources, packed)
        _check_shape(name, shape, num_rows, source, served[source], vocab_size)
        slices.append(Slice(name, source, first_row, shape))
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
        offset = source.offset + s.first_row * math.prod(s.shape[1:]) * element
        placements.append(Placement(name=s.name, shape=s.shape, offset=offset, storage=source.storage))
    return msgspec.structs.replace(fused, parameters=tuple(placements))


def plain_name(name: str) -> str:
    """A parameter's name without the prefix that wrapping for adapters adds.

    >>> plain_name("model.layers.0.mlp.down_proj.base_layer.weight")
    'model.layers.0.mlp.down_proj.weight'
    """
    return name.replace(_ADAPTER_WRAP, ".")


def _find_stacked(
    name: str, wanted: Mapping[str, Shape], sources: Mapping[str, str], packed: Mapping[str, Sequence[str]]
) -> tuple[str, int, int]:
    """(vLLM's parameter, first row, total rows stacked in it)."""
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
        rows = [wanted[sibling][0] for sibling in siblings]
        position = parts.index(part)
        return source, sum(rows[:position]), sum(rows)
    raise SyncError(f"the engine has no parameter that {name} is part of", fix=REFUSAL_FIX)


def _check_shape(name: str, shape: Shape, num_rows: int, source: str, source_shape: Shape, vocab_size: int) -> None:
    """The stacked parameters must fill `source`; only a vocabulary may be padded."""
    same_width = source_shape[1:] == shape[1:]
    padded = -(-vocab_size // VOCABULARY_BLOCK) * VOCABULARY_BLOCK
    is_padded_vocabulary = num_rows == vocab_size and source_shape[:1] == (padded,)
    if same_width and (source_shape[:1] == (num_rows,) or is_padded_vocabulary):
        return
    raise SyncError(
        f"{name} has the shape {list(shape)}, the engine's {source} {list(source_shape)}: one is no part of the other",
        fix=REFUSAL_FIX,
    )
