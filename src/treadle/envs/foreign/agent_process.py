"""A user's program as a process that can be ended, with everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.errors import ConfigError
from treadle.log import get_logger

KEEPER = Path(__file__).with_name("keeper.py")
# Nothing of the installation is imported on Linux, which makes it quick; elsewhere it needs psutil.
PYTHON = (sys.executable, "-I", "-S") if sys.platform == "linux" else (sys.executable, "-I")
END_WITHIN_S = 10.0  # killed processes end at once, unless they hang in the system
OURS = "TREADLE_"  # variables that begin so are meant for us; tokens are among them

log = get_logger("env")


@dataclass(frozen=True)
class Ended:
    exit_code: int | None  # None: it was ended because its time was up
    tail: str  # the last of what it printed


def words_of(command: str | Sequence[str]) -> list[str]:
    """A command as words; none at all where it is empty."""
    try:
        words = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise _bad_command(f"the agent's command cannot be read: {error}: {command}") from None
    if command and not (words and words[0].strip()):
        raise _bad_command("the agent's command names no program")
    if any("\0" in word for word in words):
        raise _bad_command("the agent's command has a zero byte in it")
    return words


def check_can_start(command: Sequence[str], working_dir: Path) -> None:
    if not working_dir.is_dir():
        raise ConfigError(
            f"there is no folder {working_dir}, in which the agent's command is to run",
            fix="restore it, or give --env.args again with another working_dir",
        )
    program = working_dir / command[0] if "/" in command[0] else command[0]
    if shutil.which(program) is None:
        raise _bad_command(f"cannot start '{program}': there is no such program here, or it may not be run")


def _bad_command(problem: str) -> ConfigError:
    return ConfigError(problem, fix="""--env.args '{"command": "python examples/agent.py"}'""")


async def run_program(
    command: Sequence[str],
    *,
    stdin: bytes,
    environment: Mapping[str, str],
    time_limit_s: float,
    working_dir: Path | None = None,
) -> Ended:
    """Run it to its end, or for so long. Whatever it left running is ended with it, even if we are killed meanwhile.

    It gets our environment, without the variables that are meant for treadle itself, and `environment`.
    """
    passed_on = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    with tempfile.TemporaryFile() as given, _lifeline() as (watched, let_go):
        given.write(stdin)  # a file: nothing can block on it
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *PYTHON,
            str(KEEPER),
            str(watched),
            *command,
            stdin=given,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**passed_on, **environment},
            cwd=working_dir,
            pass_fds=(watched,),
            start_new_session=True,  # Ctrl-C is ours
        )
        keeping = asyncio.ensure_future(process.communicate())
        try:
            await asyncio.wait({keeping}, timeout=time_limit_s)
            is_in_time = keeping.done()
        finally:
            let_go()
            await asyncio.wait({keeping}, timeout=END_WITHIN_S)
            has_ended = keeping.done()
            if not has_ended:
                keeping.cancel()
                log.warning("agent_cannot_be_ended", command=shlex.join(command), keeper_pid=process.pid)
        if not has_ended:
            return Ended(None, "")
        printed, _ = keeping.result()
        return Ended(process.returncode if is_in_time else None, printed.decode(errors="replace").strip())


@contextlib.contextmanager
def _lifeline() -> Iterator[tuple[int, Callable[[], None]]]:
    """A pipe: the end that the keeper watches, and how to let go of the other. Dying lets go of it too."""
    watched, held = os.pipe()
    with contextlib.ExitStack() as ends:
        ends.callback(os.close, held)
        try:
            yield watched, ends.close
        finally:
            os.close(watched)
