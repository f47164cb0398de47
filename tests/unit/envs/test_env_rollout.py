"""Groups to send: truncation marks, unscored rollouts, length penalty, minimum length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treadle.envs.base import Score
from treadle.envs.chat import Transcript
from treadle.envs.engine_client import Completion
from treadle.envs.rollout import Rollout, build_group, drop_reason, with_length_penalty, without_short


def rollout(reward: float, finish_reason: str) -> Rollout:
    transcript = Transcript(messages=[{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "text"}])
    transcript.read([1, 2])
    transcript.wrote(Completion([7, 8], [-0.5, -0.5], "text", finish_reason, policy_version=3))
    return Rollout([transcript], Score(reward, is_right=reward > 0), 0.25)


@pytest.mark.parametrize(
    ("reasons", "overrides", "truncated"),
    [
        (("stop", "stop"), None, 0.0),
        (("stop", "length"), [{}, {"finish_reason": "length"}], 0.5),
        (("length", "length"), [{"finish_reason": "length"}, {"finish_reason": "length"}], 1.0),
    ],
)
def test_what_was_cut_off_at_the_length_limit_is_said(reasons, overrides, truncated) -> None:
    group = build_group([rollout(1.0, reasons[0]), rollout(0.0, reasons[1])], temperature=0.7)
    assert group.overrides == overrides
    assert group.metrics["truncated"] == truncated
    assert group.generation_params == {"temperature": 0.7}
    assert (group.tokens[0], group.masks[0]) == ([1, 2, 7, 8], [-100, -100, 7, 8])
    assert group.inference_logprobs[0] == [1.0, 1.0, -0.5, -0.5]


def test_generation_time_of_a_group_is_that_of_its_slowest_rollout() -> None:
    """Their sum would be longer than the step that waited for them."""
    turns = [replace(rollout(1.0, "stop"), seconds=seconds) for seconds in (2.0, 3.0, 1.0)]
    assert build_group(turns, temperature=1.0).metrics["generation_s"] == 3.0


def test_an_unscored_rollout_has_no_advantage_and_does_not_change_the_mean() -> None:
    lost = Rollout(rollout(0.0, "stop").transcripts, Score(None, False, outcome="timed_out", error="10 s"), 0.25)
    group = build_group([rollout(1.0, "stop"), rollout(0.0, "stop"), lost], temperature=1.0)
    assert group.scores == [1.0, 0.0, 0.5]
    assert group.overrides[2] == {"set_advantage_to_zero": True, "outcome": "timed_out", "error": "10 s"}
    assert (group.metrics["score_timed_out"], group.metrics["score_errors"]) == (1.0, 1.0)
    assert drop_reason([lost, lost], drop_equal_scores=False) == "unscored"
    assert drop_reason([rollout(1.0, "stop"), lost], drop_equal_scores=True) == "equal_scores"
    assert drop_reason([rollout(1.0, "stop"), rollout(0.0, "stop")], drop_equal_scores=True) is None


def sampled(num_sampled, reward=1.0, *, is_right=True):
    return Rollout([Transcript(num_sampled=num_sampled)], Score(reward=reward, is_right=is_right), seconds=0.0)


def rewards(rollouts):
    return [rollout.score.reward for rollout in rollouts]


@pytest.mark.parametrize(
    ("num_tokens", "share"), [(1, 1.0), (512, 1.0), (768, 0.5), (1023, 2 / 1024), (1024, 0.0), (3000, 0.0)]
)
def test_full_worth_up_to_half_the_length_then_straight_down_to_nothing(num_tokens, share):
    assert rewards(with_length_penalty([sampled(num_tokens)], 1024)) == [pytest.approx(share)]


def test_a_group_that_is_all_right_is_worth_more_the_shorter():
    group = [sampled(10), sampled(768), sampled(1024)]
    assert rewards(with_length_penalty(group, 1024)) == [1.0, 0.5, 0.0]
    assert rewards(group) == [1.0, 1.0, 1.0]


def test_one_wrong_answer_leaves_every_reward_as_it_is():
    group = [sampled(10), sampled(1024), sampled(700, -1.0, is_right=False)]
    assert with_length_penalty(group, 1024) == group


def test_what_could_not_be_scored_has_no_say_and_stays_unscored():
    group = [sampled(768), sampled(1024), sampled(5, None, is_right=False)]
    assert rewards(with_length_penalty(group, 1024)) == [0.5, 0.0, None]
    unscored = [sampled(5, None, is_right=False)]
    assert with_length_penalty(unscored, 1024) == unscored


def test_length_makes_a_reward_below_nothing_no_better():
    assert rewards(with_length_penalty([sampled(1024, -0.5)], 1024)) == [-0.5]


def test_a_rollout_of_few_tokens_stays_in_the_group_without_a_score():
    kept, short = without_short([sampled(10), sampled(9)], 10)
    assert kept == sampled(10)
    assert (short.score.reward, short.score.error) == (None, "fewer than 10 sampled tokens")
