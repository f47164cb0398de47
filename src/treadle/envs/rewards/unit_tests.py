"""Score code by running its tests in a sandbox (see `treadle.envs.sandbox` for its guarantees)."""

from __future__ import annotations

import ast
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import msgspec

from treadle.envs.rewards.base import Reward, RewardInput
from treadle.envs.rewards.parsing import answer_text
from treadle.envs.sandbox.execution import Case, SandboxLimits, check_sandbox, run_cases, run_tests
from treadle.errors import ConfigError


class RowTests(msgspec.Struct, frozen=True):
    """The tests of a data row, from the metadata.

    `tests` is Python (one source or a list, for example of asserts), or a list of {"input", "output"} for a program
    that reads its standard input. `setup` runs before each Python test.
    """

    tests: str | list[str | dict[str, str]]
    setup: str = ""
    names: list[str] = []  # names that the answer defines although they hide a builtin or a standard module

    def __post_init__(self) -> None:
        if not self.tests:
            raise ValueError("there are no tests")
        if self.cases and self.sources:
            raise ValueError("tests are Python or pairs of input and output, not both")
        if any(set(case) != {"input", "output"} for case in self.cases):
            raise ValueError("a pair has the fields 'input' and 'output', and no others")
        self.sources  # noqa: B018  # ValueError if one of them runs nothing

    @property
    def cases(self) -> list[dict[str, str]]:
        return [test for test in self.tests if isinstance(test, dict)]

    @property
    def sources(self) -> list[str]:
        """One source per test. In a source with functions or methods test_..., each of them is a test."""
        given = [self.tests] if isinstance(self.tests, str) else [test for test in self.tests if isinstance(test, str)]
        return [f"{self.setup}\n{test}".lstrip("\n") for source in given for test in _split(source)]


class UnitTestsReward(Reward):
    """The share of tests that an answer passes, 0 to 1; `all_or_nothing`: 1 if it passes all, else 0.

    The answer is the last Python block after the last `</think>`, or else all text there.
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
        check_sandbox(self.limits)

    @property
    def limits(self) -> SandboxLimits:
        return SandboxLimits(
            test_s=self.test_s, total_s=self.total_s, memory_mb=self.memory_mb, allow_weak=self.allow_weak_sandbox
        )

    def score(self, completion: RewardInput) -> float:
        source, tests = extract_code(completion.text), read_tests(completion.metadata)
        if tests.cases:
            cases = [Case(case["input"], case["output"]) for case in tests.cases]
            problems = run_cases(source, cases, self.limits)
        else:
            problems = run_tests(source, tests.sources, self.limits, names=tests.names)
        share = problems.count("") / len(problems)
        return float(share == 1.0) if self.all_or_nothing else share


def read_tests(metadata: Mapping[str, Any]) -> RowTests:
    """Parse the tests of a row; ValueError if there are none, or none that can be run."""
    try:
        return msgspec.convert(dict(metadata), RowTests)
    except msgspec.ValidationError as error:
        raise ValueError(f"the row's tests cannot be used: {error}") from None


def extract_code(text: str) -> str:
    """The last block marked as Python; else the last unmarked one; else the whole text.

    >>> extract_code("Like this:\\n```python\\nx = 1\\n```\\nDone.")
    'x = 1\\n'
    """
    said = answer_text(text)
    blocks = list(_blocks(said))
    for wanted in (("python", "python3", "py"), ("",)):
        found = [code for language, code in blocks if language.lower() in wanted]
        if found:
            return found[-1]
    return said


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and code of each block between lines of ```; an unclosed block ends with the text."""
    language: str | None = None
    code: list[str] = []
    for line in io.StringIO(text):
        mark = line.strip(" \t\r\n")
        if language is not None and mark == "```":
            yield language, "".join(code)
            language = None
        elif language is not None:
            code.append(line)
        elif mark.startswith("```") and "`" not in mark[3:] and line.endswith("\n"):
            language, code = "".join(itertools.takewhile(str.isalnum, mark[3:].lstrip())), []
    if language is not None:
        yield language, "".join(code)


def _split(source: str) -> list[str]:
    """Split a source into tests; ValueError if nothing in it would run: such a test passes for every answer."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return [source]  # it fails, and says so
    if any(map(_is_runner, statements)):  # it would look for tests elsewhere, and end the process
        statements = [statement for statement in statements if not _is_runner(statement)]
        source = "\n".join(map(ast.unparse, statements))
    cases = _test_cases(statements)
    calls = [call for statement in statements for call in _calls_of_tests(statement, cases)]
    if not calls and not _runs_something(statements):
        raise ValueError(
            f"nothing in this test is run: {source!r:.80} (write asserts; call what you define, for example "
            "with check(add), or name it test_...; what only prepares belongs into 'setup')"
        )
    return [f"{source}\n{call}" for call in calls] or [source]


def _is_runner(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("unittest.main(")


def _test_cases(statements: Sequence[ast.stmt]) -> set[str]:
    """The classes that derive from unittest.TestCase, directly or through another one here."""
    found: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.ClassDef):
            bases = [ast.unparse(base) for base in statement.bases]
            if any(base.endswith("TestCase") or base in found for base in bases):
                found.add(statement.name)
    return found


def _calls_of_tests(statement: ast.stmt, cases: Set[str]) -> Iterator[str]:
    """Code that runs a function test_..., or each method test_... of a test class, like unittest and pytest."""
    match statement:
        case ast.FunctionDef(name=name) if name.startswith("test_"):
            yield f"{name}()"
        case ast.AsyncFunctionDef(name=name) if name.startswith("test_"):
            yield f"import asyncio\nasyncio.run({name}())"
        case ast.ClassDef(name=name, body=body) if name in cases or name.startswith("Test"):
            functions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            for test in (function for function in functions if function.name.startswith("test")):
                if name in cases:
                    # Not by a runner, which would keep a failure to itself.
                    yield f"{name}.setUpClass()\n{name}({test.name!r}).debug()"
                    continue
                call = f"_test_object.{test.name}()"
                if isinstance(test, ast.AsyncFunctionDef):
                    call = f"import asyncio\nasyncio.run({call})"
                if any(function.name == "setup_method" for function in functions):
                    call = f"_test_object.setup_method()\n{call}"
                yield f"_test_object = {name}()\n{call}"


def _runs_something(statements: Sequence[ast.AST]) -> bool:
    """Whether there is an assert, raise or call outside of functions, classes and `if __name__ ...`."""
    for statement in statements:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                continue
            case ast.If(test=test) if "__name__" in ast.unparse(test):
                continue
            case ast.Assert() | ast.Raise() | ast.Expr(value=ast.Call()):
                return True
        blocks = ast.stmt, ast.excepthandler, ast.match_case
        if _runs_something([node for node in ast.iter_child_nodes(statement) if isinstance(node, blocks)]):
            return True
    return False
