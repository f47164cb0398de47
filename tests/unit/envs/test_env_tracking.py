"""Evaluations and rollouts of an environment reach the trackers of the trainer, with the real packages."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from env_doubles import EngineDouble, FlakyNetwork, HubDouble, save_tokenizer

from treadle.config.env import EnvConfig, ServerConfig
from treadle.envs.base import Score, load_environment
from treadle.envs.chat import Transcript
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import EngineClient
from treadle.envs.hub_client import HubClient
from treadle.envs.main import open_context
from treadle.envs.rollout import Rollout
from treadle.envs.serving.monitor import MAX_CELL_CHARS, STEPS_PER_TABLE, Tracking
from treadle.envs.serving.runner import run
from treadle.track.files import read_steps
from treadle.track.trackers import CompositeTracker, Table


@pytest.fixture(autouse=True)
def _short_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.envs.serving.monitor.TABLE_ROWS", 3)


def add(prompt: str, request: Any) -> list[str]:
    """Right in evaluation and in every other completion of training."""
    a, b = map(int, re.findall(r"\d+", prompt)[:2])
    return [str(a + b) if i % 2 == 0 else "I do not know" for i in range(request.n)]


def serve(tmp_path: Path, trackers: tuple[str, ...], **settings: Any) -> Path:
    """A whole run of three steps; the folder of the environment's tracker files."""
    hub_double = HubDouble()
    hub_double.trackers = trackers
    engine_double = EngineDouble(save_tokenizer(tmp_path / "model"), add)
    engine_double.policy_version = lambda: hub_double.current_step
    config = EnvConfig(**{"group_size": 4, "num_eval": 6, "state_dir": tmp_path / "state", **settings})

    async def scenario() -> None:
        async with (
            EngineClient(ServerConfig(), transport=FlakyNetwork(engine_double.app)) as engine,
            HubClient("http://hub", transport=FlakyNetwork(hub_double.app)) as hub,
            open_context(load_environment(config), engine, ChatTokenizer.load(engine_double.folder)) as context,
        ):
            await asyncio.wait_for(run(context, hub), 60)

    asyncio.run(scenario())
    return tmp_path / "state" / "arithmetic" / "tracker-run"


def test_tensorboard_and_the_file_get_the_evaluations_and_the_rollouts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = serve(tmp_path, ("tensorboard",))
    figures = [(step["step"], step["eval/percent_correct"]) for step in read_steps(folder / "metrics.jsonl")]
    assert figures == [(0, 1.0), (3, 1.0)]
    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("eval/percent_correct")] == figures
    samples = [event.tensor_proto.string_val[0].decode() for event in reader.Tensors("eval/samples")]
    assert [text.count("\n") for text in samples] == [4, 4], "a head of two lines and three rows"
    [rollouts] = reader.Tensors("train/rollouts")
    assert (rollouts.step, rollouts.tensor_proto.string_val[0].decode().count("\n")) == (3, 4)


def test_wandb_shows_the_environment_as_a_run_in_the_trainers_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "track"))
    from test_trackers import wait_for_the_end_of, wandb_row

    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = serve(tmp_path, ("wandb",))
    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    records = wait_for_the_end_of(file)
    [about] = {
        (record.run.project, record.run.run_group, record.run.display_name)
        for record in records
        if record.WhichOneof("record_type") == "run"
    }
    assert about == ("sums", "night", "arithmetic")
    rows = [wandb_row(record) for record in records if record.WhichOneof("record_type") == "history"]
    assert [(row["_step"], row["eval/percent_correct"]) for row in rows] == [(0, 1.0), (3, 1.0)]
    [table] = folder.glob(f"wandb/offline-run-*/files/{rows[1]['train/rollouts/path']}")
    shown = json.loads(table.read_text())
    assert shown["columns"][:5] == ["policy_version", "prompt", "completion", "reward", "is_right"]
    assert [row[0] for row in shown["data"]] == [1, 2, 2], "the last three groups"
    assert all(row[2].isdigit() and row[4] for row in shown["data"])


@pytest.mark.parametrize(("trackers", "settings"), [((), {}), (("tensorboard",), {"use_trackers": False})])
def test_nothing_is_opened_that_was_not_asked_for(
    tmp_path: Path, trackers: tuple[str, ...], settings: dict[str, Any]
) -> None:
    assert not serve(tmp_path, trackers, **settings).exists()


def test_a_tracker_that_cannot_be_opened_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with caplog.at_level(logging.WARNING, logger="treadle.env"):
        serve(tmp_path, ("wandb",), data_dir_to_save_evals=tmp_path / "evals")
    (logged,) = [record.treadle_fields for record in caplog.records if record.name == "treadle.env"]
    assert logged["problem"] == "--track wandb needs wandb"
    assert logged["fix"].startswith("pip install 'treadle[trackers]'")
    assert (tmp_path / "evals" / "eval_step_000003.json").exists()


def test_a_tracker_whose_files_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    no_folder = tmp_path / "file"
    no_folder.touch()
    with caplog.at_level(logging.WARNING, logger="treadle.env"):
        serve(tmp_path, ("tensorboard",), state_dir=no_folder, data_dir_to_save_evals=tmp_path / "evals")
    (logged,) = [record.treadle_fields for record in caplog.records if record.name == "treadle.env"]
    assert str(no_folder) in logged["problem"]
    assert "--env.use-trackers false" in logged["fix"]
    assert (tmp_path / "evals" / "eval_step_000003.json").exists()


class Recorder:
    def __init__(self) -> None:
        self.tables: list[tuple[int, Table]] = []
        self.is_closed = False

    def log_table(self, step: int, table: Table) -> None:
        self.tables.append((step, table))

    def close(self) -> None:
        self.is_closed = True


class FullDisk(Recorder):
    def close(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_at_the_end_leaves_no_tracker_open() -> None:
    recorder = Recorder()
    Tracking(CompositeTracker(FullDisk(), {"recorder": recorder})).close()  # type: ignore[arg-type,dict-item]
    assert recorder.is_closed


def rollout(version: int, text: str = "4") -> Rollout:
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text}]
    return Rollout(
        [Transcript(messages=messages, policy_versions={version}, num_sampled=2)], Score(1.0, True), 0.1, text
    )


def test_between_evaluations_a_table_comes_every_few_steps_and_is_bounded() -> None:
    recorder = Recorder()
    tracking = Tracking(CompositeTracker(recorder, {"recorder": recorder}))  # type: ignore[arg-type,dict-item]
    for version in range(2 * STEPS_PER_TABLE + 2):
        tracking.add([rollout(version, "x" * 10_000)] * 4, may_log=version != STEPS_PER_TABLE)
    assert [step for step, _ in recorder.tables] == [STEPS_PER_TABLE + 1, 2 * STEPS_PER_TABLE + 1], (
        "not in an evaluation"
    )
    _, table = recorder.tables[0]
    assert [row[:2] for row in table.rows] == [(STEPS_PER_TABLE + i, "2 + 2?") for i in (-1, 0, 1)]
    assert len(table.rows[0][2]) < MAX_CELL_CHARS + 10
