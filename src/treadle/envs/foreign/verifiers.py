"""Run environments of the library verifiers (0.4).

treadle env verifiers:NAME serve --env.args '{"taskset": {"split": "train"}, "eval_taskset": {"split": "test"}}'

The environment runs unchanged, with its own tasks, program, tools and rewards. Its model is the recorder. `--env.args`
is the [env] block of verifiers; "eval_taskset" is an addition.
"""

from __future__ import annotations

import asyncio
import importlib
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any, ClassVar

from treadle.config.env import EnvConfig
from treadle.envs.base import Environment, Item, Message, Score, environment, is_enough
from treadle.envs.chat import Model
from treadle.envs.foreign.recorder import SHARED, TOKEN_VARIABLE, Recorder, serving
from treadle.envs.foreign.sessions import Session, Sessions
from treadle.errors import ConfigError, MissingExtra, ProcessDied

OLDEST = (0, 4)  # older versions have another interface
ENDLESS_TASKS = 1000  # taken from an unbounded taskset
HELD_OUT_EVERY = 10
MAX_HELD_OUT = 256

Json = dict[str, Any]


@environment("verifiers")
class Verifiers(Environment):
    """One episode is one rollout; the reward of its trained agent is the score."""

    defaults: ClassVar = {"max_token_length": 1024}

    def __init__(self, config: EnvConfig) -> None:
        super().__init__(config)
        self._id = config.name.partition(":")[2]
        if not self._id:
            raise ConfigError("which environment of verifiers?", fix="write its name: treadle env verifiers:NAME")
        self._library = _library()
        self._settings, self._held_out = self._resolve()  # here, so that a misspelt name does not wait for an engine
        self._sessions = Sessions()
        self._open = AsyncExitStack()
        self._tasks: dict[str, list[Any]] = {}  # of verifiers, by split

    async def open(self) -> None:
        # In a thread, because it may download: signals must still be handled.
        self._env = await asyncio.to_thread(self._load)
        url = await self._open.enter_async_context(serving(Recorder(self._sessions).app, "127.0.0.1", 0))
        await self._open.enter_async_context(self._env.serving())
        # One URL for all rollouts: verifiers caches a client for each URL forever.
        client = self._library.EvalClientConfig(base_url=f"{url}/{SHARED}/v1", api_key_var=TOKEN_VARIABLE)
        self._context = self._library.ModelContext(model="policy", client=client)

    async def close(self) -> None:
        await self._open.aclose()

    def train_items(self) -> Sequence[Item]:
        return _items("train", self._tasks["train"])

    def eval_items(self) -> Sequence[Item]:
        return _items("held_out", self._tasks["held_out"])

    async def rollout(self, item: Item, model: Model) -> Score:
        task = self._tasks[item.metadata["split"]][item.metadata["place"]]
        with self._sessions.open(model, item) as session:
            episode = await self._env.run_episode(
                task,
                self._context,
                on_trace=lambda trace: self._sessions.by_client.update({trace.id: session}),
                on_discard=lambda trace: session.discard([trace.id]),  # it is started again: this attempt is not scored
            )
            if session.score.done():
                session.score.result()  # raises: the engine is gone
            return _score(episode, session, self.config.right)

    def _resolve(self) -> tuple[Any, Any]:
        """The settings of the environment and of its held-out tasks, if any; loads no data."""
        block = {**self.config.args, "taskset": {"id": self._id, **self.config.args.get("taskset", {})}}
        held_out = block.pop("eval_taskset", None)
        try:
            self._loaders = importlib.import_module("verifiers.v1.utils.loaders")
            roles = self._loaders.env_config_type(self._id, block.get("id", "")).model_fields
            # Limit an episode to less than the time limit of its group.
            limits = {"episode": 0.9 * self.config.worker_timeout, **block.get("timeout", {})}
            block = _on_this_machine(block, roles, self._library) | {"timeout": limits}
            other = block | {"taskset": {**block["taskset"], **(held_out or {})}}
            resolve = self._loaders.resolve_env_config
            return resolve(block), held_out and resolve(other).taskset
        except (ImportError, AttributeError, TypeError, ValueError) as error:  # a ValidationError is a ValueError
            raise ConfigError(
                f"verifiers cannot load '{self._id}': {error}", fix="install its package here, and check --env.args"
            ) from error

    def _load(self) -> Any:
        try:
            env = self._loaders.load_environment(self._settings)
            tasks = _tasks(env.taskset)
            if self._held_out:
                train, held_out = tasks, _tasks(self._loaders.load_taskset(self._held_out))
            else:
                train, held_out = _split(tasks)
        except Exception as error:  # third-party code, which may read files, download and need keys
            *_, last = traceback.extract_tb(error.__traceback__)
            problem = f"{type(error).__name__}: {' '.join(str(error).split())} ({last.filename}:{last.lineno})"
            raise ConfigError(
                f"'{self._id}' cannot load its tasks: {problem}",
                fix="see to what it needs: its data, its keys, its settings in --env.args",
            ) from error
        self._tasks = {"train": train, "held_out": held_out}
        return env


def _library() -> Any:
    try:
        found = version("verifiers")
    except PackageNotFoundError:
        found = ""
    if not found or tuple(map(int, found.split(".")[:2])) < OLDEST:
        state = f"is {found} here" if found else "is not installed here"
        raise MissingExtra(
            f"this needs the package verifiers, 0.4 or newer; it {state}",
            fix="pip install 'verifiers>=0.4' and the package of the environment, beside treadle",
        )
    return importlib.import_module("verifiers.v1")


def _on_this_machine(block: Json, roles: Mapping[str, Any], library: Any) -> Json:
    """Run agents without a configured runtime on this machine; the default of verifiers is a paid sandbox."""
    chosen = dict(block)
    for name, field in roles.items():
        if isinstance(field.default, library.AgentConfig) and field.default.runtime == library.PrimeConfig():
            chosen[name] = {"runtime": {"type": "subprocess"}, **chosen.get(name, {})}
    return chosen


def _tasks(taskset: Any) -> list[Any]:
    return list(taskset if taskset.bounded else islice(taskset, ENDLESS_TASKS))


def _split(tasks: list[Any]) -> tuple[list[Any], list[Any]]:
    """Hold out every tenth task: always the same ones."""
    held_out = set(range(0, len(tasks), HELD_OUT_EVERY)[:MAX_HELD_OUT]) if len(tasks) > 1 else set()
    return (
        [task for place, task in enumerate(tasks) if place not in held_out],
        [task for place, task in enumerate(tasks) if place in held_out],
    )


def _items(split: str, tasks: Sequence[Any]) -> list[Item]:
    items = []
    for place, data in enumerate(task.data for task in tasks):
        before: tuple[Message, ...] = ({"role": "system", "content": data.system_prompt},) if data.system_prompt else ()
        messages = (*before, {"role": "user", "content": data.prompt_text})  # for display; the program builds its own
        metadata = {"split": split, "place": place, "name": data.name or ""}
        items.append(Item(messages=messages, answer=str(getattr(data, "answer", "")), metadata=metadata))
    return items


def _score(episode: Any, session: Session, right: float) -> Score:
    """The reward of the one trained agent. Conversations of other agents (judges) are not part of the rollout."""
    trained = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    session.discard({trace.id for trace in episode.traces} - {trace.id for trace in trained})
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or not trained:
        raise ProcessDied("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not whole")
    if len(trained) > 1:
        raise ConfigError(
            f"{len(trained)} agents of one episode are to be trained, each with a reward of its own",
            fix="train one of them: the others' `trainable` is False",
        )
    (trace,) = trained
    parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    parts |= {name: float(value) for name, value in trace.metrics.items() if value is not None and name not in parts}
    return Score(reward=trace.reward, is_right=is_enough(trace.reward, right), parts=parts)
