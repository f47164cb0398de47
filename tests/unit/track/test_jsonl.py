"""The metrics file: append, resume, and values that JSON has no word for."""

from __future__ import annotations

import json
from pathlib import Path

from treadle.track import JsonlTracker, Tracker
from treadle.track.files import HealthEvent, HealthFile, read_steps


def test_each_step_is_one_line_that_a_reader_sees_at_once(tmp_path: Path) -> None:
    file = tmp_path / "new" / "metrics.jsonl"
    tracker: Tracker = JsonlTracker(file)
    tracker.log(1, {"reward": 0.25, "batch/tokens_per_step": 640, "note": "first"})
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 1, "reward": 0.25, "batch/tokens_per_step": 640, "note": "first"}
    ]
    tracker.log(2, {"reward": 0.5})
    assert [step["step"] for step in read_steps(file)] == [1, 2]
    tracker.close()


def test_opening_again_appends(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        tracker = JsonlTracker(file)
        tracker.log(step, {})
        tracker.close()
    assert [step["step"] for step in read_steps(file)] == [1, 2]


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    JsonlTracker(file).log(1, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 1.5})
    assert json.loads(file.read_text()) == {"step": 1, "a": None, "b": None, "c": None, "d": 1.5}


def test_resuming_drops_the_steps_that_will_be_taken_again(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(file)
    for step in range(1, 6):
        tracker.log(step, {"life": 1})
    tracker.truncate_after(3)
    tracker.log(4, {"life": 2})
    assert [(step["step"], step["life"]) for step in read_steps(file)] == [(1, 1), (2, 1), (3, 1), (4, 2)]
    assert list(tmp_path.iterdir()) == [file]


def test_a_line_that_a_crash_cut_short_swallows_nothing(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "rew')
    JsonlTracker(file).log(2, {})
    assert [step["step"] for step in read_steps(file)] == [1, 2]


def test_a_missing_file_has_no_steps(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "metrics.jsonl") == []


def test_health_events_are_read_once_each_and_only_whole_lines(tmp_path: Path) -> None:
    file = HealthFile(tmp_path / "health.jsonl")
    assert file.read() == ()
    file.write(7, 'MISMATCH! "quoted" = 5 %, für; lower --lr')
    event = HealthEvent(7, 'MISMATCH! "quoted" = 5 %, für; lower --train.lr')
    assert file.read() == (event,), "in the flags of treadle run"
    file.write(7, 'MISMATCH! "quoted" = 5 %, für; lower --lr')  # by a resumed trainer
    with file.path.open("a") as unfinished:
        unfinished.write('{"step": 8, "mess')
    assert file.read() == (event,)
    file.write(9, "mean_kl 0.61")  # after the line that a crash cut short
    assert [str(one) for one in file.read()] == [str(event), "step 9: mean_kl 0.61"]


def test_resuming_drops_the_health_events_of_later_steps(tmp_path: Path) -> None:
    file, view = (HealthFile(tmp_path / "health.jsonl") for _ in range(2))
    file.truncate_after(0)  # a new run has none
    for step in (1, 2, 3):
        file.write(step, f"mean_kl 0.{step}")
    assert len(view.read()) == 3
    file.truncate_after(1)
    assert [event.step for event in view.read()] == [1]
    file.write(2, "mean_kl 0.9")
    assert [str(event) for event in view.read()] == ["step 1: mean_kl 0.1", "step 2: mean_kl 0.9"]


def test_a_disk_that_refuses_a_health_event_does_not_stop_training(tmp_path: Path) -> None:
    HealthFile(tmp_path / "no folder" / "health.jsonl").write(1, "mean_kl 0.61")
