import math

import pytest

from treadle.envs.stats import wilson_interval


@pytest.mark.parametrize(
    ("num_right", "num_trials", "low_percent", "high_percent"),
    [
        (4, 256, 0.6, 3.9),
        (0, 10, 0.0, 27.8),
        (10, 10, 72.2, 100.0),
        (1, 10, 1.8, 40.4),
        (0, 0, 0.0, 100.0),
    ],
)
def test_wilson_interval_agrees_with_known_values(num_right, num_trials, low_percent, high_percent):
    bounds = [100 * bound for bound in wilson_interval(num_right, num_trials)]
    assert bounds == pytest.approx([low_percent, high_percent], abs=0.051)


@pytest.mark.parametrize(("num_right", "num_trials"), [(4, 256), (128, 256), (1, 10), (999, 1000)])
def test_both_bounds_are_as_unlikely_as_the_level_says(num_right, num_trials):
    """The definition: from a true share at the bound, the observed one is 1.96 standard deviations away."""
    for bound in wilson_interval(num_right, num_trials):
        deviations = abs(num_right / num_trials - bound) / math.sqrt(bound * (1 - bound) / num_trials)
        assert deviations == pytest.approx(1.959964, abs=1e-6)


def test_more_right_than_asked_is_refused():
    with pytest.raises(ValueError, match="not a proportion"):
        wilson_interval(5, 4)
