"""A number that says whether two processes have the same weight, cheap enough for every publish.

A weight's bytes are read as 64-bit words and summed with odd factors, modulo 2^64: one changed, moved or swapped word
changes the sum. Of a large weight a part is read, its first and last block always and another part with every version,
so that a publish reads a sixteenth of the model and sixteen publishes read all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

BLOCK_WORDS = 1 << 14  # 128 KiB: its factors stay in a core's cache
PARTS = 16
_GOLDEN = -7046029254386353131  # 2^64 divided by the golden ratio, odd, as a signed number


def fingerprint(weight: Tensor, policy_version: int) -> str:
    """The same for equal bytes in any process and on any device.

    >>> a = torch.arange(12, dtype=torch.float32)
    >>> fingerprint(a, 0) == fingerprint(a.clone(), 0), fingerprint(a, 0) == fingerprint(a.flip(0), 0)
    (True, False)
    """
    words = _words(weight)
    total = torch.full((), weight.numel(), dtype=torch.int64, device=words.device)
    for place in _blocks(len(words), policy_version):
        block = words[place * BLOCK_WORDS : (place + 1) * BLOCK_WORDS]
        total += (block * _factors(words.device)[: len(block)]).sum() * (2 * place + 1)
    return f"{int(total) & (2**64 - 1):016x}"


def _words(weight: Tensor) -> Tensor:
    raw = weight.detach().contiguous().view(-1).view(torch.uint8)
    if len(raw) % 8:
        raw = torch.nn.functional.pad(raw, (0, 8 - len(raw) % 8))
    elif raw.data_ptr() % 8:
        raw = raw.clone()  # a word must begin where words begin
    return raw.view(torch.int64)


def _blocks(num_words: int, policy_version: int) -> Iterator[int]:
    last = (num_words - 1) // BLOCK_WORDS
    return (b for b in range(last + 1) if b in (0, last) or b % PARTS == policy_version % PARTS)


@cache
def _factors(device: torch.device) -> Tensor:
    return torch.arange(BLOCK_WORDS, dtype=torch.int64, device=device) * _GOLDEN * 2 + 1
