"""Advantages: known numbers, and an independent reference."""

from __future__ import annotations

import numpy as np
import pytest

from treadle.config.train import ObjectiveOptions
from treadle.train.prepare import group_advantages

from . import reference


@pytest.mark.parametrize(
    ("scores", "settings", "expected"),
    [
        ([1.0, 0.0, 0.0, 1.0], {"normalize_std": False}, [0.5, -0.5, -0.5, 0.5]),
        ([1.0, 0.0, 0.0, 1.0], {}, [0.5 / 0.5001, -0.5 / 0.5001, -0.5 / 0.5001, 0.5 / 0.5001]),
        ([1.0, 0.0, 0.0, 0.0], {}, [1.731651, -0.577217, -0.577217, -0.577217]),
        ([1.0, 0.0], {"std_ddof": 1, "std_epsilon": 0}, [0.5**0.5, -(0.5**0.5)]),
        ([3.0, 0.0, 0.0], {"advantage": "leave_one_out", "normalize_std": False}, [3.0, -1.5, -1.5]),
        ([1.0, 0.0], {"advantage": "leave_one_out", "std_epsilon": 0}, [2.0, -2.0]),
    ],
)
def test_known_numbers(scores, settings, expected):
    ours = group_advantages(scores, ObjectiveOptions(**settings))
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


@pytest.mark.parametrize("advantage", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("std_ddof", [0, 1])
@pytest.mark.parametrize("std_epsilon", [0.0, 1e-4])
@pytest.mark.parametrize("scores", [[5.0], [], [0.1, 0.1, 0.1], [0.0, 0.0], [0.7] * 7, [-1e30] * 3])
def test_what_has_no_spread_is_exactly_zero(scores, advantage, normalize_std, std_ddof, std_epsilon):
    options = ObjectiveOptions(
        advantage=advantage, normalize_std=normalize_std, std_ddof=std_ddof, std_epsilon=std_epsilon
    )
    assert group_advantages(scores, options).tolist() == [0.0] * len(scores)


@pytest.mark.parametrize("advantage", ["group_mean", "leave_one_out"])
def test_a_tiny_spread_is_not_blown_up(advantage):
    ours = group_advantages([0.5, 0.5 + 1e-6], ObjectiveOptions(advantage=advantage))
    assert 0 < np.abs(ours).max() < 0.01


@pytest.mark.parametrize("advantage", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("std_ddof", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_equal_the_reference(seed, advantage, normalize_std, std_ddof):
    random = np.random.default_rng(seed)
    options = ObjectiveOptions(advantage=advantage, normalize_std=normalize_std, std_ddof=std_ddof, std_epsilon=0.01)
    for size in (1, 2, 3, 8, 64):
        for scores in (random.choice([0.0, 0.1, 1.0, -1.0], size).tolist(), random.normal(3, 10, size).tolist()):
            expected = reference.advantages(
                scores, leave_one_out=advantage == "leave_one_out", normalize=normalize_std, ddof=std_ddof, epsilon=0.01
            )
            ours = group_advantages(scores, options)
            np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)
            assert abs(ours.sum()) < 1e-9
