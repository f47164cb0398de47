"""The sinks beside the file, with the real packages: what was sent can be read back, also after a resume."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from wandb_file import records

from treadle.config.train import TrackOptions
from treadle.errors import ConfigError, MissingExtra
from treadle.track import Tracker, build_tracker
from treadle.track.files import JsonlTracker, read_steps
from treadle.track.services import check_login
from treadle.track.trackers import MAX_FAILURES_IN_A_ROW, CompositeTracker, Metric, Table

TABLE = Table(
    "train/rollouts", ("prompt", "reward", "is_right"), [("1 + 1 | 2?\n<think>", 0.5, True), ("no", None, False)]
)
SETTINGS = {"lr": 3e-5, "model": "smollm2-135m-instruct"}


def live_twice(options: TrackOptions, folder: Path) -> None:
    """Three steps; a crash lost the third's checkpoint, so the resumed run repeats it and takes two more."""
    for life, first in ((1, 0), (2, 2)):
        tracker = build_tracker(options, folder / "metrics.jsonl", SETTINGS)
        tracker.truncate_after(first)
        for step in range(first + 1, first + 4):
            tracker.log(step, {"reward": step + life / 10, "grad_norm": float("nan"), "note": "text"})
        tracker.log_table(first + 3, TABLE)
        tracker.close()
    steps = [(step["step"], step["reward"]) for step in read_steps(folder / "metrics.jsonl")]
    assert steps == [(1, 1.1), (2, 2.1), (3, 3.2), (4, 4.2), (5, 5.2)]


def wait_for_the_end_of(file: Path) -> list[Any]:
    """All records of one process. W&B may still be writing when `finish` has returned on a busy machine."""
    deadline = time.monotonic() + 20
    while True:
        found = list(records(file))
        if any(record.WhichOneof("record_type") == "exit" for record in found) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def test_tensorboard_shows_the_steps_of_the_last_life(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    live_twice(TrackOptions(track=("tensorboard",), metric_aliases=("verl",)), tmp_path)
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert sorted(reader.Tags()["scalars"]) == ["critic/rewards/mean", "reward"]
    [table] = [event for event in reader.Tensors("train/rollouts") if event.step == 5]
    assert table.tensor_proto.string_val[0].decode().splitlines()[-2:] == [
        "| 1 + 1 &#124; 2? ↵ &lt;think&gt; | 0.5 | True |",
        "| no |  | False |",
    ]
    for name in reader.Tags()["scalars"]:
        points = [(event.step, round(event.value, 5)) for event in reader.Scalars(name)]
        assert points == [(1, 1.1), (2, 2.1), (3, 3.2), (4, 4.2), (5, 5.2)]


def test_wandb_keeps_one_run_over_two_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    live_twice(TrackOptions(track="wandb", wandb_group="sums", wandb_run_name="first try"), tmp_path)
    run_id = (tmp_path / "wandb-run-id.txt").read_text().strip()
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    lives = [wait_for_the_end_of(file) for file in files]
    runs = [record.run for life in lives for record in life if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.run_group, run.display_name) for run in runs} == {
        (run_id, "treadle", "sums", "first try")
    }
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert (config["lr"], config["model"]) == (3e-5, "smollm2-135m-instruct")
    rows = [wandb_row(record) for life in lives for record in life if record.WhichOneof("record_type") == "history"]
    # W&B cannot take step 3 back: it keeps the first process' values
    assert [(row["_step"], row["reward"]) for row in rows] == [(1, 1.1), (2, 2.1), (3, 3.1), (4, 4.2), (5, 5.2)]
    assert all("grad_norm" not in row and "note" not in row for row in rows)
    tables = [row["train/rollouts/path"] for row in rows if "train/rollouts/path" in row]
    assert len(tables) == 2, "at the last step of each process"
    [file] = tmp_path.glob(f"wandb/offline-run-*/files/{tables[1]}")
    assert json.loads(file.read_text())["data"] == [list(row) for row in TABLE.rows]


def wandb_row(record: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}


def test_trackio_keeps_one_run_over_two_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    code = (
        "import sys; from pathlib import Path; from trackio.sqlite_storage import SQLiteStorage as Storage;"
        "from test_trackers import TrackOptions, live_twice;"
        "folder = Path(sys.argv[1]); live_twice(TrackOptions(track=('trackio',), wandb_project='sums'), folder);"
        "[run] = Storage.get_runs('sums');"
        "logs = Storage.get_logs('sums', run);"
        "print(run, [(row['step'], row['reward']) for row in logs if 'reward' in row]);"
        "print([row['train/rollouts']['_value'][0]['prompt'] for row in logs if 'train/rollouts' in row])"
    )
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))  # read when trackio is imported: hence a process
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, check=True
    )
    run_id = (tmp_path / "run" / "trackio-run-id.txt").read_text().strip()
    assert f"run-{run_id} [(1, 1.1), (2, 2.1), (3, 3.1), (4, 4.2), (5, 5.2)]" in done.stdout
    assert repr([TABLE.rows[0][0]] * 2) in done.stdout, done.stdout


def test_only_what_was_asked_for_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from treadle.config.train import TrackOptions;"
        "from treadle.track import build_tracker;"
        "build_tracker(TrackOptions(), Path(sys.argv[1]), {}).log(1, {'reward': 0.5});"
        "print([name for name in ('wandb', 'tensorboard', 'trackio', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "metrics.jsonl")], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "extra"), [("wandb", "trackers"), ("tensorboard", "trackers"), ("trackio", "trackio")]
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    for module in [module for module in sys.modules if module.split(".")[0] == name] or [name]:
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    with pytest.raises(MissingExtra, match=f"--track {name} needs {name}") as caught:
        build_tracker(TrackOptions(track=(name,)), tmp_path / "metrics.jsonl", {})
    assert caught.value.fix == f"pip install 'treadle[{extra}]'"
    assert not list(tmp_path.glob("*run-id*")), "a run that was never opened has no id to resume"


def test_wandb_without_a_login_says_how_to_log_in(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from treadle.config.train import TrackOptions;"
        "from treadle.track import build_tracker; from treadle.errors import ConfigError\n"
        "try: build_tracker(TrackOptions(track='wandb'), Path(sys.argv[1]), {})\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "metrics.jsonl")],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "NETRC": str(tmp_path / "none")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("W&B refused: ")
    assert "WANDB_MODE=offline" in done.stdout


class Unreachable:
    """A service that is down for some calls."""

    def __init__(self, is_down: list[bool]) -> None:
        self._is_down = is_down
        self.steps: list[int] = []
        self.num_calls = 0

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        self.num_calls += 1
        if self._is_down[step - 1]:
            raise ConnectionError("no route to host")
        self.steps.append(step)

    def truncate_after(self, step: int) -> None:
        raise ConnectionError("no route to host")

    def close(self) -> None:
        raise ConnectionError("no route to host")


def test_a_failing_tracker_is_logged_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = Unreachable([False, True, True, False, True])
    tracker: Tracker = CompositeTracker(JsonlTracker(tmp_path / "metrics.jsonl"), {"wandb": sink})
    with caplog.at_level(logging.WARNING, logger="treadle.track"):
        tracker.truncate_after(0)
        for step in range(1, 6):
            tracker.log(step, {"reward": 0.5})
        tracker.close()
    assert [step["step"] for step in read_steps(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert sink.steps == [1, 4]
    assert [record.getMessage() for record in caplog.records] == ["sink_failed"]


def test_a_sink_that_never_comes_back_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = Unreachable([True] * 30)
    tracker = CompositeTracker(JsonlTracker(tmp_path / "metrics.jsonl"), {"wandb": sink})
    with caplog.at_level(logging.WARNING, logger="treadle.track"):
        for step in range(1, 31):
            tracker.log(step, {})
    assert sink.num_calls == MAX_FAILURES_IN_A_ROW
    assert [record.getMessage() for record in caplog.records] == ["sink_failed", "sink_given_up"]
    assert len(read_steps(tmp_path / "metrics.jsonl")) == 30


@pytest.mark.parametrize(
    ("variables", "file", "text"),
    [
        ({"WANDB_API_KEY": "k" * 40}, "", ""),
        ({"WANDB_MODE": "offline"}, "", ""),
        ({}, ".netrc", "machine api.wandb.ai login user password secret\n"),
        ({"WANDB_BASE_URL": "https://wandb.example"}, ".netrc", "machine wandb.example login user password secret\n"),
        ({}, ".config/wandb/settings", "[default]\nmode = offline\n"),
    ],
)
def test_a_login_at_wandb_is_found_wherever_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], file: str, text: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no API key"):
        check_login({})
    if file:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    check_login(variables)
