"""How weights are packed for a broadcast: laid end to end in a fixed order, and cut into buckets of one size. Pure.

Trainer and engine make the same plan from the same names and shapes, so nothing but the numbers themselves travels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BUCKET_BYTES = 256 << 20  # long enough that a link is busy, short enough that nobody misses the memory


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of the flattened weight `name` lie in their bucket from element `place` on."""

    name: str
    start: int
    stop: int
    place: int


@dataclass(frozen=True)
class Bucket:
    num_elements: int
    pieces: tuple[Piece, ...]


def plan_buckets(weights: Iterable[tuple[str, Sequence[int]]], elements_per_bucket: int) -> tuple[Bucket, ...]:
    """All buckets are full but the last. A weight may end in another bucket than it begins in.

    >>> [bucket.num_elements for bucket in plan_buckets([("a", (2, 3)), ("b", (5,))], elements_per_bucket=4)]
    [4, 4, 3]
    >>> plan_buckets([("a", (2, 3)), ("b", (5,))], elements_per_bucket=4)[1].pieces
    (Piece(name='a', start=4, stop=6, place=0), Piece(name='b', start=0, stop=2, place=2))
    """
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    place = 0
    for name, shape in weights:
        start, size = 0, math.prod(shape)
        while start < size:
            stop = min(size, start + elements_per_bucket - place)
            pieces.append(Piece(name, start, stop, place))
            place += stop - start
            start = stop
            if place == elements_per_bucket:
                buckets.append(Bucket(place, tuple(pieces)))
                pieces, place = [], 0
    if pieces:
        buckets.append(Bucket(place, tuple(pieces)))
    return tuple(buckets)
