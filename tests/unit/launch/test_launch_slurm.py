"""The batch file of a run on SLURM, and what is read from its commands; tests/e2e/test_slurm.py runs one."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from treadle.cli import main
from treadle.config import load_run
from treadle.errors import ConfigError, UserError
from treadle.launch.job import run_places
from treadle.launch.machines import Machine
from treadle.launch.slurm import StepProcess, batch_file, parse_machines, submit, with_reachable_address
from treadle.launch.submission import refuse_secrets, words_inside

NODES = """\
NodeName=gpu1 Arch=x86_64 CoresPerSocket=64 CPUAlloc=0 CPUTot=128 Gres=gpu:8 NodeAddr=127.0.0.2 NodeHostName=gpu1
NodeName=gpu2 Arch=x86_64 CoresPerSocket=64 CPUAlloc=0 CPUTot=128 Gres=gpu:8 NodeAddr=127.0.0.3 NodeHostName=gpu2
"""


def options_of(text: str) -> list[str]:
    return [word for line in text.splitlines() if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]]


def text_for(flags: dict[str, object], words: tuple[str, ...] = ("--on", "slurm")) -> str:
    config = load_run(None, {"cluster.scheduler": "slurm", "output": "/data/runs", **flags})
    plan = ["hub, engine", "env, trainer"]
    return batch_file(config, words, label="gsm8k", plan=plan, folder=Path("/home/ada"), python="/venv/bin/python")


def test_the_batch_file_asks_for_the_machines_of_the_plan() -> None:
    described = {
        "cluster.nodes": "2", "cluster.gpus_per_node": "8", "cluster.cpus_per_node": "64",
        "cluster.time_limit": "8:00:00", "cluster.memory_gb_per_node": "512",
        "cluster.sbatch_args": "--partition=gpu --comment='two words'",
    }  # fmt: skip
    options = options_of(text_for(described))
    assert {"--nodes=2", "--gpus-per-node=8", "--cpus-per-task=64", "--mem=524288M", "--time=8:00:00"} <= set(options)
    assert {"--ntasks-per-node=1", "--partition=gpu", "--comment=two words", "--chdir=/home/ada"} <= set(options)
    assert "--output=/data/runs/slurm-%j.log" in options
    assert "--exclusive" not in options


def test_whole_machines_are_asked_for_unless_they_are_described() -> None:
    options = options_of(text_for({"engine.gpus": "0-1", "train.gpus": "2,3"}))
    assert {"--exclusive", "--mem=0", "--gpus-per-node=4"} <= set(options)
    assert not any(option.startswith(("--cpus-per-task", "--time")) for option in options)


def test_the_launcher_replaces_the_shell_so_that_the_job_ends_with_it() -> None:
    text = text_for({}, ("--env.args", '{"a": "b c"}'))
    last = text[text.index("exec ") :]
    assert shlex.split(last.replace("\\\n", "")) == [
        "exec",
        "/venv/bin/python",
        "-m",
        "treadle",
        "run",
        "--env.args",
        '{"a": "b c"}',
    ]
    assert "--signal=B:TERM@300" in options_of(text)  # to it alone, before the time limit: it saves a checkpoint
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_batch_job_has_no_terminal_and_no_browser() -> None:
    words = ["--steps", "3", "--dry-run", "--open", "--on", "slurm"]
    assert words_inside(words) == ["--steps", "3", "--on", "slurm", "--plain"]


def test_a_secret_on_the_command_line_is_not_written_into_the_file() -> None:
    given = {"openai.api_key": "sk-123456789"}
    with pytest.raises(ConfigError, match=r"--openai\.api-key would stand in what is submitted"):
        refuse_secrets(load_run(None, given), given)
    refuse_secrets(load_run(None, given), {})  # it comes from a file


def test_machines_and_their_addresses_are_read_from_scontrol() -> None:
    assert [(machine.name, machine.address) for machine in parse_machines(NODES)] == [
        ("gpu1", "127.0.0.2"), ("gpu2", "127.0.0.3"),
    ]  # fmt: skip


def test_the_own_address_is_one_that_the_other_machines_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.launch.slurm.address_towards", lambda host, _: {"10.0.0.2": "10.0.0.1"}[host])
    own, other = Machine("a", "127.0.1.1"), Machine("b", "10.0.0.2")
    assert with_reachable_address(own, [other]) == Machine("a", "10.0.0.1")
    assert with_reachable_address(other, [own]) is other
    assert with_reachable_address(own, [Machine("c", "127.0.1.1")]) is own  # they are one machine
    assert with_reachable_address(own, []) is own


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ({"cluster.sbatch_args": "--comment='a\ntouch executed\n'"}, ["hub"]),
        ({"cluster.time_limit": "1:00:00\ntouch executed"}, ["hub"]),
        ({"output": "/data\ntouch executed"}, ["hub"]),
        ({}, ["hub, env-a\ntouch executed"]),
    ],
)
def test_a_line_break_does_not_become_a_command(flags: dict[str, object], plan: list[str]) -> None:
    config = load_run(None, {"cluster.scheduler": "slurm", **flags})
    with pytest.raises(ConfigError, match="a line with a control character"):
        batch_file(config, (), label="gsm8k", plan=plan, folder=Path("/home/ada"), python="python")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"cluster.sbatch_args": "--comment='x"}, "cannot be split into flags: No closing quotation"),
        ({"cluster.time_limit": "5:00"}, "is 300 s, and the run is stopped 300 s before it ends"),
        ({"cluster.time_limit": "0-0:1"}, "is 60 s"),
    ],
)
def test_flags_of_sbatch_that_cannot_work_are_refused(flags: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        text_for(flags)


@pytest.mark.parametrize("limit", ["6", "5:01", "0:5:01", "1-0", "UNLIMITED", "partition's"])
def test_longer_time_limits_and_those_that_sbatch_judges_are_passed_on(limit: str) -> None:
    assert f"--time={limit}" in options_of(text_for({"cluster.time_limit": limit}))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--on", "slurm", "--hub-url", "http://10.0.0.9:8000"), "a run on slurm starts its own hub"),
        (("--on", "slurm", "--engine-url", "http://10.0.0.9:9001"), "a run on slurm starts its own engine"),
        (("--on", "slurm", "--engines", "3", "--cluster.nodes", "3"), "3 engines fill 3 machines"),
    ],
)
def test_what_the_job_would_refuse_is_refused_before_submission(capsys, words: tuple[str, ...], says: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--dry-run", *words])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_a_dry_run_prints_the_file_with_the_places_of_the_processes(capsys, tmp_path: Path) -> None:
    words = ["run", "--on", "slurm", "--dry-run", "--cluster.nodes", "3", "--output", str(tmp_path / "runs")]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "#SBATCH --nodes=3" in printed
    assert "# machine 0: hub, engine\n# machine 1: env, trainer\n# machine 2: trainer-1\n" in printed
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_without_a_scheduler_is_refused(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--dry-run"])
    assert ended.value.code == 2
    assert "add --on slurm" in capsys.readouterr().err


def test_settings_that_cannot_be_are_refused_before_submission(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--on", "slurm", "--cluster.nodes", "3", "--train.ranks", "3"])
    assert ended.value.code == 2
    assert "cannot be distributed evenly" in capsys.readouterr().err


FAKE_SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


def test_a_step_has_the_pid_by_which_its_process_reports(
    make_spec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    srun = tmp_path / "srun"
    srun.write_text(FAKE_SRUN)
    srun.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    spec = make_spec("trainer", "import os, time; print('pid', os.getpid(), 'end'); time.sleep(60)")
    spec.log_path.parent.mkdir()
    step = StepProcess(spec, "n1")
    try:
        deadline = time.monotonic() + 20
        while "end" not in spec.log_path.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert step.reported_pid == int(spec.log_path.read_text().split()[1])
    finally:
        step.kill()
    assert step.reported_pid is None
    assert [file.name for file in spec.log_path.parent.iterdir()] == ["trainer.log"]


def test_a_machine_without_sbatch_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sbatch is not installed here"):
        submit(text_for({}), tmp_path)


def test_a_scheduler_and_servers_that_run_already_exclude_each_other() -> None:
    config = load_run(None, {"cluster.scheduler": "slurm", "hub_url": "http://10.0.0.9:8000"})
    with pytest.raises(ConfigError, match="starts its own hub"), run_places(config):
        pass
