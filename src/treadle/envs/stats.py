"""Numbers about results. Pure."""

from __future__ import annotations

import math

_Z_95 = 1.959963984540054  # 95 % of a normal distribution lies within this many standard deviations of its mean


def wilson_interval(num_right: int, num_trials: int, z: float = _Z_95) -> tuple[float, float]:
    """The Wilson score interval of a proportion: honest near 0 and 1 too, where the textbook one is not.

    >>> [round(100 * bound, 1) for bound in wilson_interval(4, 256)]
    [0.6, 3.9]
    """
    if not 0 <= num_right <= num_trials:
        raise ValueError(f"{num_right} right of {num_trials} is not a proportion")
    if num_trials == 0:
        return 0.0, 1.0
    share = num_right / num_trials
    shrink = 1 + z * z / num_trials
    middle = (share + z * z / (2 * num_trials)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / num_trials + z * z / (4 * num_trials**2))
    # With none or all right the bound is exact; rounding must not push it past the end.
    low = 0.0 if num_right == 0 else middle - half
    high = 1.0 if num_right == num_trials else middle + half
    return low, high
