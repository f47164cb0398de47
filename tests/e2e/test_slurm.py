"""Runs on SLURM: Debian's slurmctld and slurmd, three nodes of which are this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import environment, free_port, last_lines
from tests.e2e.runs import TINY_RUN, metrics_of, newest_run, values_by_step
from tests.tiny_model import write_tiny_model
from treadle.net.address import address_towards

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,  # tests/unit/launch/test_launch_slurm.py and test_launch_machines.py: the file and the places
    pytest.mark.skipif(
        bool(MISSING) or os.geteuid() != 0,
        reason="needs root and SLURM: apt-get install munge slurmctld slurmd slurm-client",
    ),
]
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
KillWait=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores}
NodeName=n2 NodeHostname={host} NodeAddr={address} Port={ports[2]} CPUs={cores}
NodeName=n3 NodeHostname={host} NodeAddr={address} Port={ports[3]} CPUs={cores}
PartitionName=main Nodes=ALL Default=YES State=UP
"""
NODES = ("n1", "n2", "n3")
LOOPBACK = OUTSIDE = "127.0.0.1"
with suppress(OSError):  # there is no network
    OUTSIDE = address_towards("192.0.2.1", 9)  # nothing is sent


def until(condition: Callable[[], bool], what: str, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not {what} after {seconds} s"
        time.sleep(0.2)


@pytest.fixture
def slurm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """A cluster of three nodes; the variables by which its commands find it. The parameter is the address of all but
    the first node; that is always loopback, as with Debian's /etc/hosts."""
    folder = tmp_path / "slurm"
    for name in NODES:
        (folder / name).mkdir(parents=True)
    key, conf = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    cores = len(os.sched_getaffinity(0))
    address, ports = getattr(request, "param", LOOPBACK), [free_port() for _ in range(4)]
    conf.write_text(CONF.format(host=socket.gethostname(), folder=folder, ports=ports, cores=cores, address=address))
    variables = {"SLURM_CONF": str(conf)}
    munge = [f"--{name}-file={folder / 'munge'}.{name}" for name in ("key", "log", "pid", "seed")]
    commands = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", name] for name in NODES),
    ]
    daemons = []
    with (folder / "daemons.log").open("ab") as log:
        try:
            for command in commands:
                daemons.append(subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **variables}))
                if command[0] == "munged":
                    until((folder / "munge.socket").exists, "listening", 20)
            until(lambda: called("sinfo", "-h", "-o", "%t %D", env=variables) == "idle 3", "idle", 60)
            yield variables
        finally:
            called("scancel", "--full", "--user=root", env=variables)
            with suppress(AssertionError):  # else the step daemons of a failed test stay
                until(lambda: called("squeue", "--noheader", env=variables) == "", "without jobs", 60)
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(20)


def called(*argv: str, env: dict[str, str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, **env})
    return done.stdout.strip()


def run_job(slurm: dict[str, str], *words: str) -> str:
    """Submit a run; returns its job."""
    command = [sys.executable, "-m", "treadle", "run", "--on", "slurm", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(**slurm))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[1]


def has_ended(slurm: dict[str, str], job: str) -> bool:
    return called("squeue", "--noheader", f"--jobs={job}", env=slurm) == ""


def processes_of(output: Path) -> list[psutil.Process]:
    """Our processes of the runs in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(output) in " ".join(process.cmdline()) and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


def has_steps(output: Path, num_steps: int) -> bool:
    file = newest_run(output) / "metrics.jsonl"
    return file.is_file() and sum("step" in row for row in metrics_of(file.parent)) >= num_steps


def summary_of(output: Path) -> dict:
    return json.loads((newest_run(output) / "summary.json").read_text())


def test_a_job_trains_on_two_machines_and_its_allocation_ends(slurm, tmp_path: Path) -> None:
    model, output = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2), tmp_path / "runs"
    flags = (*TINY_RUN, "--model", str(model), "--output", str(output), "--steps", "4")
    job = run_job(slurm, *flags, "--cluster.nodes", "2", "--train.ranks", "2")
    log = output / f"slurm-{job}.log"
    until(lambda: has_ended(slurm, job), f"over; {last_lines(log.read_text()) if log.exists() else ''}")
    assert summary_of(output)["is_complete"], log.read_text()
    logs = newest_run(output) / "logs"
    assert {file.stem for file in logs.iterdir()} == {"hub", "engine", "env", "trainer", "trainer-1"}
    assert "trainer ready" in (logs / "trainer.log").read_text()
    assert processes_of(output) == []


def test_a_stopped_job_saves_resumes_and_leaves_nothing_when_killed(slurm, tmp_path: Path) -> None:
    model, output = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2), tmp_path / "runs"
    long = ("--steps", "100000", "--train.checkpoint-interval", "1000")
    job = run_job(slurm, *TINY_RUN, "--model", str(model), "--output", str(output), *long)
    until(lambda: has_steps(output, 2), "training")
    called("scancel", "--batch", "--signal=TERM", job, env=slurm)  # as before the time limit
    until(lambda: has_ended(slurm, job), "over", 60)
    run = newest_run(output)
    saved = [int(folder.name.removeprefix("step_")) for folder in (run / "checkpoints").glob("step_*")]
    assert saved, (output / f"slurm-{job}.log").read_text()
    before = len(metrics_of(run))

    job = run_job(slurm, "--resume", str(run))
    until(lambda: len(metrics_of(run)) > before + 2, "training again")
    launcher = next(process for process in processes_of(output) if "--resume" in process.cmdline())
    launcher.kill()
    until(lambda: has_ended(slurm, job), "over", 60)
    until(lambda: processes_of(output) == [], "without processes", 60)


@pytest.mark.parametrize("slurm", [OUTSIDE], indirect=True)
def test_engines_of_a_job_have_machines_and_may_die(slurm, tmp_path: Path) -> None:
    model, output = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2), tmp_path / "runs"
    flags = (*TINY_RUN, "--model", str(model), "--output", str(output), "--steps", "60")
    job = run_job(slurm, *flags, "--cluster.nodes", "3", "--engines", "2")
    log = output / f"slurm-{job}.log"
    for num_steps, name in ((3, "engine-1"), (15, "engine")):
        until(lambda num=num_steps: has_steps(output, num) or has_ended(slurm, job), f"step {num_steps}")
        assert not has_ended(slurm, job), log.read_text()
        engines = [process for process in processes_of(output) if process.cmdline()[2:4] == ["treadle", "engine"]]
        next(engine for engine in engines if name in engine.cmdline()).kill()
    until(lambda: has_ended(slurm, job), "over")
    said = log.read_text()
    assert summary_of(output)["is_complete"], said
    for name in ("engine", "engine-1"):
        assert f"{name} ended (" in said, said
    for number, processes in enumerate(("hub, engine", "engine-1", "env, trainer")):
        assert re.search(rf"machine {number} is \S+ \(\S+\): {processes}\n", said), said


@pytest.mark.skipif(OUTSIDE == LOOPBACK, reason="this machine has only its loopback address")
@pytest.mark.parametrize("slurm", [OUTSIDE], indirect=True)
def test_a_job_with_kills_ends_with_the_result_of_an_undisturbed_one(slurm, tmp_path: Path) -> None:
    """The servers listen on the outer address, and ask for tokens: the hub for that of a variable."""
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2)
    flags = (*TINY_RUN, "--env.max-age", "0", "--model", str(model), "--steps", "40", "--cluster.nodes", "2")
    variables = {**slurm, "TREADLE_HUB_TOKEN": "a-token-of-a-test-0123456789"}

    calm, killed = tmp_path / "calm", tmp_path / "killed"
    job = run_job(variables, *flags, "--output", str(calm))
    until(lambda: has_ended(slurm, job), "over")
    assert summary_of(calm)["is_complete"], (calm / f"slurm-{job}.log").read_text()

    job = run_job(variables, *flags, "--output", str(killed))
    log = killed / f"slurm-{job}.log"
    for num_steps, verb in ((4, "env"), (12, "engine"), (20, "hub"), (28, "train")):
        until(lambda num=num_steps: has_steps(killed, num) or has_ended(slurm, job), f"step {num_steps}")
        assert not has_ended(slurm, job), log.read_text()
        next(process for process in processes_of(killed) if process.cmdline()[2:4] == ["treadle", verb]).kill()
    until(lambda: has_ended(slurm, job), "over")
    summary = summary_of(killed)
    assert summary["is_complete"], log.read_text()
    for name in ("env", "engine", "hub", "trainer"):
        assert any(line.startswith(f"{name} died after step") for line in summary["restarts"]), summary
    assert {file.name for file in killed.glob("*.token")} == {"engine.token"}
    assert f"machine 0 is n1 ({OUTSIDE}): hub, engine" in log.read_text()

    expected = values_by_step(newest_run(calm))
    assert len(expected) == 40
    assert sum(bool(grad_norm) for _, _, grad_norm in expected.values()) > 10, "something is learned"
    assert values_by_step(newest_run(killed)) == expected
    last = "checkpoints/final_model/model.safetensors"
    assert (newest_run(killed) / last).read_bytes() == (newest_run(calm) / last).read_bytes()
    assert processes_of(killed) == []
