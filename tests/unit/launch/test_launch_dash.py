"""`treadle dash`: the page of a live run is at its hub, that of a finished run and of a folder is served here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import free_port
from tests.written_run import write_run
from treadle.background import awake_s
from treadle.config import RunConfig, load_run, save_run
from treadle.config.schema import HubConfig
from treadle.config.values import with_values
from treadle.errors import ConfigError
from treadle.launch import folder as run_folders
from treadle.launch.dash_command import RunList, show_page
from treadle.launch.hubs_of_runs import recorded_hub
from treadle.launch.supervisor import StopRequest, Supervisor
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE, role_token
from treadle.net.probe import answers_ok, get
from treadle.store import SqliteStore


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    """A run in tmp_path, with a port that is free."""
    config = write_run(tmp_path)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    config = with_values(config, {"hub.database": tmp_path / "hub.sqlite", "hub.port": port, "train.hub_url": url})
    save_run(config, tmp_path / "config.json")
    return config


def test_the_page_of_a_run_that_is_over_is_served_with_its_figures(run: RunConfig, tmp_path: Path) -> None:
    with SqliteStore.open(run.hub.database, clock=awake_s):
        pass
    command = [sys.executable, "-m", "treadle", "dash", str(tmp_path), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            output = process.stdout.readline()
            assert output == f"page: {run.train.hub_url}/dash/; Ctrl-C ends it\n"
            page = get(f"{run.train.hub_url}/dash/", timeout_s=30)
            assert page is not None
            assert b"<title>Treadle</title>" in page
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_the_hub_of_a_run_that_is_over_has_one_validation_worker(run: RunConfig, tmp_path: Path) -> None:
    run.hub.database.touch()
    hub = recorded_hub(tmp_path, with_values(run, {"hub.host": "0.0.0.0", "hub.fresh": True}), 8001)
    assert (hub.host, hub.port, hub.validation_workers, hub.fresh) == ("127.0.0.1", 8001, 1, False)
    assert not set(vars(hub)) - set(HubConfig.model_fields), "no setting is misspelt"


def test_a_run_whose_queue_is_gone_has_no_page(run: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="queue of this run is gone") as caught:
        show_page(tmp_path, opens=False)
    assert "report" in caught.value.fix
    assert not run.hub.database.exists()


def test_the_page_of_a_run_that_goes_on_is_at_its_hub(
    run: RunConfig, tmp_path: Path, make_spec, server_code, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_folders.locked(tmp_path):
        with pytest.raises(ConfigError, match="does not answer"):
            show_page(tmp_path, opens=False)
        hub = make_spec("hub", server_code(run.hub.port), ready_url=f"{run.train.hub_url}/healthz")
        with Supervisor(StopRequest()) as supervisor:
            supervisor.start([hub])
            assert show_page(tmp_path, opens=False) == 0
    assert capsys.readouterr().out == f"page: {run.train.hub_url}/dash/\n"


def test_the_runs_of_a_folder_are_listed_with_their_state(tmp_path: Path) -> None:
    names = ["20260101-000000-a", "20260102-000000-b", "20260103-000000-c"]
    for name in names:
        save_run(write_run(tmp_path / name), tmp_path / name / "config.json")
        (tmp_path / name / "request.json").write_text("{}")
    (tmp_path / names[0] / "summary.json").write_text('{"last_words": "the engine ended with code 1"}')
    runs = RunList(tmp_path)
    assert runs.names() == names[::-1]
    with run_folders.locked(tmp_path / names[2]):
        live, stopped, failed = runs.rows(runs.names())
    assert (live.state, stopped.state, failed.state) == ("live", "stopped", "failed")
    assert failed.error == "the engine ended with code 1"
    assert (live.task, live.steps_taken, live.steps) == ("arithmetic", 50, 50)
    assert live.held_out.startswith("1.6 %")
    assert live.started_at - stopped.started_at == 86400


def test_the_task_of_several_environments_is_listed(tmp_path: Path) -> None:
    config = load_run(None, {"env": "arithmetic:3,echo:1"})
    (tmp_path / "20260101-000000-a").mkdir()
    save_run(config, tmp_path / "20260101-000000-a" / "config.json")
    (row,) = RunList(tmp_path).rows(["20260101-000000-a"])
    assert row.task == "arithmetic + echo"


def test_the_start_page_asks_for_the_token_of_the_environment(tmp_path: Path) -> None:
    folder = tmp_path / "20260101-000000-a"
    config = with_values(write_run(folder), {"hub.database": folder / "hub.sqlite"})
    save_run(config, folder / "config.json")
    (folder / "request.json").write_text("{}")
    with SqliteStore.open(folder / "hub.sqlite", clock=awake_s):
        pass
    secret = "a-token-of-more-than-sixteen"  # noqa: S105
    command = [sys.executable, "-m", "treadle", "dash", str(tmp_path), "--no-open"]
    environment = os.environ | {HUB_TOKEN_VARIABLE: secret}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().removeprefix("page: ").partition("/t/TOKEN/")[0]
            own = f"{url}/t/{role_token(secret, 'observer')}"
            assert not answers_ok(f"{url}/api/runs", timeout_s=30)
            assert answers_ok(f"{own}/api/runs", timeout_s=30)
            assert not answers_ok(f"{url}/runs/{folder.name}/dash/api/run", timeout_s=30)
            assert answers_ok(f"{own}/runs/{folder.name}/dash/api/run", timeout_s=30)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
