"""`treadle top` shows a run from its folder and its hub; one that is over it shows as it ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from written_run import write_run

from tests.e2e.processes import environment, free_port
from tests.hub_process import HubProcess
from treadle.config import save_run
from treadle.errors import ConfigError
from treadle.launch.plan import CONFIG_FILE, with_values
from treadle.launch.top import find_run


def write_run_of(hub_url: str, folder: Path, token_file: Path | None = None) -> None:
    config = write_run(folder, num_steps=3, is_evaluated=False)
    values = {"train.atropos_url": hub_url, "hub.token_file": token_file, "steps": 50}
    values["hub.database"] = folder / "hub.sqlite"
    save_run(with_values(config, values), folder / CONFIG_FILE)


def top(*flags: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "treadle", "top", *flags],
        capture_output=True, text=True, env=environment(COLUMNS="120"), timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_that_goes_on_is_shown_with_its_processes(tmp_path: Path) -> None:
    token_file = tmp_path / "hub.token"
    with HubProcess(tmp_path, "--token-file", str(token_file)) as hub:
        write_run_of(hub.url, tmp_path, token_file)
        report = {"kind": "env", "name": "env gsm8k", "machine": "m", "pid": 4711, "state": "12 groups in flight"}
        with hub.client() as client:
            key = {"Authorization": f"Bearer {token_file.read_text().strip()}"}
            assert client.post("/v1/reports", json=report, headers=key).status_code == 200
        shown = top(str(tmp_path), "--once")
    for words in ("step 3/50", "env gsm8k", "pid 4711", "12 groups in flight", "hub"):
        assert words in shown, words


def test_a_run_that_is_over_is_shown_as_it_ended_with_how_to_go_on(tmp_path: Path) -> None:
    write_run_of(f"http://127.0.0.1:{free_port()}", tmp_path)
    (tmp_path / "hub.sqlite").write_bytes(b"a queue")
    shown = top(str(tmp_path), "--once")
    assert "step 3/50" in shown
    assert "this run is not going on now" in shown
    assert f"run --resume {tmp_path}" in shown


def test_without_a_terminal_it_speaks_in_plain_lines_and_ends_when_the_hub_is_gone(tmp_path: Path) -> None:
    write_run_of(f"http://127.0.0.1:{free_port()}", tmp_path)
    assert top(str(tmp_path)).splitlines()[0] == "not going on..."


def test_a_folder_that_is_no_run_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        find_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no run in runs/"):
        find_run(None)
