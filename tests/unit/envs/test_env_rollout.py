"""What is sent of a wave: completions that were cut off are marked, so that the trainer may leave them out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treadle.envs.base import Score
from treadle.envs.chat import Transcript
from treadle.envs.engine_client import Completion
from treadle.envs.grouping import build_group, drop_reason
from treadle.envs.rollout import Rollout


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
