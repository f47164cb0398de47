"""Describe which part of each weight a process holds, and write only that part in place.

A worker of a tensor-parallel engine holds a range of rows, of columns, or all of a weight:

    q_proj on worker 1 of 2    [0, 128, 128]    rows 128 to 255       weight[128:256]
    o_proj on worker 1 of 2    [1, 128, 128]    columns 128 to 255    weight[:, 128:256]
    norm   on every worker     [0, 0, 256]      all of it

A part along any dimension is a range of columns of a matrix: the dimensions before it are the matrix' rows, it and the
dimensions after it are the columns. All functions here compute with that matrix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from treadle.errors import SyncError
from treadle.sync.delta import Changes, WeightUpdate, index_dtype, misfit
from treadle.wire.bridge import WeightPart

Shape = tuple[int, ...]
ShardMap = Sequence[Mapping[str, WeightPart]]  # of all workers, by rank
SAME_ENGINE_FIX = "use an engine of the same release"


def whole_part(shape: Sequence[int]) -> WeightPart:
    """
    >>> whole_part((4, 3))
    WeightPart(dim=0, start=0, length=4)
    """
    return WeightPart(0, 0, shape[0] if shape else 1)


def cut(weight: Tensor, part: WeightPart) -> Tensor:
    """The part of a full weight, as a view; not contiguous for columns."""
    return weight if weight.ndim == 0 else weight.narrow(part.dim, part.start, part.length)


def part_index(part: WeightPart) -> tuple[slice, ...]:
    """The same as an index, for slices of safetensors files.

    >>> part_index(WeightPart(1, 2, 3))
    (slice(None, None, None), slice(2, 5, None))
    """
    return (*itertools.repeat(slice(None), part.dim), slice(part.start, part.start + part.length))


@dataclass(frozen=True, eq=False)
class HeldWeight:
    """The memory of this process for a weight, or for a part of one."""

    tensor: Tensor
    shape: Shape  # of the whole weight
    part: WeightPart

    @property
    def is_whole(self) -> bool:
        return tuple(self.tensor.shape) == self.shape

    @cached_property
    def _columns(self) -> tuple[int, int, int]:
        """(columns of the whole weight's matrix, first and last + 1 that are held)."""
        shape = self.shape or (1,)
        inner = math.prod(shape[self.part.dim + 1 :])
        first = self.part.start * inner
        return shape[self.part.dim] * inner, first, first + self.part.length * inner

    @torch.no_grad()
    def write_run(self, start: int, stop: int, numbers: Tensor) -> None:
        """Write what is held of the elements `start` to `stop` of the whole, flattened weight; `numbers` are these."""
        width, first, last = self._columns
        if first == last:
            return
        own = self.tensor.detach().view(-1, last - first)
        position = start
        while position < stop:  # three times at most: the rest of a row, whole rows, the begin of a row
            row, column = divmod(position, width)
            num_rows = (stop - position) // width if column == 0 else 0
            end = position + num_rows * width if num_rows else min(stop, (row + 1) * width)
            piece = numbers[position - start : end - start]
            if num_rows:
                own[row : row + num_rows].copy_(piece.view(num_rows, width)[:, first:last])
            else:
                begin, finish = max(column, first), min(end - row * width, last)
                if begin < finish:
                    own[row, begin - first : finish - first].copy_(piece[begin - column : finish - column])
            position = end

    def own_update(self, update: WeightUpdate) -> WeightUpdate:
        """What is held of an update that fits; see `misfit`."""
        if isinstance(update, Tensor) or self.is_whole:
            return update
        width, first, last = self._columns
        indices = update.indices.to(torch.int64)
        column = indices % width
        is_held = (column >= first) & (column < last)
        own = (indices // width * (last - first) + column - first)[is_held]
        return Changes(own.to(index_dtype(self.tensor.numel())), update.values[is_held])

    def misfit(self, update: WeightUpdate) -> str | None:
        """Why an update cannot be applied; None if it can. Changes are of the whole weight, a tensor is the part."""
        if isinstance(update, Tensor):
            return misfit(update, self.tensor.shape, self.tensor.dtype)
        if not self.tensor.is_contiguous():
            return "the engine keeps it in an order of its own, so its elements have no places"
        return misfit(update, self.shape, self.tensor.dtype)


def as_held(weights: Mapping[str, Tensor | HeldWeight]) -> dict[str, HeldWeight]:
    """Plain tensors are weights that this process holds completely."""
    return {
        name: weight
        if isinstance(weight, HeldWeight)
        else HeldWeight(weight, tuple(weight.shape), whole_part(weight.shape))
        for name, weight in weights.items()
    }


# ---- all workers of an engine


def worker_name(worker: int, num_workers: int) -> str:
    return f"worker {worker} of {num_workers}"


def shard_name(weight: str, worker: int, num_workers: int) -> str:
    """The name of a worker's part in fingerprints and errors.

    >>> shard_name("norm.weight", 1, 2)
    'norm.weight on worker 1 of 2'
    """
    return f"{weight} on {worker_name(worker, num_workers)}"


def distinct_shards(weights: Iterable[tuple[str, Tensor]], workers: ShardMap) -> Iterator[tuple[str, Tensor]]:
    """Cut full weights into the parts of all workers, one weight at a time; a part that several workers hold comes
    once, under the name of the first."""
    for name, weight in weights:
        for worker, parts in enumerate(workers):
            if _first_holder(name, worker, workers) == worker:
                yield shard_name(name, worker, len(workers)), cut(weight, parts[name])


def for_every_holder(found: Mapping[str, str], workers: ShardMap) -> dict[str, str]:
    """What was found for each of `distinct_shards`, for every worker's part of every weight."""
    num = len(workers)
    return {
        shard_name(name, worker, num): found[shard_name(name, _first_holder(name, worker, workers), num)]
        for name in workers[0]
        for worker in range(num)
    }


def _first_holder(name: str, worker: int, workers: ShardMap) -> int:
    """The first worker that holds the same part of this weight."""
    return next(rank for rank, parts in enumerate(workers) if parts[name] == workers[worker][name])


def check_shards(shapes: Iterable[tuple[str, Shape]], workers: ShardMap) -> None:
    """Refuse parts that do not cover every weight exactly, in the order of the workers, or are of other weights.

    Several workers in sequence may hold the same part: KV heads are replicated where there are fewer than workers.
    """
    known = dict(shapes)
    for rank, parts in enumerate(workers):
        differing = sorted(known.keys() ^ parts.keys())
        if differing:
            who = "does not have" if differing[0] in known else "has, and the trainer does not"
            raise SyncError(
                f"{worker_name(rank, len(workers))} of the engine: {differing[0]} is a weight that it {who}",
                fix="give engine and trainer the same --model",
            )
    for name, shape in known.items():
        _check_cover(name, shape, [parts[name] for parts in workers])


def _check_cover(name: str, shape: Shape, parts: Sequence[WeightPart]) -> None:
    dim, end, former = parts[0].dim, 0, None
    size = (shape or (1,))[dim] if 0 <= dim < max(1, len(shape)) else -1
    for rank, part in enumerate(parts):
        if part != former:
            if part.dim != dim or part.start != end or part.length < 0:
                raise SyncError(
                    f"{shard_name(name, rank, len(parts))} is said to be {part.length} from {part.start} along "
                    f"dimension {part.dim}, where {end} along dimension {dim} comes next",
                    fix=SAME_ENGINE_FIX,
                )
            end, former = part.start + part.length, part
    if end != size:
        raise SyncError(
            f"the workers' parts of {name} end at {end} along dimension {dim}, its shape is {list(shape)}",
            fix=SAME_ENGINE_FIX,
        )
