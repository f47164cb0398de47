"""A number that says whether two processes have the same weight, cheap enough for every publish.

A weight's bytes are read as 64-bit words and summed with odd factors, modulo 2^64: one changed, moved or swapped word
changes the sum. Of a large weight a part is read, its first and last block always and another part with every version,
so that a publish reads about a tenth of the model and sixteen publishes read all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache

import torch
from torch import Tensor

BLOCK_WORDS = 1 << 11  # 16 KiB: its factors stay in a core's first cache
PARTS = 16
_GOLDEN = -7046029254386353131  # 2^64 divided by the golden ratio, odd, as a signed number


def fingerprint(weight: Tensor, policy_version: int) -> str:
    """The same for equal bytes in any process and on any device.

    >>> a = torch.arange(12, dtype=torch.float32)
    >>> fingerprint(a, 0) == fingerprint(a.clone(), 0), fingerprint(a, 0) == fingerprint(a.flip(0), 0)
    (True, False)
    """
    return _summed(weight, [part_of(policy_version)])


def part_of(policy_version: int) -> int:
    """Which sixteenth is read: scattered, so that publishing every 2nd, 4th or 16th version reads all of them too.

    >>> sorted({part_of(version) for version in range(0, 64 * 16, 16)}) == list(range(PARTS))
    True
    """
    return ((policy_version * _GOLDEN) % 2**64) >> 60


def whole_fingerprint(weight: Tensor) -> str:
    """Of every block; for finding out what changed, not for every publish."""
    return _summed(weight, range(PARTS))


def _summed(weight: Tensor, parts: Iterable[int]) -> str:
    words = _words(weight)
    num_whole = len(words) // BLOCK_WORDS  # blocks; what is left over is one more, and a short one
    factors = _factors(words.device)
    rest = words[num_whole * BLOCK_WORDS :]
    total = _times(rest, factors[: len(rest)]) + weight.numel()
    if num_whole:
        blocks = words[: num_whole * BLOCK_WORDS].view(num_whole, BLOCK_WORDS)
        ends = _times(blocks[:: max(1, num_whole - 1)], factors)
        total = total + _times(ends, factors[5 : 5 + len(ends)])
        for part in parts:
            sums = _times(blocks[part::PARTS], factors)
            total = total + _times(sums, _place_factors(num_whole, part, words.device))
    return f"{int(total) & (2**64 - 1):016x}"


def _times(words: Tensor, factors: Tensor) -> Tensor:
    """The product of a matrix or a vector with a vector; a GPU has none for whole numbers."""
    if words.is_cuda:
        return (words * factors).sum(-1)
    return words @ factors


def _words(weight: Tensor) -> Tensor:
    raw = weight.detach().contiguous().view(-1).view(torch.uint8)
    if len(raw) % 8:
        raw = torch.nn.functional.pad(raw, (0, 8 - len(raw) % 8))
    elif raw.data_ptr() % 8:
        raw = raw.clone()  # a word must begin where words begin
    return raw.view(torch.int64)


@lru_cache(1024)
def _place_factors(num_blocks: int, part: int, device: torch.device) -> Tensor:
    """Different and odd for each block, so that blocks cannot change places unseen."""
    return torch.arange(len(range(part, num_blocks, PARTS)), device=device) * (2 * PARTS) + 2 * part + 7


@cache
def _factors(device: torch.device) -> Tensor:
    return torch.arange(BLOCK_WORDS, dtype=torch.int64, device=device) * _GOLDEN * 2 + 1
