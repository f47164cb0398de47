"""Agents that speak OpenAI: programs that know nothing of training.

treadle env agent serve --env.data rows.jsonl --env.args '{"command": "python examples/agent.py"}'

The command is started once for every rollout, with OPENAI_BASE_URL, OPENAI_API_KEY, TREADLE_SCORE_URL, and its item as
JSON on standard input (and in TREADLE_ITEM). Without a command, agents come by themselves: POST /sessions/create.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.envs.base import Item, Score
from treadle.envs.catalogue import environment
from treadle.envs.chat import Model
from treadle.envs.foreign.agent_process import Ended, check_can_start, run_program, words_of
from treadle.envs.foreign.recorder import Recorder, item_json
from treadle.envs.foreign.server import TOKEN_VARIABLE, api_key, serving
from treadle.envs.foreign.sessions import Session, Sessions
from treadle.envs.tasks.jsonl import Jsonl, JsonlArgs
from treadle.errors import ProcessDied
from treadle.log import get_logger

ATROPOS_PORT = 9100  # where agents that come by themselves look for a recorder
LARGEST_VARIABLE = 100_000  # bytes; the system takes no environment variable of more than 128 KiB
LAST_WORDS = 300  # characters of the last line that a program printed

log = get_logger("env")


class AgentArgs(JsonlArgs, frozen=True, forbid_unknown_fields=True):
    """What `--env.args` may say, beside what it may say of rows."""

    command: str | list[str] = ""  # empty: agents come by themselves
    working_dir: str = ""  # where the command is started; empty: where `treadle` was when the command was given
    time_limit_s: float = 0.0  # of one agent; 0: nine tenths of worker_timeout, so that its group is not given up
    at_once: int = 0  # programs that run side by side at most; 0: four for each core
    host: str = "127.0.0.1"
    port: int | None = None  # None: a free one, or 9100 without a command


@environment("agent")
class Agent(Jsonl):
    """A rollout is one run of the agent. Its score is what it posts, or else what `rewards` say of the last reply."""

    defaults: ClassVar = {"max_token_length": 512, "num_eval": 32}
    args_type: ClassVar = AgentArgs
    _args: AgentArgs

    def __init__(self, config: EnvConfig) -> None:
        super().__init__(config)  # with all of its args: `treadle run` starts this environment from `self.config`
        self._command = words_of(self._args.command)
        self._working_dir = Path(self._args.working_dir).expanduser().absolute()
        if self._command:  # a resumed run starts the same program, from wherever it is resumed
            self.config = config.model_copy(update={"args": {**config.args, "working_dir": str(self._working_dir)}})
        self._time_limit_s = self._args.time_limit_s or 0.9 * config.worker_timeout
        self._has_rewards = "rewards" in config.args or bool(config.rewards)
        self._sessions = Sessions()
        self._places = asyncio.Semaphore(self._args.at_once or 4 * (os.cpu_count() or 1))
        self._open = AsyncExitStack()
        self.url = ""

    @property
    def waits_for_agents(self) -> bool:
        return not self._command

    def prepare(self) -> None:
        if self._command:
            check_can_start(self._command, self._working_dir)
        super().prepare()

    async def open(self) -> None:
        await super().open()
        recorder = Recorder(self._sessions, hands_out=not self._command, right=self.config.right)
        port = self._args.port if self._args.port is not None else 0 if self._command else ATROPOS_PORT
        self.url = await self._open.enter_async_context(serving(recorder.app, self._args.host, port))
        if not self._command:
            self._say_where_to_come()

    def _say_where_to_come(self) -> None:
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
                async with self._places:
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
            "OPENAI_API_KEY": api_key(),
            "TREADLE_SCORE_URL": f"{self.url}/{session.score_key}/score",
        }
        for name in ("NO_PROXY", "no_proxy"):  # a proxy meant for the internet must not swallow calls to this machine
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
                session.score.result()  # an engine that is gone: no use in waiting for the agent
            ended = await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return self._worth(session, ended)

    def _worth(self, session: Session, ended: Ended) -> Score | None:
        problem = self._problem(ended)
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

    def _problem(self, ended: Ended) -> str:
        if ended.exit_code == 0:
            return ""
        what = f"took longer than {self._time_limit_s:g} s" if ended.exit_code is None else f"exited {ended.exit_code}"
        before, _, last = ended.tail.rpartition("\n")  # the last line first: a score's error is cut at its end
        told = f"the agent {what}; it last printed: {last[-LAST_WORDS:] or '(nothing)'}"
        return f"{told}\nand before that:\n{before}" if before else told
