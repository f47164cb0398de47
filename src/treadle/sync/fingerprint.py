"""A number that says whether two processes have the same weight, cheap enough for every publish.

A weight's bytes are read as 64-bit words and summed with odd factors, modulo 2^64: one changed, moved or swapped word
changes the sum. Of a large weight a part is read, its first and last block always and another part with every version,
so that a publish reads about a tenth of the model and two dozen publishes read all of it.

The blocks of many weights are gathered and summed together: weight by weight, a GPU would be given thousands of small
kernels, a tenth of a second in which the engine samples nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
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
    names: list[str] = []

    def told() -> Iterator[Tensor]:
        for name, weight in weights:
            names.append(name)
            yield weight

    found = _summed(told(), [part_of(policy_version)])
    return dict(zip(names, found, strict=True))


def fingerprint(weight: Tensor, policy_version: int) -> str:
    """Of one.

    >>> a = torch.arange(12, dtype=torch.float32)
    >>> fingerprint(a, 0) == fingerprint(a.clone(), 0), fingerprint(a, 0) == fingerprint(a.flip(0), 0)
    (True, False)
    """
    (found,) = _summed([weight], [part_of(policy_version)])
    return found


def whole_fingerprint(weight: Tensor) -> str:
    """Of every block; for finding out what changed, not for every publish."""
    (found,) = _summed([weight], range(PARTS))
    return found


def part_of(policy_version: int) -> int:
    """Which sixteenth is read: scattered, so that publishing every 2nd, 4th or 8th version reads all of them too.

    >>> [len({part_of(step * number) for number in range(24)}) for step in (1, 2, 4, 8)] == [PARTS] * 4
    True
    """
    return ((policy_version * _GOLDEN) % 2**64) >> 60


def _summed(weights: Iterable[Tensor], parts: Sequence[int]) -> list[str]:
    """In turns: weights may be made as they are asked for, merged with adapters, and must not be there all at once."""
    numbers: list[int] = []
    totals: list[Tensor] = []
    gathered: list[Tensor] = []
    num_bytes = 0
    for weight in weights:
        if gathered and (num_bytes >= TURN_BYTES or gathered[0].device != weight.device):
            totals.append(_totals(gathered, parts))  # stays on the device: nobody waits yet
            gathered, num_bytes = [], 0
        numbers.append(weight.numel())
        gathered.append(_words(weight))
        num_bytes += weight.nbytes
    if gathered:
        totals.append(_totals(gathered, parts))
    found = itertools.chain.from_iterable(total.tolist() for total in totals)
    return [f"{(total + num) & (2**64 - 1):016x}" for total, num in zip(found, numbers, strict=True)]


def _words(weight: Tensor) -> Tensor:
    raw = weight.detach().contiguous().view(-1).view(torch.uint8)
    if len(raw) % 8:
        raw = torch.nn.functional.pad(raw, (0, 8 - len(raw) % 8))
    elif raw.data_ptr() % 8:
        raw = raw.clone()  # a word must begin where words begin
    return raw.view(torch.int64)


def _totals(weights: list[Tensor], parts: Sequence[int]) -> Tensor:
    """Of each, as words. What is left over after its whole blocks is a block too, and a short one."""
    device, lengths = weights[0].device, tuple(map(len, weights))
    whole = [words[: len(words) // BLOCK_WORDS * BLOCK_WORDS].view(-1, BLOCK_WORDS) for words in weights]
    rests = [words[len(blocks) * BLOCK_WORDS :] for words, blocks in zip(weights, whole, strict=True)]
    total = _sums_between(torch.cat(rests), *_plan_of_rests(lengths, device))
    gathered = torch.cat([blocks[:: max(1, len(blocks) - 1)] for blocks in whole])
    total += _sums_between(_times(gathered, _factors(device)), *_plan_of_ends(lengths, device))
    for part in parts:
        gathered = torch.cat([blocks[part::PARTS] for blocks in whole])
        total += _sums_between(_times(gathered, _factors(device)), *_plan_of_part(lengths, part, device))
    return total


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
