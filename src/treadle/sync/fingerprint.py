"""A number that says whether two processes have the same weight, cheap enough for every publish.

A weight's bytes are read as 64-bit words and summed with odd factors, modulo 2^64: one changed, moved or swapped word
changes the sum. Of a large weight a part is read, its first and last block always and another part with every version,
so that a publish reads about a tenth of the model and two dozen publishes read all of it.

The blocks of many weights are gathered and summed together: weight by weight, a GPU would be given thousands of small
kernels, a tenth of a second in which the engine samples nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

BLOCK_WORDS = 1 << 11  # 16 KiB: its factors stay in a core's first cache
PARTS = 16
TURN_BYTES = 256 << 20  # of weights that are read together; a GPU's memory may be full
_GOLDEN = -7046029254386353131  # 2^64 divided by the golden ratio, odd, as a signed number


def fingerprints(weights: Iterable[tuple[str, Tensor]], policy_version: int) -> dict[str, str]:
    """The same for equal bytes in any process and on any device.

    >>> a, b = torch.arange(12, dtype=torch.float32), torch.ones(5)
    >>> fingerprints([("a", a), ("b", b)], 0) == {"a": fingerprint(a.clone(), 0), "b": fingerprint(b, 0)}
    True
    """
    return begin_fingerprints(weights, policy_version)()


def begin_fingerprints(weights: Iterable[tuple[str, Tensor]], policy_version: int) -> Callable[[], dict[str, str]]:
    """Of the weights as they are now. A GPU computes them while its process does something else; the call waits."""
    names: list[str] = []

    def told() -> Iterator[Tensor]:
        for name, weight in weights:
            names.append(name)
            yield weight

    sums = _begin_sums(told(), [part_of(policy_version)])
    return lambda: dict(zip(names, sums.read(), strict=True))


def fingerprint(weight: Tensor, policy_version: int) -> str:
    """Of one.

    >>> a = torch.arange(12, dtype=torch.float32)
    >>> fingerprint(a, 0) == fingerprint(a.clone(), 0), fingerprint(a, 0) == fingerprint(a.flip(0), 0)
    (True, False)
    """
    (found,) = _begin_sums([weight], [part_of(policy_version)]).read()
    return found


def whole_fingerprint(weight: Tensor) -> str:
    """Of every block; for finding out what changed, not for every publish."""
    (found,) = _begin_sums([weight], range(PARTS)).read()
    return found


def part_of(policy_version: int) -> int:
    """Which sixteenth is read: scattered, so that publishing every 2nd, 4th or 8th version reads all of them too.

    >>> [len({part_of(step * number) for number in range(24)}) for step in (1, 2, 4, 8)] == [PARTS] * 4
    True
    """
    return ((policy_version * _GOLDEN) % 2**64) >> 60


@dataclass(frozen=True, eq=False)
class _Sums:
    numbers: list[int]  # of each weight's elements
    totals: list[Tensor]  # stay on their device, where they may not be computed yet

    def read(self) -> list[str]:
        found = itertools.chain.from_iterable(total.tolist() for total in self.totals)
        return [f"{(total + num) & (2**64 - 1):016x}" for total, num in zip(found, self.numbers, strict=True)]


def _begin_sums(weights: Iterable[Tensor], parts: Sequence[int]) -> _Sums:
    """In turns: weights may be made as they are asked for, merged with adapters, and must not be there all at once."""
    sums = _Sums([], [])
    gathered: list[Tensor] = []
    num_bytes = 0
    for weight in weights:
        if gathered and (num_bytes >= TURN_BYTES or gathered[0].device != weight.device):
            sums.totals.append(_totals(gathered, parts))
            gathered, num_bytes = [], 0
        sums.numbers.append(weight.numel())
        gathered.append(weight)
        num_bytes += weight.nbytes
    if gathered:
        sums.totals.append(_totals(gathered, parts))
    return sums


def _words(weight: Tensor) -> Tensor:
    flat = weight.contiguous().view(-1)
    if weight.nbytes % 8:
        raw = flat.view(torch.uint8)
        return torch.nn.functional.pad(raw, (0, 8 - len(raw) % 8)).view(torch.int64)
    if flat.data_ptr() % 8:
        flat = flat.clone()  # a word must begin where words begin
    return flat.view(torch.int64)


@torch.inference_mode()  # views cost half as much, and they are most of the work
def _totals(weights: list[Tensor], parts: Sequence[int]) -> Tensor:
    """Of each, as words. What is left over after its whole blocks is a block too, and a short one."""
    words = [_words(weight) for weight in weights]
    device, lengths = words[0].device, tuple(map(len, words))
    none = words[0].new_empty(0)
    rests = [own[-(len(own) % BLOCK_WORDS) :] for own in words if len(own) % BLOCK_WORDS]
    total = _sums_between(torch.cat([none, *rests]), *_plan_of_rests(lengths, device))
    blocks = [_ends(own) for own in words if len(own) >= BLOCK_WORDS]
    gathered = torch.cat([none.view(0, BLOCK_WORDS), *blocks])
    total += _sums_between(_times(gathered, _factors(device)), *_plan_of_ends(lengths, device))
    for part in parts:
        blocks = [_every_16th(own, part) for own in words if len(own) >= (part + 1) * BLOCK_WORDS]
        gathered = torch.cat([none.view(0, BLOCK_WORDS), *blocks])
        total += _sums_between(_times(gathered, _factors(device)), *_plan_of_part(lengths, part, device))
    return total


def _ends(words: Tensor) -> Tensor:
    """The first and the last whole block, which may be one."""
    num = len(words) // BLOCK_WORDS
    return words.as_strided((min(num, 2), BLOCK_WORDS), ((num - 1) * BLOCK_WORDS, 1))


def _every_16th(words: Tensor, first: int) -> Tensor:
    num = len(range(first, len(words) // BLOCK_WORDS, PARTS))
    begin = words.storage_offset() + first * BLOCK_WORDS
    return words.as_strided((num, BLOCK_WORDS), (PARTS * BLOCK_WORDS, 1), begin)


def _times(words: Tensor, factors: Tensor) -> Tensor:
    """The product of a matrix with a vector; a GPU has none for whole numbers."""
    if words.is_cuda:
        return (words * factors).sum(-1)
    return words @ factors


def _sums_between(values: Tensor, factors: Tensor, ends: Tensor) -> Tensor:
    """Of the products up to each end, from the end before it."""
    running = torch.nn.functional.pad((values * factors).cumsum(0), (1, 0))[ends]
    return running.diff(prepend=running.new_zeros(1))


# The factors of everything that is gathered, and where each weight's end.
Plan = tuple[Tensor, Tensor]


@lru_cache(512)
def _plan_of_rests(lengths: tuple[int, ...], device: torch.device) -> Plan:
    return _plan([_factors(torch.device("cpu"))[: length % BLOCK_WORDS] for length in lengths], device)


@lru_cache(512)
def _plan_of_ends(lengths: tuple[int, ...], device: torch.device) -> Plan:
    factors = _factors(torch.device("cpu"))
    return _plan([factors[5 : 5 + min(2, length // BLOCK_WORDS)] for length in lengths], device)


@lru_cache(4096)  # a few kilobytes each
def _plan_of_part(lengths: tuple[int, ...], part: int, device: torch.device) -> Plan:
    """Different and odd for each block of a weight, so that blocks cannot change places unseen."""
    blocks = [range(part, length // BLOCK_WORDS, PARTS) for length in lengths]
    return _plan([torch.arange(len(own)) * (2 * PARTS) + 2 * part + 7 for own in blocks], device)


def _plan(factors: list[Tensor], device: torch.device) -> Plan:
    ends = list(itertools.accumulate(map(len, factors)))
    return torch.cat(factors).to(device), torch.tensor(ends, device=device)


@cache
def _factors(device: torch.device) -> Tensor:
    return torch.arange(BLOCK_WORDS, dtype=torch.int64, device=device) * _GOLDEN * 2 + 1
