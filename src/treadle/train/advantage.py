"""How much better than its group each rollout did. Pure, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.config.train import ObjectiveOptions


def group_advantages(scores: Sequence[float], options: ObjectiveOptions) -> np.ndarray:
    """Score minus the mean of the group (or of the others in it), over its standard deviation when asked for.

    A group of one, or one whose scores are all equal, teaches nothing: its advantages are exactly zero.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0], ObjectiveOptions(normalize_std=False)).tolist()
    [0.5, -0.5, -0.5, 0.5]
    >>> group_advantages([3.0, 0.0, 0.0], ObjectiveOptions(advantage="leave_one_out", normalize_std=False)).tolist()
    [3.0, -1.5, -1.5]
    """
    scores_G = np.asarray(scores, dtype=np.float64)
    size = len(scores_G)
    if size < 2 or scores_G.min() == scores_G.max():  # compared, not subtracted: the mean of three 0.1 is not 0.1
        return np.zeros(size)
    advantages_G = scores_G - scores_G.mean()
    if options.advantage == "leave_one_out":
        advantages_G *= size / (size - 1)  # the same as comparing each score with the mean of the others
    if options.normalize_std:
        advantages_G /= scores_G.std(ddof=options.std_ddof) + options.std_epsilon
    return advantages_G
