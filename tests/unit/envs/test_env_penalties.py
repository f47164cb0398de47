"""Rules for a whole group: length when all are right, and completions too short to learn from."""

import pytest

from treadle.envs.base import Score
from treadle.envs.chat import Transcript
from treadle.envs.grouping import length_share, with_length_penalty, without_short
from treadle.envs.rollout import Rollout


def rollout(num_sampled, reward=1.0, *, is_right=True):
    return Rollout([Transcript(num_sampled=num_sampled)], Score(reward=reward, is_right=is_right), seconds=0.0)


def rewards(rollouts):
    return [rollout.score.reward for rollout in rollouts]


@pytest.mark.parametrize(
    ("num_tokens", "share"), [(1, 1.0), (512, 1.0), (768, 0.5), (1023, 2 / 1024), (1024, 0.0), (3000, 0.0)]
)
def test_full_worth_up_to_half_the_length_then_straight_down_to_nothing(num_tokens, share):
    assert length_share(num_tokens, 1024) == pytest.approx(share)


def test_a_group_that_is_all_right_is_worth_more_the_shorter():
    group = [rollout(10), rollout(768), rollout(1024)]
    assert rewards(with_length_penalty(group, 1024)) == [1.0, 0.5, 0.0]
    assert rewards(group) == [1.0, 1.0, 1.0]


def test_one_wrong_answer_leaves_every_reward_as_it_is():
    group = [rollout(10), rollout(1024), rollout(700, -1.0, is_right=False)]
    assert with_length_penalty(group, 1024) == group


def test_what_could_not_be_scored_has_no_say_and_stays_unscored():
    group = [rollout(768), rollout(1024), rollout(5, None, is_right=False)]
    assert rewards(with_length_penalty(group, 1024)) == [0.5, 0.0, None]
    unscored = [rollout(5, None, is_right=False)]
    assert with_length_penalty(unscored, 1024) == unscored


def test_length_makes_a_reward_below_nothing_no_better():
    assert rewards(with_length_penalty([rollout(1024, -0.5)], 1024)) == [-0.5]


def test_a_rollout_of_few_tokens_stays_in_the_group_without_a_score():
    kept, short = without_short([rollout(10), rollout(9)], 10)
    assert kept == rollout(10)
    assert (short.score.reward, short.score.error) == (None, "fewer than 10 sampled tokens")
