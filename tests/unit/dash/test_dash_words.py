"""What the run is doing, in plain words."""

from __future__ import annotations

import pytest

from treadle.dash.run_folder import HeldOut
from treadle.dash.words import EngineState, Situation, in_words, result_in_words, seconds, standing

WAITING = Situation(
    explanation="waiting for 2 more groups of gsm8k", has_trainer=True, step=16, planned_steps=50, leased_step=16,
    leased_s=60.0, trained_s=42.0,
)  # fmt: skip


def with_(**changes) -> Situation:
    values = {name: getattr(WAITING, name) for name in Situation.__slots__}
    return Situation(**(values | changes))


def test_a_batch_that_does_not_come_is_told_with_its_reason_and_what_the_engine_does():
    busy = EngineState(answers=True, version=16, paused_s=40.0)
    assert in_words(with_(engine=busy)) == [
        "no batch for 42 s: waiting for 2 more groups of gsm8k",
        "engine 0 has been adopting version 17 for 40 s",
    ]


def test_a_step_in_training_is_told_with_its_time():
    assert in_words(with_(leased_step=17, leased_s=75.0)) == ["step 17 has been in training for 1 min 15 s"]


def test_before_the_first_batch_nothing_is_said_of_a_time():
    told = in_words(with_(step=0, leased_step=None, leased_s=None, trained_s=None))
    assert told == ["no batch yet: waiting for 2 more groups of gsm8k"]


def test_a_hub_without_a_trainer_says_so():
    assert in_words(with_(has_trainer=False)) == ["no trainer has registered yet"]


def test_a_complete_run_says_what_was_measured():
    held_out = [HeldOut(0, 0.016, 0.006, 0.039, 0.02), HeldOut(25, 0.4, 0.3, 0.5), HeldOut(50, 0.73, 0.67, 0.78, 0.7)]
    result = "held-out accuracy 1.6 % -> 73.0 % (67.0 to 78.0, 95 % interval), mean score 0.020 -> 0.700"
    assert result_in_words(held_out) == result
    assert result_in_words(held_out[1:2]) == "held-out accuracy 40.0 % (30.0 to 50.0, 95 % interval)"
    assert in_words(with_(step=50, is_at_work=False, result=result)) == ["all 50 steps are trained", result]


def test_an_engine_that_does_not_answer_is_named_until_the_run_is_over():
    silent = EngineState(answers=False)
    assert in_words(with_(engine=silent))[1:] == ["engine 0 does not answer"]
    assert in_words(with_(engine=silent, step=50)) == ["all 50 steps are trained"]


@pytest.mark.parametrize(
    ("changes", "stands", "words"),
    [
        ({"is_at_work": True, "last_words": "of an earlier life"}, "live", "no batch for 42 s: waiting for 2 more"),
        ({"step": 50}, "complete", "all 50 steps are trained"),
        ({"step": 50, "is_at_work": True}, "live", "all 50 steps are trained"),
        ({"step": 50, "is_at_work": True, "is_measured": True}, "complete", "all 50 steps are trained"),
        ({}, "stopped", "stopped after step 16 of 50: nothing of this run is heard of now"),
        ({"planned_steps": None}, "stopped", "stopped after step 16: nothing of this run is heard of now"),
        ({"last_words": "the trainer ended"}, "failed", "failed after step 16 of 50: the trainer ended"),
        ({"step": 0, "has_trainer": False}, "waiting", "no trainer has registered yet"),
    ],
)
def test_a_run_is_live_only_while_somebody_is_heard_of(changes: dict, stands: str, words: str):
    situation = with_(**({"is_at_work": False} | changes))
    assert standing(situation) == stands
    assert in_words(situation)[0].startswith(words)


@pytest.mark.parametrize(
    ("value", "words"), [(0.2, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (7300, "2 h 1 min")]
)
def test_seconds_in_words(value: float, words: str):
    assert seconds(value) == words
