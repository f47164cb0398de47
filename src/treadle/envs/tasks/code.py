"""Writing code that passes tests, which run in a sandbox (`treadle.envs.sandbox`).

treadle env code serve                             small functions, made up here
treadle env code serve --env.data tasks.jsonl      {"prompt": ..., "tests": [...], "solution": ...} a line
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.envs.args import parse_args
from treadle.envs.base import Item
from treadle.envs.catalogue import environment
from treadle.envs.data import Data, DataEnvironment
from treadle.envs.rewards import RewardResult
from treadle.envs.rewards.unit_tests import UnitTestsReward, read_tests
from treadle.envs.rows import Row, RowError
from treadle.envs.sandbox.execution import check_sandbox
from treadle.envs.seeds import stable_shuffle
from treadle.envs.tasks.code_tasks import CodeTask, generated_tasks
from treadle.errors import ConfigError

PROMPT_FIELDS = ("prompt", "question", "text")
TEST_FIELDS = ("tests", "test_list", "test")
SETUP_FIELDS = ("setup", "test_setup_code")
SOLUTION_FIELDS = ("solution", "code", "canonical_solution", "answer")


class Args(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `--env.args` may say."""

    all_or_nothing: bool = False  # else the share of tests that an answer passes
    test_s: float = 3.0
    total_s: float = 12.0
    memory_mb: int = 512
    allow_weak_sandbox: bool = False


@environment("code")
class Code(DataEnvironment):
    """The share of its tests that the last Python block of an answer passes; right is who passes all."""

    defaults: ClassVar = {"task": "", "max_token_length": 512, "reward_timeout_s": 30.0}

    def __init__(self, config: EnvConfig) -> None:
        super().__init__(config)
        self._reward = UnitTestsReward(**msgspec.to_builtins(parse_args(config, Args)))
        self.rewards = self._reward
        if config.reward_timeout_s <= self._reward.total_s:
            raise ConfigError(
                f"a reward may take {config.reward_timeout_s:g} s, but the tests of an answer {self._reward.total_s:g}",
                fix="raise --env.reward-timeout-s, or lower total_s in --env.args",
            )

    def prepare(self) -> None:
        if self.config.data:
            super().prepare()
            return
        items = [(self._to_item(task), is_held_out) for task, is_held_out in generated_tasks()]
        self.data = Data(
            train=[item for item, is_held_out in items if not is_held_out],
            # In another order, or the first ones would all be of a kind.
            held_out=stable_shuffle([item for item, is_held_out in items if is_held_out], "held-out order"),
        )

    async def open(self) -> None:
        await asyncio.to_thread(check_sandbox, self._reward.limits)  # before anything is sampled
        await super().open()

    def to_item(self, row: Row) -> Item:
        prompt, tests = row.text(*PROMPT_FIELDS), row.has(*TEST_FIELDS)
        if tests is None:
            raise RowError(f"has none of the fields {', '.join(map(repr, TEST_FIELDS))}")
        fields: dict[str, Any] = {"tests": row.fields[tests]}
        solution = row.text(*SOLUTION_FIELDS) if row.has(*SOLUTION_FIELDS) else ""
        if (setup := row.has(*SETUP_FIELDS)) is not None:
            fields["setup"] = row.fields[setup]
        if row.has("names"):
            fields["names"] = row.fields["names"]
        if row.has("entry_point"):  # the prompt is the head of a function, the test a function check(candidate)
            fields["tests"] = f"{fields['tests']}\ncheck({row.text('entry_point')})"
            solution = solution and prompt + solution
        try:
            read_tests(fields)
        except ValueError as error:
            raise RowError(str(error)) from None
        return Item.ask(prompt, answer=solution, system=self.system_prompt, **fields)

    def own_system_prompt(self) -> str:
        return "Answer with Python code, in one block that begins with ```python and ends with ```."

    def gold_completion(self, item: Item) -> str:
        return f"```python\n{item.answer}\n```"

    def is_right(self, result: RewardResult) -> bool:
        return result.parts.get(self._reward.name) == 1.0

    def _to_item(self, task: CodeTask) -> Item:
        return Item.ask(task.question, answer=task.solution, system=self.system_prompt, tests=list(task.tests))
