"""Intervals of a mean over a few seeds, and the exact paired test of two runs' answers. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

_LEVEL = 0.95
_LARGEST_T = 1e3  # more than the 95 % quantile of one degree of freedom, 12.7


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval; `low` and `high` are None where one value gives no interval."""

    mean: float
    low: float | None = None
    high: float | None = None

    def as_share(self) -> Estimate:
        """The interval of a share ends at 0 and 1."""
        if self.low is None or self.high is None:
            return self
        return Estimate(self.mean, max(0.0, self.low), min(1.0, self.high))


def mean_of_seeds(values: Sequence[float]) -> Estimate:
    """The mean of a figure over runs that differ by seed, with the 95 % interval of Student's t.

    >>> estimate = mean_of_seeds([0.70, 0.74, 0.75])
    >>> [round(value, 3) for value in (estimate.mean, estimate.low, estimate.high)]
    [0.73, 0.664, 0.796]
    """
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


@functools.cache  # the same few values for every step of a curve
def t_quantile(degrees: int, level: float = _LEVEL) -> float:
    """Student's t: `level` of the distribution lies within plus and minus this value.

    >>> round(t_quantile(1), 3), round(t_quantile(2), 3), round(t_quantile(30), 3)
    (12.706, 4.303, 2.042)
    """
    low, high = 0.0, _LARGEST_T
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _t_mass(middle, degrees) < level else (low, middle)
    return (low + high) / 2


def _t_mass(t: float, degrees: int) -> float:
    """The probability that |T| is below `t`: the finite sums for whole degrees of freedom (Abramowitz, Stegun 26.7)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    first = degrees % 2
    term = total = cosine if first else 1.0
    for power in range(first + 2, degrees - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    if not first:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if degrees > 1 else 0.0))


def mcnemar_p(only_first: int, only_second: int) -> float:
    """The exact two-sided p-value of McNemar's test: prompts that only one of two runs answered right.

    If both were equally good, each such prompt would fall to either side like a fair coin.

    >>> mcnemar_p(0, 5), round(mcnemar_p(10, 25), 4)
    (0.0625, 0.0167)
    """
    num = only_first + only_second
    tail = sum(math.comb(num, count) for count in range(min(only_first, only_second) + 1))
    return float(min(1.0, tail / 2 ** (num - 1))) if num else 1.0
