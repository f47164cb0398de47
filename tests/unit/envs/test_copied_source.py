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
from treadle.envs.rewards.source import find
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
    (folder / "copied.py").write_text(source.text)
    return find(f"{folder / 'copied.py'}:{name}")


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
    with pytest.raises(ConfigError, match="cannot be a lambda"):
        CopiedSource().add(lambda completions, **kwargs: [])
