"""Docs, pyproject.toml and code agree with the table of what is supported (treadle/support.py)."""

from __future__ import annotations

import ast
import re
import tomllib
from typing import get_args

import pytest

from tests.doc_pages import ROOT
from treadle.config import TrainConfig
from treadle.errors import ConfigError
from treadle.support import FAMILIES, MATRIX_MODES, PYTHON, VLLM, WEIGHT_MODES, WeightModeName
from treadle.sync.modes import SYNC_MODES


def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_every_weight_mode_is_a_setting_has_code_and_is_documented() -> None:
    assert set(WEIGHT_MODES) == set(get_args(WeightModeName)) == set(SYNC_MODES)
    rows = re.findall(r"^\| `(\w+)[^|]*\|", (ROOT / "docs/weights.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(WEIGHT_MODES) <= set(rows)
    assert set(MATRIX_MODES) <= set(rows)


def test_code_asks_the_table_and_compares_no_mode_by_its_name() -> None:
    names = set(WEIGHT_MODES) - {"none"}  # a word of other settings too
    found = [
        f"{file.name}:{node.lineno}"
        for file in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare)
        for word in ast.walk(node)
        if isinstance(word, ast.Constant) and word.value in names
    ]
    assert found == []


def test_the_flags_of_each_mode_of_the_matrix_are_documented() -> None:
    page = text_of("docs/weights.md")
    for name, settings in MATRIX_MODES.items():
        flags = [
            f"--train.{key.replace('_', '-')}" + ("" if value is True else f" {value}")
            for key, value in settings.items()
        ]
        assert f"| `{name}` | `{' '.join(flags)}`" in page


def test_documented_versions_are_those_of_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, newest = str(VLLM).split(" to ")
    assert f"vllm>={oldest}" in project["optional-dependencies"]["vllm"]
    assert project["requires-python"] == ">={}.{}".format(*PYTHON)
    assert str(VLLM) in text_of("docs/troubleshooting.md")
    assert str(VLLM) in text_of("docs/engine.md")
    assert f"| {oldest}, " in text_of("docs/engine.md")
    assert f"| {newest}, " in text_of("docs/engine.md")
    assert "Python {}.{} or newer".format(*PYTHON) in text_of("README.md")


def test_documented_families_are_those_of_the_table() -> None:
    families = re.search(r"Models of the ([\w, ]+) families are tested", text_of("README.md"))
    assert families is not None
    assert set(re.split(", | and ", families[1])) == {family.name for family in FAMILIES.values()}
    assert f"a config.json ({', '.join(FAMILIES)})" in text_of("docs/plan.md")
    gguf = re.search(r"\*\*GGUF\*\* is written for ([^.]*) models", text_of("docs/running.md"))
    assert gguf is not None
    for family in FAMILIES.values():
        assert (family.name in gguf[1]) == bool(family.gguf)


@pytest.mark.parametrize("mode", WEIGHT_MODES)
def test_only_shared_memory_is_refused_for_an_engine_on_several_gpus(mode: str) -> None:
    def check(**settings: object) -> None:
        options = TrainConfig.model_validate({"weight_bridge_mode": mode, **settings})
        options.check_engine_workers(1)
        options.check_engine_workers(2)

    def refused(**settings: object) -> str:
        with pytest.raises(ConfigError, match="split over 2 GPUs") as caught:
            check(**settings)
        return caught.value.fix

    if WEIGHT_MODES[mode].in_memory:
        assert "--train.use-shared-memory true" in refused()
        check(use_shared_memory=True)
        check(use_shared_memory=True, broadcast_by="gloo")
        assert "--train.broadcast-by" in refused(use_shared_memory=True, broadcast_by="memory")
    else:
        check()
    if WEIGHT_MODES[mode].single_copy:
        assert "--train.single-copy" in refused(single_copy=True)
