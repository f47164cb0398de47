"""Pass rates and mean scores of sampled answers, and their 95 % intervals. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import fmean, stdev, variance

_Z_95 = 1.959963984540054  # 95 % of a normal distribution lies within this many standard deviations of its mean
_LARGEST_T = 1e3  # more than the 95 % quantile of one degree of freedom, 12.7


def worthwhile_ks(num_answers: int) -> list[int]:
    """The k of pass@k to report: powers of 2 and the number of answers: `worthwhile_ks(6) == [1, 2, 4, 6]`."""
    powers = [2**i for i in range(num_answers.bit_length())]
    return sorted({*powers, num_answers})


def wilson_interval(num_right: float, num_trials: float, z: float = _Z_95) -> tuple[float, float]:
    """The Wilson score interval of a proportion: correct near 0 and 1 too, unlike the normal approximation.

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
    # With none or all right the bound is exact; rounding must not move it past 0 or 1.
    low = 0.0 if num_right == 0 else middle - half
    high = 1.0 if num_right == num_trials else middle + half
    return low, high


def pass_at_k(num_right: int, num_answers: int, k: int) -> float:
    """The probability that at least one of `k` answers, drawn from the sampled ones, is right.

    1 - C(n-c, k) / C(n, k) is an unbiased estimate, unlike 1 - (1 - c/n)^k.

    >>> pass_at_k(1, 4, 1), pass_at_k(1, 4, 2), pass_at_k(1, 4, 4)
    (0.25, 0.5, 1.0)
    """
    if not (0 <= num_right <= num_answers and 1 <= k <= num_answers):
        raise ValueError(f"no pass@{k} of {num_right} right of {num_answers} answers")
    num_wrong = num_answers - num_right
    if num_wrong < k:
        return 1.0
    # The quotient of the binomials as a product: no overflow and no cancellation.
    return 1.0 - math.prod((num_wrong - i) / (num_answers - i) for i in range(k))


def pass_interval(chances: Sequence[float], answers_per_draw: float) -> tuple[float, float]:
    """95 % interval of the mean pass@k of prompts, each estimated from `answers_per_draw` = n/k draws.

    Wilson's interval with an effective number of trials from the variance between prompts: at least one per prompt (so
    that single answers give exactly Wilson's interval), at most one per draw. Prompts, not answers, are the sample:
    more answers to the same prompts narrow the interval only as far as the prompts are alike.
    """
    if not chances:
        return 0.0, 1.0
    mean, num_prompts = fmean(chances), len(chances)
    most = num_prompts * answers_per_draw
    spread = variance(chances) if num_prompts > 1 else 0.0
    worth = mean * (1 - mean) / spread * num_prompts if spread > 0 else most
    if mean in (0.0, 1.0):  # the variance is 0, but says nothing
        worth = num_prompts
    trials = min(max(worth, num_prompts), most)
    return wilson_interval(mean * trials, trials)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of a mean by its standard error and Student's t; None: one value gives none.

    >>> [round(bound, 3) for bound in mean_interval([0.70, 0.74, 0.75])]
    [0.664, 0.796]
    """
    if len(values) < 2:
        return None
    mean = fmean(values)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


@functools.cache  # the same few values for every step of a curve
def t_quantile(degrees: int, level: float = 0.95) -> float:
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
