"""Intervals of a mean over a few seeds, and the exact paired test of two runs' answers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from treadle.envs.eval_statistics import mean_interval


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
    return Estimate(fmean(values), *(mean_interval(values) or (None, None)))


def mcnemar_p(only_first: int, only_second: int) -> float:
    """The exact two-sided p-value of McNemar's test: prompts that only one of two runs answered right.

    If both were equally good, each such prompt would fall to either side like a fair coin.

    >>> mcnemar_p(0, 5), round(mcnemar_p(10, 25), 4)
    (0.0625, 0.0167)
    """
    num = only_first + only_second
    tail = sum(math.comb(num, count) for count in range(min(only_first, only_second) + 1))
    return float(min(1.0, tail / 2 ** (num - 1))) if num else 1.0
