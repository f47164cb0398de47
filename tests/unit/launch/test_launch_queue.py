"""A run and the file of its queue: it ends well with it, and is resumed with it, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import free_port
from tests.written_run import step_values, write_run
from treadle.config import RunConfig, load_run, save_run
from treadle.errors import ConfigError, ProcessDied
from treadle.launch import job, resume
from treadle.launch.process_plan import RunPlan
from treadle.report.history import History, reader_of
from treadle.report.summary import Outcome, Summary, summarize
from treadle.store import SqliteStore

HUB = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if not pathlib.Path({gone!r}).exists() or self.path != "/healthz" else 503)
        self.end_headers()
import pathlib
HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run that was stopped after step 2, with its queue."""
    write_run(tmp_path, num_steps=2)
    settings = {"steps": 9, "engine.model": str(tmp_path), "train.metrics_file": tmp_path / "metrics.jsonl"}
    config = load_run(None, settings | {"env.task": "addition", "train.save_path": tmp_path / "checkpoints"})
    save_run(config, tmp_path / "config.json")
    (tmp_path / "request.json").write_text('{"steps": 9}')
    SqliteStore.open(tmp_path / "hub.sqlite").close()
    return tmp_path


def test_a_run_whose_queue_is_gone_is_not_resumed(run_folder: Path):
    for file in run_folder.glob("hub.sqlite*"):
        file.unlink()
    with pytest.raises(ConfigError, match=f"queue of this run is gone: {run_folder / 'hub.sqlite'}"):
        resume(run_folder, {}, plain=True)


def test_after_a_lost_queue_no_resume_is_advised(run_folder: Path, monkeypatch, capsys):
    (run_folder / "checkpoints" / "step_2").mkdir(parents=True)

    def lose_queue(*_: Any, **__: Any) -> None:
        (run_folder / "hub.sqlite").unlink()
        raise ProcessDied("the hub ended")

    monkeypatch.setattr(job.RunSession, "run", lose_queue)
    with pytest.raises(ProcessDied):
        resume(run_folder, {}, plain=True)
    output = capsys.readouterr().err
    assert "--resume" not in output
    assert f"queue of this run is gone: {run_folder / 'hub.sqlite'}" in output
    new_run = f"run --config {run_folder / 'request.json'} --model {run_folder / 'checkpoints' / 'step_2'}"
    assert new_run in output


def test_an_error_that_leaves_the_queue_advises_to_resume(run_folder: Path, monkeypatch, capsys):
    def end(*_: Any, **__: Any) -> None:
        raise ProcessDied("the hub ended")

    monkeypatch.setattr(job.RunSession, "run", end)
    with pytest.raises(ProcessDied):
        resume(run_folder, {}, plain=True)
    assert f"run --resume {run_folder}" in capsys.readouterr().err


def test_a_resume_without_the_list_of_given_settings_is_refused(run_folder: Path):
    (run_folder / "request.json").unlink()
    with pytest.raises(ConfigError, match=r"request\.json.* is missing") as refused:
        resume(run_folder, {}, plain=True)
    assert "put back a copy" in refused.value.fix


def test_a_resume_without_a_secret_of_the_run_is_refused(run_folder: Path):
    config = load_run(run_folder / "config.json", {"openai.api_key": "sk-very-secret"})
    save_run(config, run_folder / "config.json")
    with pytest.raises(ConfigError, match=r"--openai\.api-key held a secret when this run began"):
        resume(run_folder, {}, plain=True)


def test_a_run_with_the_settings_of_another_asks_for_its_secrets(run_folder: Path):
    save_run(load_run(None, {"openai.api_key": "sk-very-secret"}), run_folder / "config.json")
    with pytest.raises(ConfigError, match=r"--openai\.api-key held a secret when this run began"):
        job.start_run(load_run(run_folder / "config.json", {"output": run_folder / "runs"}), plain=True)
    assert not (run_folder / "runs").exists()


def test_a_resume_never_empties_the_queue(run_folder: Path, monkeypatch: pytest.MonkeyPatch):
    saved = json.loads((run_folder / "config.json").read_text())
    saved["hub"]["fresh"] = True
    (run_folder / "config.json").write_text(json.dumps(saved))
    resumed: list[RunConfig] = []

    def note(plan: RunPlan, *_: Any, **__: Any) -> Summary:
        resumed.append(plan.config)
        return summarize(plan.config, run_folder, History(), Outcome(is_complete=True, total_s=1.0))

    monkeypatch.setattr(job, "_run", note)
    assert resume(run_folder, {}, plain=True) == 0
    assert [config.hub.fresh for config in resumed] == [False]
    with pytest.raises(ConfigError, match=r"keeps its hub\.fresh"):
        resume(run_folder, {"hub.fresh": "true"}, plain=True)


def test_a_run_whose_hub_is_not_well_at_the_end_has_failed(tmp_path: Path, make_spec):
    port, metrics = free_port(), tmp_path / "metrics.jsonl"
    config = load_run(None, {"steps": "1", "train.metrics_file": metrics})
    begun = tmp_path / "begun"  # as a real trainer, it takes no step before the environment has worked
    write = (
        f"import pathlib, time\nwhile not pathlib.Path({str(begun)!r}).exists(): time.sleep(0.05)\n"
        f"pathlib.Path({str(metrics)!r}).write_text({json.dumps(step_values(1)) + chr(10)!r})"
    )
    plan = RunPlan(
        config,
        tmp_path,
        (
            make_spec("hub", HUB.format(port=port, gone=str(metrics)), ready_url=f"http://127.0.0.1:{port}/healthz"),
            make_spec("env", f"import pathlib; pathlib.Path({str(begun)!r}).touch()"),
            make_spec("trainer", write),
        ),
        f"http://127.0.0.1:{port}",
    )
    session = job.RunSession(plan, reader_of(config, tmp_path))
    with pytest.raises(ProcessDied, match="the hub cannot answer for its queue"):
        session.run(plain=True)
    assert not session.outcome().is_complete
