"""What the run is doing, in plain words."""

from __future__ import annotations

import pytest

from treadle.dash.run_folder import Columns, HeldOut
from treadle.dash.status import (
    EngineStatus,
    RunFacts,
    in_words,
    result_in_words,
    sampling_note,
    standing,
    tiles_of,
)

WAITING = RunFacts(
    explanation="waiting for 2 more groups of gsm8k", has_trainer=True, step=16, planned_steps=50, leased_step=16,
    leased_s=60.0, trained_s=42.0,
)  # fmt: skip


def with_(**changes) -> RunFacts:
    values = {name: getattr(WAITING, name) for name in RunFacts.__slots__}
    return RunFacts(**(values | changes))


def test_a_missing_batch_is_explained_with_the_engines_activity():
    busy = EngineStatus(answers=True, version=16, paused_s=40.0)
    assert in_words(with_(engine=busy)) == [
        "no batch for 42 s: waiting for 2 more groups of gsm8k",
        "engine 0 has been loading version 17 for 40 s",
    ]


def test_a_step_in_training_is_shown_with_its_time():
    assert in_words(with_(leased_step=17, leased_s=75.0)) == ["step 17 has been in training for 1 min 15 s"]


def test_before_the_first_batch_nothing_is_said_of_a_time():
    sentences = in_words(with_(step=0, leased_step=None, leased_s=None, trained_s=None))
    assert sentences == ["no batch yet: waiting for 2 more groups of gsm8k"]


def test_a_hub_without_a_trainer_says_so():
    assert in_words(with_(has_trainer=False)) == ["no trainer has registered yet"]


def test_a_complete_run_says_what_was_measured():
    held_out = [HeldOut(0, 0.016, 0.006, 0.039, 0.02), HeldOut(25, 0.4, 0.3, 0.5), HeldOut(50, 0.73, 0.67, 0.78, 0.7)]
    result = "held-out accuracy 1.6 % → 73.0 % (67.0 to 78.0, 95 % interval), mean score 0.020 → 0.700"
    assert result_in_words(held_out) == result
    graded = HeldOut(50, 0.73, 0.67, 0.78, 0.7, 256, 0.66, 0.74)
    assert result_in_words([graded]).endswith(", mean score 0.700 (0.660 to 0.740)")
    unscored = HeldOut(50, 0.73, 0.67, 0.78, num_unscored=13)
    assert result_in_words([unscored]).endswith("95 % interval), 13 answers not scored")
    tile, *_ = tiles_of(Columns(), [unscored], with_(step=50), num_warnings=0)
    assert (tile.note.endswith("step 50, 13 answers not scored"), tile.is_bad) == (True, True)
    assert result_in_words(held_out[1:2]) == "held-out accuracy 40.0 % (30.0 to 50.0, 95 % interval)"
    assert in_words(with_(step=50, is_at_work=False, result=result)) == ["all 50 steps are trained", result]


def test_an_engine_that_does_not_answer_is_named_until_the_run_is_over():
    silent = EngineStatus(answers=False)
    assert in_words(with_(engine=silent))[1:] == ["engine 0 does not answer"]
    assert in_words(with_(engine=silent, step=50)) == ["all 50 steps are trained"]


@pytest.mark.parametrize(
    ("changes", "stands", "words"),
    [
        ({"is_at_work": True, "last_words": "of an earlier life"}, "live", "no batch for 42 s: waiting for 2 more"),
        ({"step": 50}, "complete", "all 50 steps are trained"),
        ({"step": 50, "is_at_work": True}, "live", "all 50 steps are trained"),
        ({"step": 50, "is_at_work": True, "is_measured": True}, "complete", "all 50 steps are trained"),
        ({}, "stopped", "stopped after step 16 of 50: no process of this run reports to the hub"),
        ({"planned_steps": None}, "stopped", "stopped after step 16: no process of this run reports to the hub"),
        ({"last_words": "the trainer ended"}, "failed", "failed after step 16 of 50: the trainer ended"),
        ({"step": 0, "has_trainer": False}, "waiting", "no trainer has registered yet"),
    ],
)
def test_a_run_is_live_only_while_somebody_is_heard_of(changes: dict, stands: str, words: str):
    situation = with_(**({"is_at_work": False} | changes))
    assert standing(situation) == stands
    assert in_words(situation)[0].startswith(words)


def figures(num_steps: int) -> Columns:
    columns = Columns()
    for step in range(1, num_steps + 1):
        columns.add(
            {
                "step": step, "reward": step / 100, "perf/step_s": 2.0, "time_s": 2.0 * step,
                "perf/generated_tok_s_wall_clock": 1000.0 * step, "perf/trained_tok_s_wall_clock": 0.0,
            }
        )  # fmt: skip
    return columns


def test_the_tiles_say_how_far_the_run_is_and_what_it_has_reached():
    held_out = [HeldOut(0, 0.016, 0.006, 0.039), HeldOut(20, 0.4, 0.3, 0.5), HeldOut(40, 0.73, 0.67, 0.78)]
    tiles = [
        (tile.value, tile.note)
        for tile in tiles_of(figures(40), held_out, with_(step=40, planned_steps=100), num_warnings=0)
    ]
    assert tiles == [
        ("1.6 % → 73.0 %", "67.0 to 78.0 % (95 % interval), step 40"),
        ("0.400", "0.010 at step 1"),
        ("35,500", "mean of the last 10 steps"),
        ("0", "mean of the last 10 steps"),
        ("40 of 100", "about 2 min 00 s left"),
        ("no warnings", "in the last 20 steps"),
    ]
    *_, step, _ = tiles_of(figures(40), held_out, with_(step=40, planned_steps=100, is_at_work=False), num_warnings=0)
    assert step.note == "", "of a run that is stopped nothing is left to wait for"
    *_, step, health = tiles_of(figures(40), held_out, with_(step=40, planned_steps=40), num_warnings=2)
    assert (step.note, step.share) == ("trained in 1 min 20 s", 1.0)
    assert (health.value, health.is_bad) == ("2 warnings", True)


def test_before_the_first_step_the_tiles_say_that_nothing_is_measured():
    first = with_(step=0, planned_steps=100)
    tiles = tiles_of(Columns(), [], first, num_warnings=0)
    assert [tile.value for tile in tiles] == ["–", "–", "–", "–", "0 of 100", "no warnings"]
    (before, *_) = tiles_of(Columns(), [HeldOut(0, 0.016, 0.006, 0.039)], first, num_warnings=0)
    assert (before.value, before.note) == ("1.6 %", "0.6 to 3.9 % (95 % interval), before training")


def test_greedy_and_sampled_accuracy_are_explained_where_they_differ():
    held_out = HeldOut(40, 0.73, 0.67, 0.78)
    note = sampling_note(held_out, [0.5, 0.52], {"temperature": 1.0})
    assert note.startswith("At step 40 the held-out accuracy is 73.0 % and the accuracy in training 51.0 %: held-out")
    assert "answers are greedy, training answers are sampled at temperature 1" in note
    assert sampling_note(held_out, [0.7, 0.72], {"temperature": 1.0}) == ""
    assert sampling_note(held_out, [], {}) == ""
    assert sampling_note(held_out, [0.5], {"temperature": 0.7, "eval_temperature": 0.7}) == ""
    assert sampling_note(held_out, [0.5], {"temperature": 0.7, "eval_samples": 4}) == "", "sampled in the same way"
