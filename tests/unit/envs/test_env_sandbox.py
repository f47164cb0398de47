"""Answers that cheat or do harm, each tried for real. Every test here is over within seconds."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.envs.sandbox_support import needs_sandbox
from treadle.envs.sandbox.execution import Case, SandboxLimits, run_cases, run_tests

pytestmark = needs_sandbox

LIMITS = SandboxLimits(test_s=5, total_s=20, memory_mb=256)
ADD = "def add(a, b):\n    return a + b\n"


def passes(source, *tests, limits=LIMITS, names=()):
    return [problem == "" for problem in run_tests(source, tests, limits, names=names)]


def problem_of(source, test="assert f() == 1", limits=LIMITS):
    (problem,) = run_tests(source, [test], limits)
    return problem


def test_right_and_wrong_answers():
    tests = ["assert add(2, 3) == 5", "assert add(2, 3) == 6", "assert add('a', 'b') == 'ab'"]
    assert passes(ADD, *tests) == [True, False, True]


@pytest.mark.parametrize(
    "value",
    [None, True, 1, -(10**40), 0.1, float("inf"), "é\ud800\n'\"", b"\x00\xff", bytearray(b"a"), 1 + 2j, [], [[1], (2,)],
     (1, [2]), {1, 2}, frozenset({"a"}), {"a": [1, {2: (3,)}], (1, 2): None}],
)  # fmt: skip
def test_plain_values_pass_unchanged_both_ways(value):
    test = f"given = {value!r}\nassert same(given) == given and type(same(given)) is type(given)".replace(
        "inf", "1e999"
    )
    assert passes("def same(value):\n    return value\n", test) == [True]


@pytest.mark.parametrize(
    "value",
    ["range(2, 9, 3)", "deque([1, [2]])", "deque([1], maxlen=2)", "Decimal('1.50')", "Fraction(1, 3)",
     "date(2024, 2, 29)", "datetime(2024, 2, 29, 1, 2, 3, 4)", "datetime(2024, 2, 29, tzinfo=timezone.utc)",
     "time(1, 2)", "timedelta(-1, 2, 3)", "[{'a': Decimal('0.1')}]"],
)  # fmt: skip
def test_values_of_the_standard_library_pass_unchanged_both_ways(value):
    imports = (
        "from collections import deque\nfrom datetime import date, datetime, time, timedelta, timezone\n"
        "from decimal import Decimal\nfrom fractions import Fraction\n"
    )
    answer = f"{imports}def same(value):\n    return value\ndef make():\n    return {value}\n"
    sent = "assert same(given) == given and repr(same(given)) == repr(given)"
    made = "assert make() == given and repr(make()) == repr(given)"
    assert run_tests(answer, [f"{imports}given = {value}\n{sent}\n{made}"], LIMITS) == [""]


@pytest.mark.parametrize(
    "test",
    [
        "s = Stack()\ns.push([1])\ns.push(2)\nassert len(s) == 2 and s.pop() == 2 and 2 not in s",
        "assert isinstance(Stack(), Stack) and not isinstance(3, Stack)",
        "assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2])",
        "assert Stack([1]).items == [1] and str(Stack([1])) == 'Stack 1'",
        "from itertools import islice\nassert list(islice(count(), 3)) == [0, 1, 2] and next(count()) == 0",
        "assert 2 in Stack([1, 2]) and 3 not in Stack([1, 2])",
        "assert (Stack([1]) + Stack([2])).items == [1, 2] and Stack([1]) < Stack([2])",
        "values = [3, 1]\ntidy(values)\nassert values == [1, 3]",
        "values = [3, 1]\ntidy(values=values)\nassert values == [1, 3]",
        "from collections import deque\nvalues = deque([3, 1])\nturn(values)\nassert values == deque([1, 3])",
        "assert named(operation=1, given=2, function=3) == [1, 2, 3]",
        "try:\n    fail('no')\nexcept KeyError as error:\n    assert 'no' in str(error)\nelse:\n    assert False",
    ],
)
def test_tests_can_use_classes_generators_exceptions_and_mutable_arguments(test):
    answer = """
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __add__(self, other): return Stack(self.items + other.items)
    def __lt__(self, other): return self.items < other.items
    def __eq__(self, other): return self.items == other.items
    def __str__(self): return f"Stack {len(self.items)}"
def count():
    number = 0
    while True:
        yield number
        number += 1
def tidy(values): values.sort()
def turn(values): values.rotate()
def named(**given): return list(given.values())
def fail(why): raise KeyError(why)
"""
    assert run_tests(answer, [test], LIMITS) == [""]


CHEATS = {
    "equal to everything": "class Any:\n    __eq__ = __lt__ = __gt__ = lambda s, o: True\ndef f(): return Any()",
    "a number that equals everything": "class N(int):\n    __eq__ = lambda s, o: True\n    __hash__ = None\n"
    "def f(): return N(7)",
    "ends well at once": "import sys\nsys.exit(0)",
    "ends well when called": "import sys\ndef f(): sys.exit(0)",
    "ends its process well": "import os\ndef f(): os._exit(0)",
    "prints a verdict": "print('passed')\nprint('\"\"')\ndef f():\n    print('passed')\n    return 0",
    "overrides builtins": "import builtins\nbuiltins.AssertionError = Exception\nbuiltins.all = lambda *a: 1\n"
    "def f(): return 0",
    "hides the builtins that tests use": "def all(x): return True\nlen = isinstance = all\ndef f(): return 0",
    "hides the modules that tests import": "class math:\n    isclose = lambda *a: True\ndef f(): return 0",
    "patches the process it is in": "import sys\nfor module in list(sys.modules.values()):\n"
    "    for name in ('encode', 'decode'):\n        if hasattr(module, name): setattr(module, name, lambda *a: None)\n"
    "def f(): return 0",
    "writes to every descriptor": "import os\nfor fd in range(64):\n    try: os.write(fd, b'\"\"\\n' * 9)\n"
    "    except OSError: pass\ndef f(): return 0",
    "closes every descriptor": "import os\nos.closerange(0, 64)\ndef f(): return 1",
    "raises what tests expect of nothing": "def f(): raise AssertionError",
    "is empty": "",
    "is no Python": "def f(:",
    "is a null byte": "\0",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_passes_no_test(cheat):
    tests = ["assert f() == 1", "import math\nassert math.isclose(f(), 1)", "assert all([f() == 1, len([f()]) == 1])"]
    assert passes(CHEATS[cheat], *tests) == [False, False, False]


GREEDY = """
seen = []
class Anything:
    def decide(self, other):
        seen.append(other)
        return 0.0
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __matmul__ = decide
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmod__ = __rpow__ = decide
    __contains__ = __eq__ = __lt__ = __gt__ = __le__ = __ge__ = lambda self, other: not seen.append(other)
    __hash__ = lambda self: hash(1.5)
    __iter__ = lambda self: iter([self])
def f(*args): return seen[-1] if seen else Anything()
"""


@pytest.mark.parametrize(
    "test",
    ["assert abs(f(2) - 1.5) < 1e-6", "assert abs(1.5 - f(2)) < 1e-6", "assert f(2) / 1.5 == 0", "assert 1.5 in f(2)",
     "assert f(2) % 1.5 == 0", "assert f(2) ** 1.5 == 0", "assert round(f(2) - 1.5, 3) == 0", "assert f(2) in {1.5}",
     "assert f(2) >= 1.5", "import unittest\nunittest.TestCase().assertAlmostEqual(f(2), 1.5)"],
)  # fmt: skip
def test_an_object_of_the_answer_neither_sees_nor_decides_a_comparison(test):
    assert passes(GREEDY, test, "assert f() == 1.5") == [False, False]


CATCHES = "caught = False\ntry:\n    f(-1)\nexcept {}:\n    caught = True\nassert caught"


@pytest.mark.parametrize("caught", ["Exception", "BaseException", "EOFError"])
@pytest.mark.parametrize(
    "source",
    [
        "import os\ndef f(x): os._exit(0)",
        "import os\ndef f(x): os.closerange(0, 64)",
        "def f(x): return 'x' * 2**23",
        "import ctypes\ndef f(x): ctypes.string_at(0)",
    ],
)
def test_an_answer_that_ends_its_process_fails_whatever_the_test_catches(source, caught):
    assert passes(source, CATCHES.format(caught)) == [False]


def test_a_test_that_expects_an_error_takes_an_error_and_no_exit():
    assert passes("def f(x): raise ValueError", CATCHES.format("Exception")) == [True]
    assert passes("import sys\ndef f(x): sys.exit()", CATCHES.format("Exception")) == [False]
    assert passes("import sys\ndef f(x): sys.exit()", CATCHES.format("SystemExit")) == [True]


def test_the_answer_sees_neither_tests_nor_expected_values():
    spy = """
import gc, sys
def f():
    things = gc.get_objects()
    frame = sys._getframe()
    while frame:
        things += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    seen = [repr(thing)[::-1] for thing in things if type(thing) in (dict, list, tuple, str)]
    return [any("1174-terces" in text for text in seen), any("stcejbo_teg.cg" in text for text in seen)]
"""
    found_secret, found_itself = False, True
    test = f"expected = 'secret-4711'\nassert f() == [{found_secret}, {found_itself}]"
    assert run_tests(spy, [test], LIMITS) == [""]


def test_names_of_builtins_are_the_answers_only_when_the_row_says_so():
    answer = "def sorted(values):\n    return 'mine'\n"
    assert passes(answer, "assert sorted([2, 1]) == [1, 2]") == [True]
    assert passes(answer, "assert sorted([2, 1]) == 'mine'", names=["sorted"]) == [True]


def test_an_answer_that_dies_in_one_test_is_still_run_on_the_others():
    answer = "import os\ndef f(x):\n    if x == 1: os._exit(0)\n    return x\n"
    assert passes(answer, "assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2") == [True, False, True]


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "def f():\n    while True: pass",
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ndef f(): time.sleep(60)",
        "def f():\n    try:\n        while True: pass\n    except BaseException:\n        f()",
        "f = lambda: 9**9**9",
    ],
)
def test_what_takes_too_long_is_ended(source):
    started = time.monotonic()
    assert "took longer" in problem_of(source, limits=SandboxLimits(test_s=0.5, total_s=1.5))
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "source",
    ["x = bytearray(2**32)", "x = []\nwhile True: x.append(bytearray(2**20))", "x = 'a' * 2**33", "x = [0] * 2**31"],
)
def test_memory_is_limited(source):
    assert problem_of(source + "\ndef f(): return 1").startswith(("MemoryError", "EOFError"))


def test_a_bomb_of_processes_or_threads_goes_nowhere():
    assert "PermissionError" in problem_of("import os\nwhile True: os.fork()")
    threads = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    assert re.match(
        "RuntimeError|MemoryError|EOFError|took longer", problem_of(threads, limits=SandboxLimits(2, 4, 256))
    )


def test_programs_read_their_input_and_are_judged_by_their_output():
    cases = [Case("4\n", "8"), Case("5", "10\n"), Case("5", "11")]
    assert run_cases("print(int(input()) * 2)", cases, LIMITS) == ["", "", "wrote something else"]
    assert run_cases("print(open(0).read().upper(), '  ')", [Case("a\nb\n", "A\nB\n")], LIMITS) == [""]
    main = "def main():\n    print('x')\nif __name__ == '__main__':\n    main()"
    assert run_cases(main, [Case("", "x")], LIMITS) == [""]


def test_the_input_of_a_program_can_only_be_read():
    source = """
import mmap, os
for attempt in (lambda: os.write(0, b"x"), lambda: os.ftruncate(0, 9), lambda: mmap.mmap(0, 3)):
    try:
        attempt()
    except OSError as error:
        print(type(error).__name__)
print(input())
"""
    assert run_cases(source, [Case("abc", "OSError\nPermissionError\nPermissionError\nabc")], LIMITS) == [""]


REAL_TIME_SIGNAL = """
import ctypes, struct, time
libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
libc.timer_create(0, struct.pack("Qii", 0, 40, 0) + bytes(48), ctypes.byref(timer))
libc.timer_settime(timer, 0, struct.pack("qqqq", 0, 0, 0, 1000), None)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (REAL_TIME_SIGNAL, "was ended by signal 40"),
        ("print('x'); import sys; sys.exit(3)", "exit code 3"),
        ("print('x'); import os; os._exit(97)", "exit code 97"),
        ("print('x'); raise ValueError", "exit code 1"),
        ("while True: print('x' * 1000)", "wrote more than"),
        ("print('x', flush=True)\nwhile True: pass", "took longer"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("print('y')", "something else"),
        ("", "something else"),
    ],
)
def test_a_program_that_does_not_do_its_task_fails(source, problem):
    (reported,) = run_cases(source, [Case("", "x")], SandboxLimits(test_s=2, total_s=4))
    assert problem in reported


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = (
        "from treadle.envs.sandbox.execution import *\n"
        "run_tests('import os\\ndef f():\\n    os._exit(1)', ['f()', 'f()'], SandboxLimits())\n"
        "run_cases('while True: pass', [Case('', '')], SandboxLimits(test_s=0.3, total_s=1))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_an_answer_dies_with_whoever_runs_it(tmp_path):
    flag = tmp_path / "running"
    script = (
        "import os, pathlib, subprocess, sys\n"
        "from treadle.envs.sandbox import execution\n"
        "limits = execution.SandboxLimits(test_s=60, total_s=60)\n"
        "with execution._file_with(b'') as stdin:\n"
        "    orders = {'role': 'program', 'source': 'print(1, flush=True)\\nwhile True: pass'}\n"
        "    with execution._start(orders, limits, stdin=stdin, stdout=subprocess.PIPE) as child:\n"
        "        child.stdout.readline()\n"
        f"        pathlib.Path({str(flag)!r}).write_text(str(child.pid))\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    child = int(flag.read_text())
    deadline = time.monotonic() + 10
    while _is_running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_running(child)


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
