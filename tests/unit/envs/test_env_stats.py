import math
import random

import pytest

from treadle.envs.stats import pass_at_k, pass_interval, wilson_interval


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


@pytest.mark.parametrize(("num_right", "num_answers", "k"), [(0, 4, 2), (1, 4, 2), (3, 10, 4), (7, 10, 4), (10, 10, 3)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer(num_right, num_answers, k):
    expected = 1 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)
    assert pass_at_k(num_right, num_answers, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_unbiased_where_the_plain_formula_is_not():
    chance, num_answers, k = 0.3, 5, 3
    truth = 1 - (1 - chance) ** k
    weights = [
        math.comb(num_answers, right) * chance**right * (1 - chance) ** (num_answers - right)
        for right in range(num_answers + 1)
    ]
    ours = sum(w * pass_at_k(right, num_answers, k) for right, w in enumerate(weights))
    plain = sum(w * (1 - (1 - right / num_answers) ** k) for right, w in enumerate(weights))
    assert ours == pytest.approx(truth, abs=1e-12)
    assert abs(plain - truth) > 0.02


def test_pass_at_k_of_very_many_answers_neither_overflows_nor_cancels():
    one_right_of_many = pass_at_k(1, 100_000, 1000)
    assert one_right_of_many == pytest.approx(0.01, rel=1e-9)  # k/n
    assert pass_at_k(99_001, 100_000, 1000) == 1.0  # fewer wrong ones than are drawn
    assert pass_at_k(0, 100_000, 1000) == 0.0


@pytest.mark.parametrize(("num_right", "num_answers", "k"), [(5, 4, 1), (-1, 4, 1), (1, 4, 5), (1, 4, 0)])
def test_a_draw_that_cannot_be_made_is_refused(num_right, num_answers, k):
    with pytest.raises(ValueError, match="no pass@"):
        pass_at_k(num_right, num_answers, k)


@pytest.mark.parametrize("num_right", [0, 1, 35, 69, 70])
def test_single_answers_have_wilsons_own_interval(num_right):
    chances = [1.0] * num_right + [0.0] * (70 - num_right)
    assert pass_interval(chances, 1) == pytest.approx(wilson_interval(num_right, 70), abs=1e-12)


def test_all_right_proves_no_more_than_the_prompts_do():
    assert pass_interval([1.0] * 20, answers_per_draw=8) == wilson_interval(20, 20)


def test_more_answers_narrow_the_interval_only_where_prompts_are_alike():
    alike, unlike = [0.5] * 20, [0.0, 1.0] * 10

    def width(chances):
        low, high = pass_interval(chances, answers_per_draw=8)
        return high - low

    assert width(alike) < 0.5 * width(unlike)
    assert width(unlike) == pytest.approx(wilson_interval(10, 20)[1] - wilson_interval(10, 20)[0])


@pytest.mark.parametrize(("num_answers", "k"), [(1, 1), (4, 1), (4, 2), (16, 4)])
def test_nineteen_of_twenty_intervals_hold_the_truth(num_answers, k):
    """Prompts of very different difficulty, drawn 1,000 times."""
    draw = random.Random(3)
    truth = 1 - math.prod((0.7 + i) / (1 + i) for i in range(k))  # the mean of 1 - (1-p)^k where p ~ Beta(0.3, 0.7)
    num_hits = 0
    for _ in range(1000):
        chances = []
        for _ in range(64):
            p = draw.betavariate(0.3, 0.7)
            num_right = sum(draw.random() < p for _ in range(num_answers))
            chances.append(pass_at_k(num_right, num_answers, k))
        low, high = pass_interval(chances, num_answers / k)
        num_hits += low <= truth <= high
    assert 930 <= num_hits <= 970


def test_nothing_asked_is_nothing_known():
    assert pass_interval([], 4) == (0.0, 1.0)
