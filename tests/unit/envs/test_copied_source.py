"""Code of a script or a notebook works in a file of its own, with everything that it uses."""

from __future__ import annotations

import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from treadle.envs.copied_source import CopiedSource
from treadle.envs.rewards import FunctionReward, RewardInput, registry
from treadle.envs.rewards.addresses import load_address
from treadle.errors import ConfigError

Cell = Callable[[str], dict[str, Any]]


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cell]:
    """Run code as a notebook does: in `__main__`, which has no file, with the source in Python's cache of lines."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    names: list[str] = []

    def run(code: str) -> dict[str, Any]:
        code, name = textwrap.dedent(code), f"/nowhere/cell-{len(names)}.py"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        names.append(name)
        exec(compile(code, name, "exec"), vars(main))  # noqa: S102
        return vars(main)

    yield run
    for name in names:
        linecache.cache.pop(name, None)


def copy(thing: Any, folder: Path) -> Any:
    """What another process finds."""
    source = CopiedSource()
    name = source.add(thing)
    folder.mkdir(exist_ok=True)
    (folder / "copied.py").write_text(source.text)
    return load_address(f"{folder / 'copied.py'}:{name}")


def test_a_function_brings_what_it_uses_from_other_cells(cell: Cell, tmp_path: Path) -> None:
    cell(
        "import re\nimport math as m\nfrom collections import Counter\nNUMBER = re.compile(r'[a-z]+', re.IGNORECASE)\n"
    )
    cell("LIMITS = {'low': [1, 2.5], 'high': None}\nUNUSED = object()\n")
    cell("def count(text):\n    return Counter(NUMBER.findall(text))['Ab']\n")
    space = cell("""
        from typing import Any
        def score(completions: list[Any], **kwargs: UNUSED) -> list[float]:
            def one(text):
                return count(text) + m.floor(LIMITS["low"][1])
            return [one(text) for text in completions]
    """)
    assert copy(space["score"], tmp_path)(completions=["Ab Ab 1"]) == [4]


def test_a_local_function_brings_the_values_around_it(tmp_path: Path) -> None:
    bonus = 0.25

    def score(completions, **kwargs):
        return [bonus for _ in completions]

    assert copy(score, tmp_path)(completions=["a"]) == [0.25]


def test_decorators_classes_and_base_classes_come_along(cell: Cell, tmp_path: Path) -> None:
    cell("from treadle.envs.rewards import Reward, RewardInput, reward\n")
    space = cell("""
        class Base(Reward):
            scale: float = 2.0

        class Long(Base):
            def score(self, completion: RewardInput) -> float:
                return self.scale * len(completion.text)

        @reward(weight=0.5)
        def is_short_here(completion: RewardInput) -> float:
            return float(Long().score(completion) < 4)
    """)
    copied = copy(space["is_short_here"], tmp_path)
    assert isinstance(copied, FunctionReward)
    assert (copied.weight, copied.score(RewardInput("a"))) == (0.5, 1.0)


def test_a_cell_that_runs_again_replaces_its_reward_and_environment(cell: Cell) -> None:
    for value in (1.0, 2.0):
        cell(f"""
            from treadle.envs import Environment, environment
            from treadle.envs.rewards import reward
            @reward
            def again_and_again(completion):
                return {value}
            @environment("again-and-again")
            class Again(Environment):
                pass
        """)
    assert registry.create("again_and_again").score(RewardInput("")) == 2.0


def test_modules_beside_a_script_are_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_beside.py").write_text("def score(completions, **kwargs):\n    return [0.5]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import module_beside

    source = CopiedSource()
    source.add(module_beside.score)
    assert "from module_beside import score" in source.text
    assert f"sys.path.append({str(tmp_path)!r})" in source.text


def test_a_namespace_package_beside_a_script_is_found_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_as_namespace").mkdir()
    (tmp_path / "beside_as_namespace" / "inner.py").write_text("def score(completions, **kwargs):\n    return [0.5]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from beside_as_namespace import inner

    source = CopiedSource()
    source.add(inner.score)
    assert "from beside_as_namespace.inner import score" in source.text
    assert f"sys.path.append({str(tmp_path)!r})" in source.text


def test_an_alias_of_a_function_or_class_comes_along(cell: Cell, tmp_path: Path) -> None:
    space = cell("""
        def compute(text):
            return len(text) if text else score("ab")
        score = compute
        def make_checker(divisor):
            def is_divisible(number):
                return number % divisor == 0
            return is_divisible
        is_even = make_checker(2)
        class Scale:
            factor = 3
        Factor = Scale
        def judge(completions, **kwargs):
            return [Factor.factor * is_even(score(text)) for text in completions]
    """)
    assert copy(space["judge"], tmp_path)(completions=["", "abc"]) == [3, 0]


def test_two_closures_of_one_function_are_refused(cell: Cell) -> None:
    space = cell("""
        def make_checker(divisor):
            def is_divisible(number):
                return number % divisor == 0
            return is_divisible
        is_even, is_third = make_checker(2), make_checker(3)
        def judge(completions, **kwargs):
            return [is_even(len(text)) + is_third(len(text)) for text in completions]
    """)
    with pytest.raises(ConfigError, match=r"two different things are called '(is_divisible|divisor)'"):
        CopiedSource().add(space["judge"])


def test_a_decorator_that_is_not_above_the_def_is_refused(cell: Cell, tmp_path: Path) -> None:
    space = cell("""
        import functools
        def doubled(function):
            @functools.wraps(function)
            def wrapper(text):
                return 2 * function(text)
            return wrapper
        def raw(text):
            return len(text)
        raw = doubled(raw)
        @doubled
        def marked(text):
            return len(text)
        def uses_raw(completions, **kwargs):
            return [raw(text) for text in completions]
        def uses_marked(completions, **kwargs):
            return [marked(text) for text in completions]
    """)
    assert copy(space["uses_marked"], tmp_path)(completions=["abc"]) == [6]
    with pytest.raises(ConfigError, match="'raw' has a decorator that is not above its def") as refused:
        CopiedSource().add(space["uses_raw"])
    assert "write @decorator above the def" in refused.value.fix


def test_a_decorator_without_wraps_is_refused(cell: Cell) -> None:
    space = cell("""
        def doubled(function):
            def wrapper(completions, **kwargs):
                return [2 * score for score in function(completions)]
            return wrapper
        @doubled
        def ones(completions, **kwargs):
            return [1 for _ in completions]
        def judge(completions, **kwargs):
            return ones(completions)
    """)
    for name in ("ones", "judge"):
        with pytest.raises(ConfigError, match=r"'ones' has a decorator without functools\.wraps"):
            CopiedSource().add(space[name])


def test_a_bound_method_is_refused(cell: Cell) -> None:
    space = cell("""
        class Checker:
            def check(self, text):
                return 1.0
        check = Checker().check
        def judge(completions, **kwargs):
            return [check(text) for text in completions]
    """)
    with pytest.raises(ConfigError, match="'judge' uses 'check', a method, which cannot be copied"):
        CopiedSource().add(space["judge"])


def test_a_string_of_several_lines_in_a_local_function_stays_as_it_is(tmp_path: Path) -> None:
    def indented(completions, **kwargs):
        return """
        a
            b
        """

    def at_the_margin(completions, **kwargs):
        return """
c
"""

    for function in (indented, at_the_margin):
        assert copy(function, tmp_path / function.__name__)([]) == function([])


@pytest.mark.parametrize(
    ("assigned", "name"),
    [
        ("import os\nMY = os.environ['JUDGE_SERVICE_KEY']", "MY"),
        ("import os\nMY = {'headers': ['Bearer ' + os.environ['JUDGE_SERVICE_KEY']]}", "MY"),
        ("OPENAI_API_KEY = 'sk-1'", "OPENAI_API_KEY"),
        ("MY = {'api_key': 'sk-1'}", "MY"),
    ],
)
def test_a_secret_is_refused_and_not_copied(
    assigned: str, name: str, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_SERVICE_KEY", "abcdefgh1234")
    cell(assigned)
    space = cell(f"def judge(completions, **kwargs):\n    return [{name}]\n")
    source = CopiedSource()
    with pytest.raises(ConfigError, match=f"'judge' uses '{name}', which looks like a secret") as refused:
        source.add(space["judge"])
    assert "abcdefgh" not in source.text + str(refused.value)
    assert "os.environ inside the function" in refused.value.fix


def test_a_value_of_a_common_kind_is_no_secret(cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "1")  # too short to be one
    cell("LIMITS = {'max_tokens': 11, 'api_key': 'none'}\nnum_tokens = (1, 2)\nis_secret = True\n")
    space = cell("def judge(completions, **kwargs):\n    return [LIMITS['max_tokens'], num_tokens[0], is_secret]\n")
    assert copy(space["judge"], tmp_path)([]) == [11, 1, True]


def test_a_value_that_cannot_be_copied_is_named_with_what_to_do(cell: Cell) -> None:
    cell("import socket\nconnection = socket.socket()\nconnection.close()\n")
    space = cell("def helper():\n    return connection\ndef score(completions, **kwargs):\n    return [helper()]\n")
    with pytest.raises(ConfigError, match="'helper' uses 'connection', a socket, which cannot be copied") as refused:
        CopiedSource().add(space["score"])
    assert "make it inside the function, or move all of this to a .py file" in refused.value.fix


def test_code_without_a_source_or_a_name_is_refused(cell: Cell) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def typed(completions, **kwargs):\n    return []\n", space)  # noqa: S102  # as `python -c` does
    with pytest.raises(ConfigError, match="the source of 'typed' cannot be found"):
        CopiedSource().add(space["typed"])
    space = cell("double = lambda x: 2 * x\ndef score(completions, **kwargs):\n    return [double(1)]\n")
    with pytest.raises(ConfigError, match="'double' is a lambda") as refused:
        CopiedSource().add(space["score"])
    assert refused.value.fix == "write it with def"
    with pytest.raises(ConfigError, match="cannot be a lambda"):
        CopiedSource().add(lambda completions, **kwargs: [])
