"""The elements of a weight whose bits changed: found by the trainer, checked and set by the engine. No I/O.

In a file of weights a weight is one tensor, or two when only some of its elements are sent:

    <name>            the whole weight
    <name>#indices    which elements of the flattened weight, in rising order
    <name>#values     what these are now, in the weight's number format

The file's metadata name the version that the elements are counted from (DELTA_FROM). Values are set, never added, so
setting them twice is harmless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DELTA_FROM = "treadle_delta_from"
INDICES, VALUES = "#indices", "#values"
MAX_INT32_ELEMENTS = 2**31
CHUNK = 1 << 24  # elements that are looked at together: what that needs beside the weight stays small
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numbers that are equal when their bits are


@dataclass(frozen=True, eq=False)
class Changes:
    """Of one weight, in host memory."""

    indices: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.indices.nbytes + self.values.nbytes


Sent = Tensor | Changes  # of one weight: all of it, or what changed


@torch.no_grad()
def find_changes(new: Tensor, old: Tensor) -> Changes:
    """Where `new` has other bits than `old`; compared where `new` is, to which `old` goes piece by piece.

    >>> changes = find_changes(torch.tensor([1.0, -0.0, 3.0]).half(), torch.tensor([1.0, 0.0, 3.0]).half())
    >>> changes.indices.tolist(), changes.values.tolist()
    ([1], [-0.0])
    """
    new_bits, old_bits = _bits(new.contiguous()), _bits(old)
    index_type = index_dtype(new.numel())
    indices, values = [torch.empty(0, dtype=index_type)], [new_bits.new_empty(0, device="cpu")]
    for start in range(0, len(new_bits), CHUNK):
        part = new_bits[start : start + CHUNK]
        places = _places(part != old_bits[start : start + CHUNK].to(part.device))
        indices.append((places + start).to(index_type).cpu())
        values.append(part[places].cpu())
    return Changes(torch.cat(indices), torch.cat(values).view(new.dtype))


def index_dtype(num_elements: int) -> torch.dtype:
    return torch.int32 if num_elements <= MAX_INT32_ELEMENTS else torch.int64


def smaller_form(new: Tensor, changes: Changes) -> Sent:
    return changes if changes.nbytes < new.nbytes else new.detach().cpu()


@torch.no_grad()
def set_weight(weight: Tensor, sent: Sent) -> None:
    """What was sent must fit: see misfit."""
    if isinstance(sent, Tensor):
        weight.copy_(sent)
        return
    bits, new_bits = _bits(weight), _bits(sent.values)
    for start in range(0, len(new_bits), CHUNK):
        part = slice(start, start + CHUNK)
        places = sent.indices[part].to(bits.device, torch.int64)
        bits.index_copy_(0, places, new_bits[part].to(bits.device))


def as_tensors(sent: Mapping[str, Sent]) -> dict[str, Tensor]:
    """By the names that they have in a file."""
    tensors: dict[str, Tensor] = {}
    for name, what in sent.items():
        if isinstance(what, Tensor):
            tensors[name] = what
        else:
            tensors |= {name + INDICES: what.indices, name + VALUES: what.values}
    return tensors


def from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Sent]:
    """The reverse; ValueError where one of the two tensors of a weight is missing, or it is there whole as well."""
    sent: dict[str, Sent] = {name: t for name, t in tensors.items() if not name.endswith((INDICES, VALUES))}
    for name in {name.removesuffix(INDICES).removesuffix(VALUES): None for name in tensors if name not in sent}:
        indices, values = tensors.get(name + INDICES), tensors.get(name + VALUES)
        if indices is None or values is None or name in sent:
            raise ValueError(f"{name} must be whole, or both {name}{INDICES} and {name}{VALUES}")
        sent[name] = Changes(indices, values)
    return sent


def misfit(sent: Sent, weight: Tensor) -> str | None:
    """Why `weight` cannot take what was sent; None: it can."""
    if isinstance(sent, Changes):
        return _misfit_of_changes(sent.indices, sent.values, weight)
    if sent.shape != weight.shape or not sent.is_floating_point():
        return f"it is {list(sent.shape)} {sent.dtype}, the engine's is {list(weight.shape)}"
    return None


def _misfit_of_changes(indices: Tensor, values: Tensor, weight: Tensor) -> str | None:
    if values.dtype != weight.dtype:  # a whole weight may be converted; some elements of another format make none
        return f"its changed elements are {values.dtype}, the engine's are {weight.dtype}"
    if indices.ndim != 1 or indices.shape != values.shape or indices.dtype not in (torch.int32, torch.int64):
        return f"it has {list(indices.shape)} {indices.dtype} indices for {list(values.shape)} values"
    if (indices[1:] <= indices[:-1]).any():
        return "its indices do not rise"
    if len(indices) and not (indices[0] >= 0 and indices[-1] < weight.numel()):
        return f"its indices go from {int(indices[0])} to {int(indices[-1])}, of {weight.numel()} elements"
    if not weight.is_contiguous():
        return "the engine keeps it in an order of its own, so its elements have no places"
    return None


def _places(differs: Tensor) -> Tensor:
    """Where it is true. numpy steps over runs of false in words: several times as fast as torch on a CPU."""
    if differs.is_cuda:
        return differs.nonzero().view(-1)
    return torch.from_numpy(np.flatnonzero(differs.numpy()))


def _bits(weight: Tensor) -> Tensor:
    """The elements, flattened, as whole numbers in the same memory: -0.0 is not 0.0 then, and a NaN equals itself."""
    return weight.detach().view(-1).view(_BITS[weight.element_size()])
