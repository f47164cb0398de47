"""Which rows of which parameter of vLLM a Hugging Face parameter is. Pure: names and shapes, no tensors.

vLLM keeps q, k and v of a layer as one matrix, gate and up as another, stacked by rows; its vocabulary is padded to
whole blocks. So a dense model's parameter, as a trainer knows it, is always a run of rows of one of vLLM's:

    model.layers.0.self_attn.k_proj.weight  =  model.layers.0.self_attn.qkv_proj.weight[576:768]

Whatever does not fit this exactly (experts, quantised weights, a model split over GPUs) is refused by name: a weight
that is mapped wrongly would train and serve nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from treadle.errors import SyncError
from treadle.sync.layout import BYTES_PER_ELEMENT, Layout, Placement

Shape = tuple[int, ...]

VOCABULARY_BLOCK = 64  # vLLM pads the rows of embeddings and output to a multiple of this
_ADAPTER_WRAP = ".base_layer."  # between a wrapped module's name and its parameter's, when adapters are on
REFUSAL_FIX = (
    "only dense, unquantised models that are not split over GPUs take weights; of others train adapters "
    "(--weight-bridge-mode lora_only)"
)


@dataclass(frozen=True)
class Slice:
    """The Hugging Face parameter `name` is `shape[0]` rows of vLLM's `source`, from `first_row` on."""

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

    `packed` is the model's own table of what is stacked: {"qkv_proj": ["q_proj", "k_proj", "v_proj"], ...}. A tied
    parameter is named once on either side.

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
        _refuse_other_shape(name, shape, num_rows, source, served[source], vocab_size)
        slices.append(Slice(name, source, first_row, shape))
    unused = sorted(set(served) - {s.source for s in slices})
    if unused:
        raise SyncError(f"the engine has {unused[0]}, which no parameter of this model is part of", fix=REFUSAL_FIX)
    return tuple(slices)


def place_slices(fused: Layout, slices: Sequence[Slice]) -> Layout:
    """The same memory, told in Hugging Face names. `fused` says where vLLM's own parameters lie in it."""
    sources = {plain_name(p.name): p for p in fused.parameters}  # wrapped for adapters since, perhaps
    element = BYTES_PER_ELEMENT[fused.dtype]
    placements = []
    for s in slices:
        source = sources[plain_name(s.source)]
        offset = source.offset + s.first_row * math.prod(s.shape[1:]) * element
        placements.append(Placement(name=s.name, shape=s.shape, offset=offset, storage=source.storage))
    return msgspec.structs.replace(fused, parameters=tuple(placements))


def plain_name(name: str) -> str:
    """A parameter's name without what the wrapping for adapters adds to it.

    >>> plain_name("model.layers.0.mlp.down_proj.base_layer.weight")
    'model.layers.0.mlp.down_proj.weight'
    """
    return name.replace(_ADAPTER_WRAP, ".")


def _find_stacked(
    name: str, wanted: Mapping[str, Shape], sources: Mapping[str, str], packed: Mapping[str, Sequence[str]]
) -> tuple[str, int, int]:
    """(vLLM's parameter, first row, rows of all that is stacked in it)."""
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
        place = parts.index(part)
        return source, sum(rows[:place]), sum(rows)
    raise SyncError(f"the engine has no parameter that {name} is part of", fix=REFUSAL_FIX)


def _refuse_other_shape(
    name: str, shape: Shape, num_rows: int, source: str, source_shape: Shape, vocab_size: int
) -> None:
    """What lies in `source` together must fill it; only a vocabulary may be padded."""
    same_width = source_shape[1:] == shape[1:]
    padded = -(-vocab_size // VOCABULARY_BLOCK) * VOCABULARY_BLOCK
    is_padded_vocabulary = num_rows == vocab_size and source_shape[:1] == (padded,)
    if same_width and (source_shape[:1] == (num_rows,) or is_padded_vocabulary):
        return
    raise SyncError(
        f"{name} has the shape {list(shape)}, the engine's {source} {list(source_shape)}: one is no part of the other",
        fix=REFUSAL_FIX,
    )
