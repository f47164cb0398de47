"""Train agents that use OpenAI's API: programs that know nothing of training.

treadle env agent serve --env.data rows.jsonl --env.args '{"command": "python examples/agent.py"}'

The command is started once for every rollout, with OPENAI_BASE_URL, OPENAI_API_KEY, TREADLE_SCORE_URL, and its item as
JSON on standard input (and in TREADLE_ITEM). Without a command, agents are started elsewhere and ask for an item with
POST /sessions/create.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.envs.base import Item, Score, environment
from treadle.envs.chat import Model
from treadle.envs.foreign.recorder import TOKEN_VARIABLE, Recorder, item_json, serving
from treadle.envs.foreign.sessions import Session, Sessions
from treadle.envs.tasks.datasets import Jsonl, JsonlArgs
from treadle.errors import ConfigError, ProcessDied
from treadle.log import get_logger

SUPERVISOR = Path(__file__).with_name("agent_supervisor.py")
# On Linux it imports no installed package, for a fast start; elsewhere it needs psutil.
PYTHON = (sys.executable, "-I", "-S") if sys.platform == "linux" else (sys.executable, "-I")
END_WITHIN_S = 10.0  # killed processes end at once, unless they hang in a system call
OWN_PREFIX = "TREADLE_"  # of variables for treadle itself, among them tokens; agents do not get them
ATROPOS_PORT = 9100  # where external agents expect a recorder
LARGEST_VARIABLE = 100_000  # bytes; the system allows 128 KiB for an environment variable
LAST_WORDS = 300  # characters of the last line that a program printed
log = get_logger("env")


@dataclass(frozen=True)
class ProgramResult:
    exit_code: int | None  # None: killed at its time limit
    tail: str  # the end of its output


def split_command(command: str | Sequence[str]) -> list[str]:
    """A command as a list of words; empty if there is none."""
    try:
        words = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise _bad_command(f"the agent's command cannot be read: {error}: {command}") from None
    if command and not (words and words[0].strip()):
        raise _bad_command("the agent's command names no program")
    if any("\0" in word for word in words):
        raise _bad_command("the agent's command has a zero byte in it")
    return words


def _bad_command(problem: str) -> ConfigError:
    return ConfigError(problem, fix="""--env.args '{"command": "python examples/agent.py"}'""")


async def run_program(
    command: Sequence[str],
    *,
    stdin: bytes,
    environment: Mapping[str, str],
    time_limit_s: float,
    working_dir: Path | None = None,
) -> ProgramResult:
    """Run it to its end or time limit. Every process that it started is killed with it, even if this one is killed.

    It gets this process's environment without the variables for treadle itself, plus `environment`.
    """
    passed_on = {name: value for name, value in os.environ.items() if not name.startswith(OWN_PREFIX)}
    with tempfile.TemporaryFile() as given, _lifeline() as (watched, release):
        given.write(stdin)  # a file: it never blocks
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *PYTHON,
            str(SUPERVISOR),
            str(watched),
            *command,
            stdin=given,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**passed_on, **environment},
            cwd=working_dir,
            pass_fds=(watched,),
            start_new_session=True,  # it must not get Ctrl-C
        )
        communicating = asyncio.ensure_future(process.communicate())
        try:
            await asyncio.wait({communicating}, timeout=time_limit_s)
            is_in_time = communicating.done()
        finally:
            release()
            await asyncio.wait({communicating}, timeout=END_WITHIN_S)
            has_ended = communicating.done()
            if not has_ended:
                communicating.cancel()
                log.warning("agent_cannot_be_ended", command=shlex.join(command), supervisor_pid=process.pid)
        if not has_ended:
            return ProgramResult(None, "")
        printed, _ = communicating.result()
        return ProgramResult(process.returncode if is_in_time else None, printed.decode(errors="replace").strip())


@contextlib.contextmanager
def _lifeline() -> Iterator[tuple[int, Callable[[], None]]]:
    """A pipe: the end that the supervisor watches, and a function that closes the other one, as would dying."""
    watched, held = os.pipe()
    with contextlib.ExitStack() as ends:
        ends.callback(os.close, held)
        try:
            yield watched, ends.close
        finally:
            os.close(watched)


class AgentArgs(JsonlArgs, frozen=True, forbid_unknown_fields=True):
    """Settings in `--env.args`, in addition to those for rows."""

    command: str | list[str] = ""  # empty: agents are started elsewhere
    working_dir: str = ""  # of the command; empty: the working directory of `treadle` when the command was given
    time_limit_s: float = 0.0  # of one agent; 0: 0.9 * worker_timeout, so that its group does not time out
    at_once: int = 0  # maximum number of concurrent programs; 0: four per core
    host: str = "127.0.0.1"
    port: int | None = None  # None: a free one, or 9100 without a command


@environment("agent")
class Agent(Jsonl):
    """A rollout is one run of the agent. Its score is what it posts, or else the rewards of the last reply."""

    defaults: ClassVar = {"max_token_length": 512, "num_eval": 32}
    args_type: ClassVar = AgentArgs
    _args: AgentArgs

    def __init__(self, config: EnvConfig) -> None:
        super().__init__(config)  # with all args: `treadle run` starts this environment from `self.config`
        self._command = split_command(self._args.command)
        self._working_dir = Path(self._args.working_dir).expanduser().absolute()
        if self._command:  # a run that is resumed from another directory starts the same program
            self.config = config.model_copy(update={"args": {**config.args, "working_dir": str(self._working_dir)}})
        self.waits_for_agents = not self._command
        self._time_limit_s = self._args.time_limit_s or 0.9 * config.worker_timeout
        self._has_rewards = "rewards" in config.args or bool(config.rewards)
        self._sessions = Sessions()
        self._running_agents = asyncio.Semaphore(self._args.at_once or 4 * (os.cpu_count() or 1))
        self._open = AsyncExitStack()
        self.url = ""

    def prepare(self) -> None:
        if self._command:
            if not self._working_dir.is_dir():
                raise ConfigError(
                    f"there is no folder {self._working_dir}, in which the agent's command is to run",
                    fix="restore it, or give --env.args again with another working_dir",
                )
            program = self._working_dir / self._command[0] if "/" in self._command[0] else self._command[0]
            if shutil.which(program) is None:
                raise _bad_command(f"cannot start '{program}': there is no such program here, or it may not be run")
        super().prepare()

    async def open(self) -> None:
        await super().open()
        recorder = Recorder(self._sessions, assigns_items=not self._command, right=self.config.right)
        port = self._args.port if self._args.port is not None else 0 if self._command else ATROPOS_PORT
        self.url = await self._open.enter_async_context(serving(recorder.app, self._args.host, port))
        if not self._command:
            log.info(
                "agents_come_by_themselves",
                ask=f"POST {self.url}/sessions/create",
                base_url=f"{self.url}/UUID/v1",
                score="POST to the answer's score_url",
                api_key=f"the value of {TOKEN_VARIABLE}" if TOKEN_VARIABLE in os.environ else "any",
                fix="""to have agents started instead: --env.args '{"command": "python examples/agent.py"}'""",
            )

    async def close(self) -> None:
        await self._open.aclose()

    async def rollout(self, item: Item, model: Model) -> Score | None:
        with self._sessions.open(model, item) as session:
            if self._command:
                async with self._running_agents:
                    return await self._run(session)
            self._sessions.offer(session)
            await session.taken.wait()
            await asyncio.wait({session.score}, timeout=self._time_limit_s)
            if not session.score.done():
                raise ProcessDied(f"the agent posted no score within {self._time_limit_s:g} s")
            return session.score.result()

    async def _run(self, session: Session) -> Score | None:
        item = msgspec.json.encode(item_json(session.item))
        variables = {
            "OPENAI_BASE_URL": f"{self.url}/{session.key}/v1",
            "OPENAI_API_KEY": os.environ.get(TOKEN_VARIABLE, "none"),
            "TREADLE_SCORE_URL": f"{self.url}/{session.score_key}/score",
        }
        for name in ("NO_PROXY", "no_proxy"):  # calls to this machine must not go through a proxy
            variables[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))
        if len(item) <= LARGEST_VARIABLE:
            variables["TREADLE_ITEM"] = item.decode()
        running = asyncio.ensure_future(
            run_program(
                self._command,
                stdin=item,
                environment=variables,
                time_limit_s=self._time_limit_s,
                working_dir=self._working_dir,
            )
        )
        try:
            either: set[asyncio.Future[Any]] = {running, session.score}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if session.score.done():
                session.score.result()  # raises if the engine is gone: no need to wait for the agent
            ended = await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return self._score_of(session, ended)

    def _score_of(self, session: Session, ended: ProgramResult) -> Score | None:
        problem = ""
        if ended.exit_code != 0:
            is_late = ended.exit_code is None
            what = f"took longer than {self._time_limit_s:g} s" if is_late else f"exited {ended.exit_code}"
            before, _, last = ended.tail.rpartition("\n")  # the last line first: a score's error is cut at its end
            problem = f"the agent {what}; it last printed: {last[-LAST_WORDS:] or '(nothing)'}"
            problem += f"\nand before that:\n{before}" if before else ""
        if session.score.done():
            if problem:
                log.warning("agent_failed_after_its_score", problem=problem)
            return session.score.result()
        if problem:
            raise ProcessDied(problem)
        if not self._has_rewards:
            raise ProcessDied(
                "the agent ended without posting a score, and there are no rewards to judge its last reply",
                fix="""POST {"score": 1.0} to TREADLE_SCORE_URL, or name some by --env.rewards""",
            )
        return None
