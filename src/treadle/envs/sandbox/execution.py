"""Run an answer against its tests in sandboxed processes (see the docstring of the package)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from treadle.envs.sandbox.child import NOT_RESTRICTED
from treadle.errors import ConfigError

_CHILD = Path(__file__).with_name("child.py")
# Not -I: it ignores PYTHONHASHSEED, and an answer must behave the same way every time.
_PYTHON = (sys.executable, "-P", "-s", "-S", "-X", "utf8", str(_CHILD))
_ENVIRONMENT = {"PYTHONHASHSEED": "0"}
_AT_ONCE = 65536
START_S = 60.0  # time limit of check_sandbox


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one answer."""

    test_s: float = 3.0  # wall-clock time of one test
    total_s: float = 12.0  # of all its tests, including the start of processes
    memory_mb: int = 512  # address space
    output_bytes: int = 2**20
    allow_weak: bool = False  # run also where the system lacks seccomp or Landlock


@dataclass(frozen=True)
class Case:
    """A program that reads `input` must write `output`."""

    input: str
    output: str


def check_sandbox(limits: SandboxLimits) -> None:
    """Raise ConfigError if this system cannot sandbox code, before the first answer needs it.

    Its time limit is long: on a busy machine a process may take longer to start than an answer may take.
    """
    patient = replace(limits, test_s=START_S, total_s=START_S)
    problems = run_cases("print(input())", [Case("ready", "ready")], patient)
    if problems != [""]:
        raise ConfigError(f"the sandbox does not work here: {problems[0]}", fix="see whether Python starts with -S")


def run_cases(source: str, cases: Sequence[Case], limits: SandboxLimits) -> list[str]:
    """Run the answer as a program, once for each case. For each: "" if it passed, else the problem."""
    deadline = time.monotonic() + limits.total_s
    return [_run_case(source, case, limits, deadline) for case in cases]


def run_tests(source: str, tests: Sequence[str], limits: SandboxLimits, *, names: Sequence[str] = ()) -> list[str]:
    """Run Python tests of the answer's functions. For each: "" if it passed, else the problem.

    A test passes if it raises nothing. `names` are names of the answer that hide a builtin or a standard module.
    """
    deadline = time.monotonic() + limits.total_s
    problems: list[str] = []
    while len(problems) < len(tests):  # an answer that dies in a test is loaded again for the next one
        problems += _run_until_death(source, tests[len(problems) :], names, limits, deadline)
    return problems


def _run_case(source: str, case: Case, limits: SandboxLimits, deadline: float) -> str:
    deadline = min(deadline, time.monotonic() + limits.test_s)
    if time.monotonic() >= deadline:
        return _too_long(limits)
    job = {"role": "program", "source": source}
    with _file_with(case.input.encode()) as stdin, _start(job, limits, stdin=stdin, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None  # noqa: S101  # we asked for it
        try:
            written = b"".join(_arriving(child.stdout, deadline, limits.output_bytes))
            code = child.wait(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            return _too_long(limits)
        except OverflowError:
            return f"wrote more than {limits.output_bytes} bytes"
    if code != 0:
        return f"ended with exit code {code}" if code > 0 else f"was ended by {_signal_name(-code)}"
    return "" if _lines(written.decode(errors="replace")) == _lines(case.output) else "wrote something else"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _lines(text: str) -> list[str]:
    """The lines, without trailing white space and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _run_until_death(
    source: str, tests: Sequence[str], names: Sequence[str], limits: SandboxLimits, deadline: float
) -> list[str]:
    """Results of the first tests (at least one), up to one that ended the answer's process or took too long."""
    if time.monotonic() >= deadline:
        return [_too_long(limits)] * len(tests)
    with contextlib.ExitStack() as stack:
        asked, to_answer = _pipe(stack)
        heard, from_answer = _pipe(stack)
        verdicts, report = _pipe(stack)
        job: dict[str, Any] = {"role": "answer", "source": source}
        stack.enter_context(_start(job, limits, stdin=asked, stdout=from_answer))
        job = {"role": "tests", "tests": tests, "names": names, "verdict_fd": report.fileno()}
        stack.enter_context(_start(job, limits, stdin=heard, stdout=to_answer, also=report.fileno()))
        for theirs in (asked, to_answer, heard, from_answer, report):
            theirs.close()  # otherwise a process would not get EOF when the other one ends
        arriving = _TestResults(verdicts)
        found: list[str] = []
        try:
            problem = arriving.next(deadline)  # the answer is loaded
            if problem:
                return [problem] * len(tests)
            for _ in tests:
                found.append(arriving.next(min(deadline, time.monotonic() + limits.test_s)))
        except TimeoutError:
            found.append(_too_long(limits))
        except EOFError:
            found = found or ["the test ended its own process"]
        return found


@dataclass
class _TestResults:
    """Reads the results of the tests, one line each; EOFError at the end."""

    file: IO[bytes]
    unread: bytes = b""

    def next(self, deadline: float) -> str:
        while b"\n" not in self.unread:
            some = _read_some(self.file, deadline)
            if not some:
                raise EOFError
            self.unread += some
        line, _, self.unread = self.unread.partition(b"\n")
        return str(json.loads(line))


def _arriving(file: IO[bytes], deadline: float, limit: int) -> Iterator[bytes]:
    """Read until the end; OverflowError above `limit` bytes."""
    while chunk := _read_some(file, deadline):
        limit -= len(chunk)
        if limit < 0:
            raise OverflowError
        yield chunk


def _read_some(file: IO[bytes], deadline: float) -> bytes:
    """Read what is available; b"" at the end; TimeoutError at the deadline."""
    if not select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise TimeoutError
    return os.read(file.fileno(), _AT_ONCE)


@contextlib.contextmanager
def _start(
    job: Mapping[str, Any], limits: SandboxLimits, *, stdin: IO[bytes], stdout: IO[bytes] | int, also: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that restricts itself and runs `job`; it is killed at the end, and cannot start others.

    It stays in this process group and dies with its parent: killing a reward worker kills it too.
    """
    rlimits = {
        "CPU": math.ceil(limits.total_s) + 1,
        "AS": limits.memory_mb * 2**20,
        "FSIZE": 0,
        "NOFILE": 64,
        "CORE": 0,
    }
    full_job = {**job, "limits": rlimits, "parent": os.getpid(), "allow_weak": limits.allow_weak}
    with (
        tempfile.TemporaryDirectory(prefix="treadle-answer-", ignore_cleanup_errors=True) as folder,
        _file_with(json.dumps(full_job).encode()) as file,
    ):
        child = subprocess.Popen(
            [*_PYTHON, str(file.fileno())],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=_ENVIRONMENT,
            pass_fds=[file.fileno(), *([] if also is None else [also])],
        )
        assert child.stderr is not None  # noqa: S101  # we asked for it
        with child:
            try:
                yield child
            finally:
                child.kill()
                child.wait()
            missing = child.stderr.read().decode(errors="replace").strip()  # untrusted code has no access to it
        if child.returncode == NOT_RESTRICTED and missing:
            raise ConfigError(
                f"this system cannot sandbox code that a model wrote: it lacks {missing}",
                fix="use Linux 5.13 or later on x86_64 or aarch64, or accept it: "
                "--env.args '{\"allow_weak_sandbox\": true}'",
            )


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    read_fd, write_fd = os.pipe()
    return (
        stack.enter_context(os.fdopen(read_fd, "rb", buffering=0)),
        stack.enter_context(os.fdopen(write_fd, "wb", buffering=0)),
    )


def _file_with(content: bytes) -> IO[bytes]:
    """An unlinked, read-only file, to be inherited by a child process."""
    with tempfile.NamedTemporaryFile(prefix="treadle-answer-") as file:
        file.write(content)
        file.flush()
        return open(file.name, "rb")  # the caller closes it


def _too_long(limits: SandboxLimits) -> str:
    return f"took longer than {limits.test_s:g} s, or all tests longer than {limits.total_s:g} s"
