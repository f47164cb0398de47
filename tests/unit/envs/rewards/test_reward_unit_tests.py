"""Code as an answer: where it is found in a text, and what its tests make of it."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.unit.envs.sandbox_support import needs_sandbox
from treadle.envs.rewards import RewardInput, RewardPool, registry
from treadle.envs.rewards.unit_tests import RowTests, UnitTestsReward, extract_code, read_tests
from treadle.envs.sandbox.execution import SandboxLimits, check_sandbox
from treadle.envs.tasks.reasoning_gym import SAFE_ANSWERS
from treadle.errors import ConfigError

pytestmark = needs_sandbox

ASSERTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]
RIGHT = "```python\ndef add(a, b):\n    return a + b\n```"
HALF = "```python\ndef add(a, b):\n    return 0\n```"


def score(text, reward=None, **row):
    return (reward or UnitTestsReward()).score(RewardInput(text, metadata=row))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("First\n```python\nx = 1\n```\nno, rather\n```py\nx = 2\n```\nDone.", "x = 2\n"),
        ("```python\nx = 1\n```\nIt prints\n```\n1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```sql\nselect 1\n```", "```sql\nselect 1\n```"),
        ("```Python3 title\nx = 1\n```", "x = 1\n"),
        ("<think>```python\nx = 1\n```</think>\n```python\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\n</think>x = 3", "x = 3"),
        ('```python\nx = """\n   ```inline``` stays\n"""\n```', 'x = """\n   ```inline``` stays\n"""\n'),
        ("```python\nx = 1", "x = 1"),  # cut off
        ("```python\r\nx = 1\r\n```\r\nDone.", "x = 1\r\n"),
        ("```python", "```python"),
        ("", ""),
    ],
)
def test_the_last_python_block_is_the_answer(text, code):
    assert extract_code(text) == code


def test_a_slow_start_of_processes_does_not_disable_the_sandbox():
    check_sandbox(SandboxLimits(test_s=0.001, total_s=0.001))


def test_the_share_of_tests_that_pass_or_all_or_nothing():
    assert score(RIGHT, tests=ASSERTS) == 1.0
    assert score(HALF, tests=ASSERTS) == 0.5
    assert score(HALF, UnitTestsReward(all_or_nothing=True), tests=ASSERTS) == 0.0
    assert score(RIGHT, UnitTestsReward(all_or_nothing=True), tests=ASSERTS) == 1.0
    assert score("I do not know.", tests=ASSERTS) == 0.0


def test_tests_as_a_source_with_functions_and_a_setup():
    source = (
        "def test_small():\n    assert add(ONE, 2) == 3\ndef test_wrong():\n    assert add(1, 1) == 3\ndef g(): pass"
    )
    assert score(RIGHT, tests=source, setup="ONE = 1") == 0.5
    assert score(RIGHT, tests="for n in range(3):\n    assert add(n, n) == 2 * n") == 1.0


AS_CLASSES = {
    "unittest": "import unittest\nclass Sums(unittest.TestCase):\n    def setUp(self): self.one = 1\n"
    "    def test_small(self): self.assertEqual(add(self.one, 2), 3)\n"
    "    def test_zero(self): self.assertAlmostEqual(add(0, 0), 0)\nif __name__ == '__main__':\n    unittest.main()",
    "derived": "from unittest import TestCase\nclass Base(TestCase):\n    def setUp(self): self.one = 1\n"
    "class Sums(Base):\n    def test_small(self): self.assertEqual(add(self.one, 2), 3)\n"
    "    def test_zero(self): self.assertEqual(add(0, 0), 0)",
    "with a runner": "import unittest\nclass Sums(unittest.TestCase):\n"
    "    def test_small(self): self.assertEqual(add(1, 2), 3)\n"
    "    def test_zero(self): self.assertEqual(add(0, 0), 0)\nunittest.main(exit=False)",
    "pytest": "class TestSums:\n    def setup_method(self): self.one = 1\n"
    "    def test_small(self): assert add(self.one, 2) == 3\n    def test_zero(self): assert add(0, 0) == 0",
    "async": "async def test_small(): assert add(1, 2) == 3\n"
    "class TestZero:\n    async def test_zero(self): assert add(0, 0) == 0",
}


@pytest.mark.parametrize("style", AS_CLASSES)
def test_methods_and_async_functions_are_run_one_by_one(style):
    assert score(RIGHT, tests=AS_CLASSES[style]) == 1.0
    assert score(HALF, tests=AS_CLASSES[style]) == 0.5
    assert score("x = 1", tests=AS_CLASSES[style]) == 0.0


@pytest.mark.parametrize(
    "source",
    ["def check(candidate):\n    assert candidate(1, 2) == 3", "if __name__ == '__main__':\n    assert add(1, 2) == 3",
     "import math", "'Tests.'", "# assert add(1, 2) == 3", "x = add(1, 2) == 3", "class Sums:\n    def test_a(self): 1",
     "import unittest\nclass Sums(unittest.TestCase):\n    def helper(self): pass", "pass", "add",
     "import unittest\nunittest.main()",
     "for n in range(3):\n    def check(): assert add(n, n) == 2 * n"],
)  # fmt: skip
def test_tests_that_would_run_nothing_are_refused_and_never_passed(source):
    for tests in (source, ["assert add(1, 2) == 3", source]):
        with pytest.raises(ValueError, match="nothing in this test is run"):
            read_tests({"tests": tests})


@pytest.mark.parametrize(
    "source",
    ["check(add)", "with open('/dev/null'):\n    assert add(1, 2) == 3", "if add(1, 2) != 3:\n    raise ValueError",
     "try:\n    add()\nexcept TypeError:\n    pass\nelse:\n    assert False"],
)  # fmt: skip
def test_whatever_runs_something_is_a_test(source):
    assert RowTests(tests=source).sources == [source]


@pytest.mark.parametrize("text", ["```" + "a" * 10**5, "```" + " " * 10**5 + "`", " " * 10**5 + "x", "```\n" * 10**5],
                         ids=["letters", "spaces and a backtick", "spaces", "fences"])  # fmt: skip
def test_code_is_found_in_time_however_odd_the_text(text):
    started = time.process_time()
    extract_code(text)
    assert time.process_time() - started < 2


@pytest.mark.parametrize("text", ["1" * 10**5 + ".", "x**2)+" * 10**4 + "!", "** 2 " * 10**4, "a " * 10**5 + "ab"],
                         ids=["digits", "brackets", "powers", "letters"])  # fmt: skip
@pytest.mark.parametrize("task", sorted(SAFE_ANSWERS))
def test_formulas_of_reasoning_gym_are_judged_in_time_however_long(task, text):
    started = time.process_time()
    SAFE_ANSWERS[task].fullmatch(text)
    assert time.process_time() - started < 2


def test_tests_as_pairs_of_input_and_output():
    pairs = [{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4\n"}, {"input": "0 0", "output": "1"}]
    assert score("```python\nprint(sum(map(int, input().split())))\n```", tests=pairs) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "row",
    [{}, {"tests": []}, {"tests": ""}, {"tests": 3}, {"tests": [3]},
     {"tests": ["assert f()", {"input": "", "output": ""}]},
     {"tests": [{"input": "1"}]}, {"tests": [{"input": 1, "output": "1"}]}, {"tests": ["x"], "setup": 4}],
)  # fmt: skip
def test_a_row_without_usable_tests_is_an_error_and_not_a_low_score(row):
    with pytest.raises(ValueError, match="tests"):
        read_tests(row)


def test_a_test_that_is_no_python_fails_alone():
    assert RowTests(tests=["assert (", "assert add(1, 2) == 3"]).sources == ["assert (", "assert add(1, 2) == 3"]
    assert score(RIGHT, tests=["assert (", "assert add(1, 2) == 3"]) == 0.5


@pytest.mark.parametrize("settings", [{"test_s": 0}, {"test_s": 9, "total_s": 5}, {"memory_mb": 8}])
def test_limits_that_cannot_be_are_refused(settings):
    with pytest.raises(ConfigError, match="cannot be"):
        registry.create("unit_tests", **settings)


def test_in_the_workers_harmful_answers_are_worth_nothing_and_end_nothing():
    harmful = [
        "```python\nwhile True: pass\n```",
        "```python\nimport os\nwhile True: os.fork()\n```",
        "```python\nimport os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n```",
        "```python\nx = bytearray(2**34)\n```",
    ]
    # The others share the cores with a fork bomb, and a busy machine may stop a process for seconds.
    patient, hasty = UnitTestsReward(test_s=20, total_s=60), UnitTestsReward(test_s=1, total_s=2)

    def asked(texts):
        return [RewardInput(text, metadata={"tests": ASSERTS}) for text in texts]

    async def run():
        async with RewardPool(num_workers=2, time_limit_s=90) as pool:
            return await asyncio.gather(pool.score(hasty, asked(harmful)), pool.score(patient, asked([RIGHT, HALF])))

    refused, others = asyncio.run(run())
    assert [result.score for result in refused] == [0.0] * 4
    assert [result.score for result in others] == [1.0, 0.5]
    assert {result.outcome for result in (*refused, *others)} == {"scored"}
