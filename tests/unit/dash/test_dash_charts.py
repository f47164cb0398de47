"""Figures for the charts: read while they grow, thinned without losing a spike, with their healthy ranges."""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from pathlib import Path

import pytest

from treadle.config import RunConfig, save_run
from treadle.dash.charts import CHARTS, bucket_steps, buckets, extremes
from treadle.dash.monitor import BoundedSamples, QueueSample
from treadle.dash.run_folder import MetricsFile, RunFolder, Runs
from treadle.track.catalogue import METRICS, Band
from treadle.track.files import HEALTH_FILE, HealthFile


def write(path: Path, *lines: dict, mode: str = "a") -> None:
    with path.open(mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def column(file: MetricsFile, name: str) -> list[float | None]:
    with file.columns() as columns:
        return [None if math.isnan(value) else value for value in columns.by_name[name]]


def steps(file: MetricsFile) -> list[int]:
    with file.columns() as columns:
        return list(columns.steps)


def test_a_file_that_is_not_there_yet_has_no_steps_and_is_read_once_it_is(tmp_path: Path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert steps(file) == []
    write(tmp_path / "metrics.jsonl", {"step": 1, "reward": 0.5})
    assert column(file, "reward") == [0.5]


def test_only_whole_lines_are_read_and_the_rest_when_it_is_whole(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    write(path, {"step": 1, "reward": 0.5})
    with path.open("a") as growing:
        growing.write('{"step": 2, "rew')
    assert steps(file) == [1]
    with path.open("a") as growing:
        growing.write('ard": 0.75}\n')
    assert column(file, "reward") == [0.5, 0.75]


def test_figures_that_come_later_or_are_missing_leave_holes(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "a": 1}, {"step": 2, "a": None, "b": 2.0}, {"step": 3, "b": 3.0, "word": "x"})
    file = MetricsFile(path)
    assert column(file, "a") == [1.0, None, None]
    assert column(file, "b") == [None, 2.0, 3.0]
    assert column(file, "word") == [None, None, None]


def test_a_step_that_is_taken_again_replaces_it_and_what_followed(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, *({"step": step, "reward": float(step)} for step in (1, 2, 3)), {"step": 2, "reward": 20.0})
    file = MetricsFile(path)
    assert steps(file) == [1, 2]
    assert column(file, "reward") == [1.0, 20.0]


def test_a_file_that_a_resumed_trainer_put_in_place_is_read_from_its_start(tmp_path: Path):
    path, beside = tmp_path / "metrics.jsonl", tmp_path / "metrics.tmp"
    write(path, *({"step": step, "reward": float(step)} for step in range(1, 9)))
    file = MetricsFile(path)
    assert len(steps(file)) == 8
    write(beside, {"step": 1, "reward": 1.0}, {"step": 2, "reward": 2.0})
    os.replace(beside, path)
    assert column(file, "reward") == [1.0, 2.0]


@pytest.mark.parametrize("place", [0, 1234, 9999])
def test_downsampling_10_000_steps_to_600_points_loses_no_spike(place: int):
    steps, values = range(1, 10_001), [1.0] * 10_000
    values[place] = 50.0
    cuts = buckets(steps, None, None, 600)
    points = extremes(values, cuts)
    assert max(points) == 50.0
    assert len(points) == len(bucket_steps(steps, cuts)) == 600
    assert bucket_steps(steps, cuts)[0] == 1
    assert bucket_steps(steps, cuts)[-1] == 10_000


def test_few_steps_are_shown_as_they_are_and_a_range_is_cut_out():
    steps, values = [2, 4, 6, 8], [1.0, math.nan, 3.0, 4.0]
    cuts = buckets(steps, 3, 6, 100)
    assert bucket_steps(steps, cuts) == [4, 6]
    assert extremes(values, cuts) == [None, 3.0]


def test_downsampling_keeps_the_order_of_extremes_and_gaps():
    assert extremes([9.0, 1.0, math.nan, math.nan], [slice(0, 2), slice(2, 4)]) == [9.0, 1.0, None, None]


def test_a_chart_shows_the_healthy_range_of_the_catalogue():
    shown = {chart.title: (chart.band, chart.healthy) for chart in CHARTS}
    assert shown["Ratio"] == (Band(low=0.8, high=1.2), "0.8 to 1.2")
    assert shown["KL"] == (Band(high=0.1, alarm=0.5), "below 0.1; alarm above 0.5")
    assert shown["Reward and held-out accuracy"] == (None, "rising")


def test_every_figure_of_a_chart_is_in_the_catalogue():
    assert {name for chart in CHARTS for name in chart.names} <= METRICS.keys()


def test_a_long_course_is_thinned_evenly():
    course = BoundedSamples(max_samples=100)
    for second in range(10_000):
        course.add(QueueSample(float(second), second, 0))
    times = [sample.at for sample in course.samples]
    assert len(times) <= 101
    assert {later - earlier for earlier, later in pairwise(times)} == {times[1] - times[0]}
    assert times[-1] > 9_800


def test_other_runs_are_those_beside_it_and_no_name_leads_elsewhere(tmp_path: Path):
    for name in ("a", "b", "empty"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for name in ("a", "b"):
        write(tmp_path / "runs" / name / "metrics.jsonl", {"step": 1, "reward": 1.0})
    write(tmp_path / "metrics.jsonl", {"step": 1, "reward": 1.0})
    runs = Runs(RunFolder(tmp_path / "runs" / "a"))
    assert runs.names() == ["b"]
    assert runs.get("b") is not None
    assert runs.get("..") is None
    assert runs.get("../runs/b") is None


def test_a_log_starts_at_a_whole_line_and_is_found_by_process_name(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text("first line\nsecond line\n")
    (tmp_path / "secret.log").write_text("secret")
    run = RunFolder(tmp_path)
    assert run.log_tail("trainer", num_bytes=15) == "second line\n"
    assert run.log_tail("../secret") is None


def test_the_settings_of_a_run_include_what_it_derived(tmp_path: Path):
    save_run(RunConfig(), tmp_path / "config.json", ["engine.model", "train.engine_url"])
    assert RunFolder(tmp_path).config() == RunConfig().model_dump(mode="json", exclude={"envs", "sft"})


def test_evaluations_are_read_and_a_file_that_is_none_is_left_out(tmp_path: Path):
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "step-000010.json").write_text('{"step": 10, "accuracy": 0.5, "interval_95": [0.4, 0.6]}')
    (tmp_path / "evals" / "broken.json").write_text("{")
    assert [(one.step, one.low, one.high) for one in RunFolder(tmp_path).held_out()] == [(10, 0.4, 0.6)]


def test_health_warnings_of_recent_steps_are_shown(tmp_path: Path):
    for step in (12, 40):
        HealthFile(tmp_path / HEALTH_FILE).write(step, "mean_kl 0.61")
    assert RunFolder(tmp_path).health(since_step=30) == ["step 40: mean_kl 0.61"]
