"""Code, judged by running its tests in a sandbox (`treadle.envs.sandbox` says what that keeps out)."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from treadle.envs.rewards.base import Reward, RewardInput
from treadle.envs.rewards.passages import answer_text
from treadle.envs.sandbox.runs import Case, Limits, check_fences, run_cases, run_tests
from treadle.errors import ConfigError


class RowTests(msgspec.Struct, frozen=True):
    """What a row says about its tests; a reward finds it in the metadata.

    `tests` is Python (a source, or a list of them, asserts for example), or a list of {"input", "output"} for a
    program that reads its standard input. `setup` runs before each Python test.
    """

    tests: str | list[str | dict[str, str]]
    setup: str = ""
    names: list[str] = []  # of the answer that hide a builtin or a standard module: tests get the answer's

    def __post_init__(self) -> None:
        if not self.tests:
            raise ValueError("there are no tests")
        if self.cases and self.sources:
            raise ValueError("tests are Python or pairs of input and output, not both")
        if any(set(case) != {"input", "output"} for case in self.cases):
            raise ValueError("a pair has the fields 'input' and 'output', and no others")

    @property
    def cases(self) -> list[dict[str, str]]:
        return [test for test in self.tests if isinstance(test, dict)]

    @property
    def sources(self) -> list[str]:
        """One for each test. Of a source with functions test_..., each is a test."""
        given = [self.tests] if isinstance(self.tests, str) else [test for test in self.tests if isinstance(test, str)]
        return [f"{self.setup}\n{test}".lstrip("\n") for source in given for test in _split(source)]


class UnitTestsReward(Reward):
    """The share of its row's tests that an answer passes, 0 to 1; `all_or_nothing`: 1 when it passes all, else 0.

    The answer is the last Python block behind the last `</think>`, or else all of it.
    """

    all_or_nothing: bool = False
    test_s: float = 3.0  # wall-clock time for one test
    total_s: float = 12.0  # for all tests of an answer
    memory_mb: int = 512
    allow_weak_sandbox: bool = False

    def check(self) -> None:
        if not (0 < self.test_s <= self.total_s) or self.memory_mb < 64:
            raise ConfigError(
                f"reward '{self.name}': these limits cannot be: test_s {self.test_s:g}, total_s {self.total_s:g}, "
                f"memory_mb {self.memory_mb}",
                fix="0 < test_s <= total_s, and at least 64 MB for Python itself",
            )

    def warm_up(self) -> None:
        check_fences(self.limits)

    @property
    def limits(self) -> Limits:
        return Limits(
            test_s=self.test_s, total_s=self.total_s, memory_mb=self.memory_mb, allow_weak=self.allow_weak_sandbox
        )

    def score(self, completion: RewardInput) -> float:
        problems = run(code_in(completion.text), read_tests(completion.metadata), self.limits)
        share = problems.count("") / len(problems)
        return float(share == 1.0) if self.all_or_nothing else share


def read_tests(metadata: Mapping[str, Any]) -> RowTests:
    """ValueError when a row has no tests, or none that can be run."""
    try:
        return msgspec.convert(dict(metadata), RowTests)
    except msgspec.ValidationError as error:
        raise ValueError(f"the row's tests cannot be used: {error}") from None


def run(source: str, tests: RowTests, limits: Limits) -> list[str]:
    """For each test "" when it passed, else why not."""
    if tests.cases:
        return run_cases(source, [Case(case["input"], case["output"]) for case in tests.cases], limits)
    return run_tests(source, tests.sources, limits, names=tests.names)


_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)


def code_in(text: str) -> str:
    """The last block that is marked as Python; else the last that is marked as nothing; else the whole text.

    >>> code_in("Like this:\\n```python\\nx = 1\\n```\\nDone.")
    'x = 1\\n'
    """
    said = answer_text(text)
    blocks = _FENCE.findall(said)
    for wanted in (("python", "python3", "py"), ("",)):
        found = [code for language, code in blocks if language.lower() in wanted]
        if found:
            return str(found[-1])
    return said


def _split(source: str) -> list[str]:
    try:
        functions = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    except SyntaxError:
        return [source]  # it fails, and says so
    tests = [name for name in functions if name.startswith("test_")]
    return [f"{source}\n{name}()" for name in tests] or [source]
