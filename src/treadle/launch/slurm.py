"""Run on SLURM: write and submit a batch file, and start the processes of a run as steps of its allocation.

treadle run --on slurm            outside of an allocation: writes the batch file, submits it with sbatch, and ends
  batch file: treadle run --on slurm
                                  inside: the launcher, on the first machine; each process is a step (srun)

The batch script is the launcher, so the allocation ends when it ends, also after kill -9.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from treadle.background import PARENT_ELSEWHERE, PARENT_VARIABLE
from treadle.config.schema import RunConfig
from treadle.errors import ConfigError, UserError
from treadle.launch.machine import Listeners
from treadle.launch.machines import Machine, gpus_of_each
from treadle.launch.placement import LocalProcess
from treadle.launch.process_spec import ProcessSpec
from treadle.net.address import address_towards, is_loopback_host

JOB_VARIABLE = "SLURM_JOB_ID"
SAVE_BEFORE_S = 300  # from SIGTERM, at which the trainer saves a checkpoint, to the time limit
_ANSWER_S = 60.0
_ANY_PORT = 9
# srun would take them for flags of the step, which has all processors of its machine unless it is given a number.
_OF_THE_JOB = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE")
_WRITE_PID = 'echo $$ > "$0"; exec "$@"'  # of a shell in whose place the process runs, so it has the same
_SIGNALLED = 128  # srun's exit code for a task that ended by signal N is 128 + N


# ---- submit


def is_inside(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs in an allocation, so that processes can be started in it."""
    return JOB_VARIABLE in environment


def batch_file(
    config: RunConfig, words: Sequence[str], *, label: str, plan: Sequence[str], folder: Path, python: str
) -> str:
    """The text of the batch file. `words`: of the command line after `treadle run`; `plan`: the processes of each
    machine; `folder`: the working directory."""
    cluster, num_gpus = config.cluster, gpus_of_each(config)
    options = {
        "job-name": f"treadle-{label}",
        "nodes": str(cluster.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(num_gpus) if num_gpus else None,
        "cpus-per-task": str(cluster.cpus_per_node) if cluster.cpus_per_node else None,
        "mem": f"{round(cluster.memory_gb_per_node * 1024)}M" if cluster.memory_gb_per_node else "0",
        "time": cluster.time_limit or None,
        "chdir": str(folder),
        "output": str(config.output.expanduser().absolute() / "slurm-%j.log"),
        "signal": f"B:TERM@{SAVE_BEFORE_S}",
    }
    lines = [f"--{name}={shlex.quote(value)}" for name, value in options.items() if value is not None]
    lines += [*([] if cluster.cpus_per_node else ["--exclusive"]), "--no-requeue"]
    lines += map(shlex.quote, _further_flags(cluster.sbatch_args))
    _check_time_limit(cluster.time_limit)
    comments = [f"#SBATCH {line}" for line in lines]
    comments += [f"# machine {number}: {names}" for number, names in enumerate(plan)]
    for line in comments:
        if not line.isprintable():  # what follows a line break would be run as a command
            raise ConfigError(
                f"the batch file would have a line with a control character: {line!r}",
                fix="remove it from the setting or the name of the folder",
            )
    return "\n".join([
        "#!/bin/bash",
        *comments,
        f"exec {shlex.quote(python)} -m treadle run \\",
        f"  {shlex.join(words)}",
        "",
    ])  # fmt: skip


def _further_flags(sbatch_args: str) -> list[str]:
    try:
        return shlex.split(sbatch_args)
    except ValueError as error:
        raise ConfigError(
            f"--cluster.sbatch-args {sbatch_args!r} cannot be split into flags: {error}", fix="close every quote"
        ) from None


def _check_time_limit(limit: str) -> None:
    limit_s = seconds_of(limit)
    if limit_s is not None and limit_s <= SAVE_BEFORE_S:
        raise ConfigError(
            f"--cluster.time-limit {limit} is {limit_s} s, and the run is stopped {SAVE_BEFORE_S} s before it ends",
            fix="give it longer, such as 1:00:00 for an hour",
        )


def seconds_of(limit: str) -> int | None:
    """Of a time limit as sbatch reads it; None for another text, which sbatch judges.

    >>> seconds_of("5"), seconds_of("5:30"), seconds_of("1:00:00"), seconds_of("2-0"), seconds_of("UNLIMITED")
    (300, 330, 3600, 172800, None)
    """
    days, dash, rest = limit.strip().rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in (*parts, *([days] if dash else ()))) or len(parts) > 3:
        return None
    # With days the parts begin with hours; without days one or two begin with minutes.
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(int(part) * unit for part, unit in zip(parts, units, strict=False))


def submit(text: str, output: Path) -> None:
    """Write the batch file into `output`, and hand it to sbatch."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not installed here", fix="start this on a machine of the cluster, or print the file: --dry-run"
        )
    output.mkdir(parents=True, exist_ok=True)
    file = output / f"{time.strftime('%Y%m%d-%H%M%S')}.sbatch"
    file.write_text(text)
    done = _called("sbatch", "--parsable", str(file), fix=f"correct the flags of the run; the batch file is {file}")
    job = done.strip().partition(";")[0]
    log = output.absolute() / f"slurm-{job}.log"
    print(f"job {job} is submitted: {file}")
    print(f"its log: {log}")
    print(f"stop it, with a checkpoint: scancel --batch --signal=TERM {job}")


# ---- inside of the allocation


def allocated_machines(environment: Mapping[str, str] = os.environ) -> tuple[Machine, ...]:
    """The machines of this allocation, that of the launcher first."""
    shown = _called("scontrol", "--oneliner", "show", "nodes", environment["SLURM_JOB_NODELIST"])
    machines = parse_machines(shown)
    own = environment.get("SLURMD_NODENAME", "")
    if own not in [machine.name for machine in machines]:
        raise ConfigError(
            f"this shell belongs to job {environment[JOB_VARIABLE]}, and does not run on one of its machines",
            fix="start the run in a shell without an allocation: it submits a job of its own",
        )
    first, *others = sorted(machines, key=lambda machine: machine.name != own)
    return (with_reachable_address(first, others), *others)


def with_reachable_address(own: Machine, others: Sequence[Machine]) -> Machine:
    """This machine, with its address on the way to the others if its own name resolves to loopback, as Debian's
    /etc/hosts says (127.0.1.1)."""
    remote = next((machine.address for machine in others if not is_loopback_host(machine.address)), None)
    if remote is None or not is_loopback_host(own.address):
        return own
    try:
        return replace(own, address=address_towards(remote, _ANY_PORT))
    except OSError:  # settings_for refuses its address
        return own


def parse_machines(shown: str) -> list[Machine]:
    """From the output of `scontrol --oneliner show nodes`."""
    machines = []
    for line in shown.splitlines():
        name, host = (re.search(rf"\b{key}=(\S+)", line) for key in ("NodeName", "NodeAddr"))
        if name is not None:
            machines.append(Machine(name[1], _address_of(host[1] if host else name[1])))
    return machines


def _address_of(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise UserError(
            f"the machine {host} of the allocation has no address: {error}", fix="ask who runs the cluster"
        ) from None


@dataclass(frozen=True)
class SlurmPlacement:
    """Starts each process as a step of the allocation, on its machine. Steps share all processors, memory and GPUs of
    the machines (--overlap): which GPUs a process uses is in the plan."""

    machines: Sequence[Machine]
    listeners: Listeners

    def has_machine(self, _: ProcessSpec) -> bool:
        return True  # an allocation ends with the loss of a machine

    def start(self, spec: ProcessSpec) -> StepProcess:
        listener = self.listeners.get(spec.name)
        if listener is not None:
            listener.close()  # a step cannot inherit it; the server takes the port itself
        return StepProcess(spec, self.machines[spec.node].name)


class StepProcess:
    """A step, through its srun. SIGTERM to srun would kill the step, so signals go through scancel. When the launcher
    is killed, srun gets SIGTERM from the kernel (setpriv), and ends the step."""

    pid = None

    def __init__(self, spec: ProcessSpec, machine: str) -> None:
        self._name = spec.name
        self._pid_file = spec.log_path.with_suffix(".pid")
        self._pid_file.unlink(missing_ok=True)
        srun = (
            "srun", "--quiet", f"--job-name={spec.name}", "--overlap", "--nodes=1", "--ntasks=1",
            f"--nodelist={machine}", "--mem=0", "--kill-on-bad-exit=0",
        )  # fmt: skip
        inherited = {name: value for name, value in spec.env.items() if name not in _OF_THE_JOB}
        env = {**inherited, PARENT_VARIABLE: PARENT_ELSEWHERE}
        command = ("sh", "-c", _WRITE_PID, str(self._pid_file), *spec.argv)
        self._srun = LocalProcess(("setpriv", "--pdeathsig", "TERM", *srun, *command), env, spec.log_path)

    @property
    def reported_pid(self) -> int | None:
        try:
            text = self._pid_file.read_text()
        except OSError:  # the step has not begun
            return None
        return int(text) if text.endswith("\n") else None

    def poll(self) -> int | None:
        code = self._srun.poll()
        return code if code is None or code <= _SIGNALLED else _SIGNALLED - code

    def terminate(self) -> None:
        if not self._signal_step("TERM"):
            self._srun.terminate()  # it has not started the step yet

    def kill(self) -> None:
        if self.poll() is None:
            self._signal_step("KILL")
            self._srun.kill()
        self._pid_file.unlink(missing_ok=True)

    def _signal_step(self, name: str) -> bool:
        """Whether there is a step. What fails here is seen by the supervisor: the process runs on, and is killed."""
        try:
            listed = _called("squeue", "--steps", f"--jobs={os.environ[JOB_VARIABLE]}", "--noheader", "--format=%i %j")
            steps = [line.split() for line in listed.splitlines()]
            own = [step[0] for step in steps if step[1:] == [self._name]]
            if own:
                _called("scancel", "--quiet", f"--signal={name}", *own)
        except UserError:
            return True
        return bool(own)


def _called(*argv: str, fix: str = "") -> str:
    """The output of a command of SLURM."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{argv[0]} failed: {error}", fix=fix) from None
    if done.returncode:
        raise UserError(f"{argv[0]} failed: {done.stderr.strip() or done.stdout.strip()}", fix=fix)
    return done.stdout
