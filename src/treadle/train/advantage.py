"""How much better than its group each rollout did. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STD_EPSILON = 1e-4  # added to the deviation: a spread far smaller than any real reward must not be blown up to 1


def group_advantages(scores: Sequence[float], *, normalize_std: bool) -> np.ndarray:
    """Score minus the mean of the group, over its standard deviation when asked for.

    A group of one, or one whose scores are all equal, teaches nothing: its advantages are exactly zero.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0], normalize_std=False).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    scores_G = np.asarray(scores, dtype=np.float64)
    if len(scores_G) < 2 or scores_G.min() == scores_G.max():
        return np.zeros(len(scores_G))
    centred_G = scores_G - scores_G.mean()
    return centred_G / (scores_G.std() + STD_EPSILON) if normalize_std else centred_G
