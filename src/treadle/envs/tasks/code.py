"""Write code that passes tests, which run in a sandbox (`treadle.envs.sandbox`).

treadle env code serve                             small functions, generated here
treadle env code serve --env.data tasks.jsonl      {"prompt": ..., "tests": [...], "solution": ...} per line
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.envs.base import Item, environment, parse_args, stable_seed, stable_shuffle
from treadle.envs.data import Data, DataEnvironment
from treadle.envs.rewards import RewardResult
from treadle.envs.rewards.unit_tests import UnitTestsReward, read_tests
from treadle.envs.rows import Row, RowError
from treadle.envs.sandbox.execution import check_sandbox
from treadle.errors import ConfigError

NUM_TESTS = 6
_WORDS = ("loom", "weft", "a", "shuttle", "warp", "of", "heddle", "reed", "bobbin", "the", "treadle", "selvedge", "in")
PROMPT_FIELDS = ("prompt", "question", "text")
TEST_FIELDS = ("tests", "test_list", "test")
SETUP_FIELDS = ("setup", "test_setup_code")
SOLUTION_FIELDS = ("solution", "code", "canonical_solution", "answer")


# ---- generated tasks


@dataclass(frozen=True)
class CodeTask:
    """A function to write, a correct solution, and its tests."""

    question: str
    solution: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class FunctionTemplate:
    """`description` and `solution` are filled with a number k; `make` draws an argument."""

    call: str  # "sum_of_multiples(values)"
    description: str
    solution: str
    make: Callable[[int], Any]

    def task(self, k: int) -> CodeTask:
        name = self.call.partition("(")[0]
        solution = f"def {self.call}:\n    {self.solution.format(k=k)}\n"
        namespace: dict[str, Any] = {}
        exec(solution, namespace)  # noqa: S102  # our own code, from FUNCTION_TEMPLATES
        given: list[Any] = []
        for number in itertools.count():
            argument = self.make(stable_seed("code", name, k, number))
            given += [] if argument in given else [argument]
            if len(given) > NUM_TESTS:
                break
        example, *tests = [f"{name}({argument!r}) == {namespace[name](argument)!r}" for argument in given]
        question = f"Write a Python function {self.call} that {self.description.format(k=k)}\nFor example, {example}"
        return CodeTask(question, solution, tuple(f"assert {test}" for test in tests))


def generated_tasks() -> Iterator[tuple[CodeTask, bool]]:
    """All tasks, always the same, and whether each is held out: about one in five of every template."""
    for template in FUNCTION_TEMPLATES:
        for k in range(2, 18):
            yield template.task(k), k % 5 == 3


def _numbers(seed: int) -> list[int]:
    """5 to 12 numbers of -20 to 40, some of them more than once."""
    return [stable_seed(seed, place) % 61 - 20 for place in range(5 + seed % 8)]


def _few_numbers(seed: int) -> list[int]:
    """8 to 19 numbers of 0 to 9, so that values repeat."""
    return [stable_seed(seed, place) % 10 for place in range(8 + seed % 12)]


def _text(seed: int) -> str:
    return " ".join(_WORDS[stable_seed(seed, place) % len(_WORDS)] for place in range(4 + seed % 6))


def _count(seed: int) -> int:
    return 20 + seed % 180


FUNCTION_TEMPLATES = (
    FunctionTemplate(
        "sum_of_multiples(values)",
        "returns the sum of those integers in the list values that are divisible by {k}.",
        "return sum(value for value in values if value % {k} == 0)",
        _numbers,
    ),
    FunctionTemplate(
        "scale(values)",
        "returns a list with every integer of the list values multiplied by {k} and then decreased by 1.",
        "return [value * {k} - 1 for value in values]",
        _numbers,
    ),
    FunctionTemplate(
        "clamp(values)",
        "returns the list values with everything below -{k} replaced by -{k} and everything above {k} by {k}.",
        "return [max(-{k}, min({k}, value)) for value in values]",
        _numbers,
    ),
    FunctionTemplate(
        "rotate(values)",
        "returns the list values rotated to the left by {k} places, as often around as it takes.",
        "return values[{k} % len(values):] + values[:{k} % len(values)]",
        _numbers,
    ),
    FunctionTemplate(
        "chunks(values)",
        "splits the list values into lists of {k} elements, in order; the last one may be shorter.",
        "return [values[start:start + {k}] for start in range(0, len(values), {k})]",
        _few_numbers,
    ),
    FunctionTemplate(
        "running_total(values)",
        "returns the list of running totals of the list values, where a total above {k} starts again at 0.",
        "totals, total = [], 0\n    for value in values:\n        total += value\n"
        "        if total > {k}:\n            total = 0\n        totals.append(total)\n    return totals",
        _few_numbers,
    ),
    FunctionTemplate(
        "pairs_with_sum(values)",
        "counts the pairs of places i < j in the list values where values[i] + values[j] is {k}.",
        "return sum(a + b == {k} for i, a in enumerate(values) for b in values[i + 1:])",
        _few_numbers,
    ),
    FunctionTemplate(
        "without_neighbours(values)",
        "returns the list values without those elements that differ by less than {k} from the element before them "
        "in values. The first element stays.",
        "return values[:1] + [b for a, b in zip(values, values[1:]) if abs(a - b) >= {k}]",
        _numbers,
    ),
    FunctionTemplate(
        "shift(text)",
        "moves every lower-case letter of text by {k} places along the alphabet, from z on to a, and leaves all "
        "other characters as they are.",
        'return "".join(chr((ord(c) - 97 + {k}) % 26 + 97) if "a" <= c <= "z" else c for c in text)',
        _text,
    ),
    FunctionTemplate(
        "every_other(text)",
        "returns text without the characters at the places {k}, 2 * {k}, 3 * {k} and so on; the first place is 1.",
        'return "".join(c for place, c in enumerate(text, start=1) if place % {k})',
        _text,
    ),
    FunctionTemplate(
        "mark(text)",
        "returns text with every word of {k} or more letters in capitals. Words are separated by single spaces.",
        'return " ".join(word.upper() if len(word) >= {k} else word for word in text.split(" "))',
        _text,
    ),
    FunctionTemplate(
        "digits(number)",
        "returns the digits of the positive integer number in base {k}, as a list, the most significant first.",
        "found = []\n    while number:\n        found.insert(0, number % {k})\n        number //= {k}\n"
        "    return found",
        _count,
    ),
    FunctionTemplate(
        "steps(number)",
        "counts how often the positive integer number must be divided by {k}, rounding down, until it is 0.",
        "count = 0\n    while number:\n        number //= {k}\n        count += 1\n    return count",
        _count,
    ),
)


# ---- environment


class CodeArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings in `--env.args`."""

    all_or_nothing: bool = False  # False: the share of tests that an answer passes
    test_s: float = 3.0
    total_s: float = 12.0
    memory_mb: int = 512
    allow_weak_sandbox: bool = False


@environment("code")
class Code(DataEnvironment):
    """The share of tests that the last Python block of an answer passes; right if it passes all."""

    defaults: ClassVar = {"task": "", "max_token_length": 512, "reward_timeout_s": 30.0}

    def __init__(self, config: EnvConfig) -> None:
        super().__init__(config)
        self._reward = UnitTestsReward(**msgspec.to_builtins(parse_args(config, CodeArgs)))
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
        train: list[Item] = []
        held_out: list[Item] = []
        for task, is_held_out in generated_tasks():
            item = Item.ask(task.question, answer=task.solution, system=self.system_prompt, tests=list(task.tests))
            (held_out if is_held_out else train).append(item)
        # Shuffled: the first ones are all from one template.
        self.data = Data(train, stable_shuffle(held_out, "held-out order"))

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
