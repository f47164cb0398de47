"""Find, encode and apply the elements of a weight whose bits changed. No I/O.

In a weights file a weight is one tensor, or two if only some of its elements are sent:

    <name>            the whole weight
    <name>#indices    indices into the flattened weight, ascending
    <name>#values     the new values, in the weight's number format

The file's metadata contain the base version (DELTA_FROM). Values are set, not added: applying them twice is harmless.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DELTA_FROM = "treadle_delta_from"
COMPARED = (torch.bfloat16, torch.float16)  # number formats that are compared element by element
INDICES, VALUES = "#indices", "#values"
MAX_INT32_ELEMENTS = 2**31
CHUNK = 1 << 24  # elements compared at a time, to bound the temporary memory
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # compares bits, not floating-point values


@dataclass(frozen=True, eq=False)
class Changes:
    """The changed elements of one weight, in host memory."""

    indices: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.indices.nbytes + self.values.nbytes


WeightUpdate = Tensor | Changes  # a whole weight, or its changed elements


@torch.no_grad()
def find_changes(new: Tensor, old: Tensor) -> Changes:
    """Where the bits of `new` differ from `old`; compared on the device of `new`, chunk by chunk.

    >>> changes = find_changes(torch.tensor([1.0, -0.0, 3.0]).half(), torch.tensor([1.0, 0.0, 3.0]).half())
    >>> changes.indices.tolist(), changes.values.tolist()
    ([1], [-0.0])
    """
    new_bits, old_bits = _bits(new.contiguous()), _bits(old)
    index_type = index_dtype(new.numel())
    indices, values = [torch.empty(0, dtype=index_type)], [new_bits.new_empty(0, device="cpu")]
    for start in range(0, len(new_bits), CHUNK):
        part = new_bits[start : start + CHUNK]
        differs = part != old_bits[start : start + CHUNK].to(part.device)
        # On a CPU numpy is several times faster than torch, because it skips words of false.
        found = differs.nonzero().view(-1) if differs.is_cuda else torch.from_numpy(np.flatnonzero(differs.numpy()))
        indices.append((found + start).to(index_type).cpu())
        values.append(part[found].cpu())
    return Changes(torch.cat(indices), torch.cat(values).view(new.dtype))


def index_dtype(num_elements: int) -> torch.dtype:
    return torch.int32 if num_elements <= MAX_INT32_ELEMENTS else torch.int64


def smaller_form(new: Tensor, changes: Changes) -> WeightUpdate:
    return changes if changes.nbytes < new.nbytes else new.detach().cpu()


@torch.no_grad()
def set_weight(weight: Tensor, update: WeightUpdate) -> None:
    """Apply an update that fits (see `misfit`)."""
    if isinstance(update, Tensor):
        weight.copy_(update)
        return
    bits, new_bits = _bits(weight), _bits(update.values)
    for start in range(0, len(new_bits), CHUNK):
        part = slice(start, start + CHUNK)
        indices = update.indices[part].to(bits.device, torch.int64)
        bits.index_copy_(0, indices, new_bits[part].to(bits.device))


def as_tensors(updates: Mapping[str, WeightUpdate]) -> dict[str, Tensor]:
    """Encode updates as the tensors of a file."""
    tensors: dict[str, Tensor] = {}
    for name, update in updates.items():
        if isinstance(update, Tensor):
            tensors[name] = update
        else:
            tensors |= {name + INDICES: update.indices, name + VALUES: update.values}
    return tensors


def from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, WeightUpdate]:
    """Decode the tensors of a file; ValueError if one of a pair is missing, or a weight appears in both forms."""
    updates: dict[str, WeightUpdate] = {
        name: tensor for name, tensor in tensors.items() if not name.endswith((INDICES, VALUES))
    }
    for name in {name.removesuffix(INDICES).removesuffix(VALUES): None for name in tensors if name not in updates}:
        indices, values = tensors.get(name + INDICES), tensors.get(name + VALUES)
        if indices is None or values is None or name in updates:
            raise ValueError(f"{name} must be whole, or both {name}{INDICES} and {name}{VALUES}")
        updates[name] = Changes(indices, values)
    return updates


def misfit(update: WeightUpdate, shape: Sequence[int], dtype: torch.dtype) -> str | None:
    """Why `update` cannot be applied to a weight of this shape and number format; None if it can."""
    if isinstance(update, Changes):
        return _misfit_of_changes(update.indices, update.values, math.prod(shape), dtype)
    if list(update.shape) != list(shape) or not update.is_floating_point():
        return f"it is {list(update.shape)} {update.dtype}, the engine's is {list(shape)}"
    return None


def _misfit_of_changes(indices: Tensor, values: Tensor, num_elements: int, dtype: torch.dtype) -> str | None:
    if values.dtype != dtype:  # a whole weight may be converted, single elements may not
        return f"its changed elements are {values.dtype}, the engine's are {dtype}"
    if indices.ndim != 1 or indices.shape != values.shape or indices.dtype not in (torch.int32, torch.int64):
        return f"it has {list(indices.shape)} {indices.dtype} indices for {list(values.shape)} values"
    if (indices[1:] <= indices[:-1]).any():
        return "its indices do not rise"
    if len(indices) and not (indices[0] >= 0 and indices[-1] < num_elements):
        return f"its indices go from {int(indices[0])} to {int(indices[-1])}, of {num_elements} elements"
    return None


def _bits(weight: Tensor) -> Tensor:
    """The flattened elements as integers in the same memory: -0.0 differs from 0.0, and a NaN equals itself."""
    return weight.detach().view(-1).view(_BITS[weight.element_size()])
