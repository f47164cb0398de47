"""Randomness that is the same on every machine, in every process and under every Python version.

Python's `hash` changes from process to process and `random.shuffle` may change from version to version, so
both the seeds of requests and the orders of data are made from a cryptographic digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def stable_seed(*parts: int | str) -> int:
    """A 63-bit number made of `parts`, always the same: `stable_seed(0, "train", 1, 0)`; 1 is not "1"."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stable_shuffle(values: Sequence[T], *parts: int | str) -> list[T]:
    """`values` in the order that `parts` decide."""
    order = sorted(range(len(values)), key=lambda place: stable_seed(*parts, place))
    return [values[place] for place in order]
