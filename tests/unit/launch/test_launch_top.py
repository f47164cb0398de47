"""`treadle top` shows a run from its folder and its hub; one that is over it shows as it ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.processes import environment, free_port
from tests.hub_process import HubProcess
from tests.written_run import history_of, write_run
from treadle.config import load_run, save_run
from treadle.config.values import with_values
from treadle.errors import ConfigError
from treadle.launch.folder import locked
from treadle.launch.process_plan import CONFIG_FILE
from treadle.launch.top import find_run
from treadle.report.summary import Outcome, save_summary, summarize


def write_run_of(hub_url: str, folder: Path, token_file: Path | None = None, steps: int = 50) -> None:
    config = write_run(folder, num_steps=3, is_evaluated=False)
    values = {"train.hub_url": hub_url, "hub.token_file": token_file, "steps": steps}
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


@contextmanager
def started_top(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """`treadle top` behind a pipe, after its first line."""
    with subprocess.Popen(
        [sys.executable, "-m", "treadle", "top", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(COLUMNS="120"),
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def finish(folder: Path) -> None:
    """What the launcher leaves of a run that has taken all its steps."""
    config = load_run(folder / CONFIG_FILE)
    outcome = Outcome(is_complete=True, total_s=254.0)
    save_summary(summarize(config, folder, history_of(config, folder), outcome), folder)


def test_it_writes_stacks_on_sigusr1_and_ends_when_nobody_reads_it(tmp_path: Path) -> None:
    with HubProcess(tmp_path) as hub:
        write_run_of(hub.url, tmp_path)
        with started_top(str(tmp_path), "--plain") as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.send_signal(signal.SIGUSR1)
            assert "most recent call first" in process.stderr.readline()
            assert process.poll() is None
            process.stdout.close()  # as `| head -1` does; the run goes on, and there is nothing to print
            assert process.wait(timeout=30) == 1


def test_it_ends_with_the_run_also_when_another_hub_answers_there(tmp_path: Path) -> None:
    with HubProcess(tmp_path) as hub, ExitStack() as launcher:
        write_run_of(hub.url, tmp_path, steps=3)
        launcher.enter_context(locked(tmp_path))
        with started_top(str(tmp_path), "--plain") as process:
            finish(tmp_path)
            time.sleep(1.5)
            assert process.poll() is None, "the launcher still has the folder"
            launcher.close()
            rest = process.communicate(timeout=30)[0]
            assert "this run is complete: 3 steps in 4 min 14 s" in rest
            assert "stopped" not in rest


def test_a_complete_run_is_called_complete_and_shown_with_its_result(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    save_run(with_values(config, {"train.hub_url": "http://127.0.0.1:9"}), tmp_path / CONFIG_FILE)
    finish(tmp_path)
    accuracy = "held-out accuracy 1.6 % (0.6 to 3.6) -> 73.0 % (72.0 to 75.0)"
    words = f"this run is complete: 50 steps in 4 min 14 s; {accuracy}"
    for flags in (("--once",), ("--plain",)):
        shown = top(str(tmp_path), *flags)
        assert words in shown
        assert "mean score 0.008 -> 0.365" in shown
        assert "stopped" not in shown


def test_a_run_that_is_over_is_shown_as_it_ended_with_how_to_go_on(tmp_path: Path) -> None:
    write_run_of(f"http://127.0.0.1:{free_port()}", tmp_path)
    (tmp_path / "hub.sqlite").write_bytes(b"a queue")
    shown = top(str(tmp_path), "--once")
    assert "step 3/50" in shown
    assert "this run is stopped" in shown
    assert f"run --resume {tmp_path}" in shown


def test_without_a_terminal_top_prints_plain_lines_until_the_hub_is_gone(tmp_path: Path) -> None:
    write_run_of(f"http://127.0.0.1:{free_port()}", tmp_path)
    assert top(str(tmp_path)).splitlines()[0] == "stopped..."


def test_a_folder_that_is_no_run_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        find_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no run in .*/runs"):
        find_run(None)
