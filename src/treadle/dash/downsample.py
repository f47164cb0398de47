"""Ten thousand steps on six hundred pixels: of each stretch the lowest and the highest value, so no spike is lost."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

Values = list[float | None]


def stretches(steps: Sequence[int], first: int | None, last: int | None, num_points: int) -> list[slice]:
    """Where to cut the rows from step `first` to `last`, so that two points of each make about `num_points`.

    >>> stretches(range(1, 11), None, None, 4)
    [slice(0, 5, None), slice(5, 10, None)]
    """
    begin = 0 if first is None else bisect_left(steps, first)
    end = len(steps) if last is None else bisect_right(steps, last)
    num_rows = end - begin
    if num_rows <= num_points:
        return [slice(row, row + 1) for row in range(begin, end)]
    num_cuts = max(1, num_points // 2)
    edges = [begin + num_rows * cut // num_cuts for cut in range(num_cuts + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def places(steps: Sequence[int], cuts: Sequence[slice]) -> list[int]:
    """The steps at which the points stand: the first and the last of each stretch."""
    return [step for cut in cuts for step in _ends(steps, cut)]


def extremes(column: Sequence[float], cuts: Sequence[slice]) -> Values:
    """Of each stretch the lowest and the highest value, in the order in which they came; None: nothing was measured.

    >>> extremes([1.0, 9.0, 3.0, 2.0], [slice(0, 3), slice(3, 4)])
    [1.0, 9.0, 2.0]
    """
    points: Values = []
    for cut in cuts:
        values = column[cut]
        if len(values) == 1:
            points.append(_told(values[0]))
            continue
        known = [value for value in values if value == value]  # noqa: PLR0124 - not NaN
        if not known:
            points += [None, None]
            continue
        low, high = min(known), max(known)
        is_rising = known.index(low) <= known.index(high)
        points += [_told(low), _told(high)] if is_rising else [_told(high), _told(low)]
    return points


def means(column: Sequence[float], cuts: Sequence[slice]) -> Values:
    """Of each stretch the mean, at both of its ends: what may be smoothed or stacked, which extremes may not.

    >>> means([1.0, 9.0, 2.0], [slice(0, 2), slice(2, 3)])
    [5.0, 5.0, 2.0]
    """
    points: Values = []
    for cut in cuts:
        known = [value for value in column[cut] if value == value]  # noqa: PLR0124 - not NaN
        mean = _told(sum(known) / len(known)) if known else None
        points += [mean] * min(2, cut.stop - cut.start)
    return points


def _ends(steps: Sequence[int], cut: slice) -> list[int]:
    first, last = steps[cut.start], steps[cut.stop - 1]
    return [first] if cut.stop - cut.start == 1 else [first, last]


def _told(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
