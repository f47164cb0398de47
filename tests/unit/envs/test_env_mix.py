"""Several data sources with weights: proportions, order, restarts, held-out rows and figures by source."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.config.env import DataSource, EnvConfig, labels_of_sources, parse_sources
from treadle.config.load import load_run, save_run
from treadle.dash.charts import charts_of
from treadle.dash.run_folder import RunFolder
from treadle.envs.base import Environment, Score, load_environment
from treadle.envs.chat import Transcript
from treadle.envs.data import load_data
from treadle.envs.evaluation import eval_metrics, format_result, save_result, summarize
from treadle.envs.mix import Mix, spread_draws, whole_weights
from treadle.envs.rollout import Rollout, build_group
from treadle.envs.rows import Row
from treadle.envs.serving.stream_state import DifficultySelection, ItemCursor
from treadle.envs.tasks.datasets import Item
from treadle.errors import ConfigError
from treadle.launch.preflight import resolve_paths
from treadle.report.history import HistoryReader

weights_of_sources = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def write_rows(path: Path, num: int, letter: str, **columns: str) -> Path:
    names = {"question": "question", "answer": "answer", **columns}
    path.write_text(
        "".join(json.dumps({names["question"]: f"{letter}{n}?", names["answer"]: n}) + "\n" for n in range(num))
    )
    return path


def mixed(tmp_path: Path, weights: str = "3 1", sizes: tuple[int, ...] = (200, 40), **settings: Any) -> Environment:
    files = [write_rows(tmp_path / f"{letter}.jsonl", size, letter) for letter, size in zip("abc", sizes, strict=False)]
    data = ",".join(f"{file}:{weight}" for file, weight in zip(files, weights.split(), strict=True))
    environment = load_environment(EnvConfig(name="jsonl", data=data, **settings))
    environment.prepare()
    return environment


def rollouts(*rewards: float | None) -> list[Rollout]:
    transcript = Transcript(messages=[], tokens=[1], masks=[1], logprobs=[0.0], policy_versions=[0])
    return [Rollout([transcript], Score(reward=one, is_right=one == 1.0), 0.1) for one in rewards]


@given(weights_of_sources)
def test_each_source_has_its_share_after_any_number_of_draws(weights: list[int]) -> None:
    draws = spread_draws(weights)
    total = sum(weights)
    counts = [0] * len(weights)
    for number, source in enumerate(draws, start=1):
        counts[source] += 1
        assert all(abs(counts[one] - number * weight / total) < 1 for one, weight in enumerate(weights))
    assert counts == weights


@given(weights_of_sources, st.data())
def test_every_item_of_a_source_is_drawn_once_an_epoch(weights: list[int], data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.integers(1, 12)) for _ in weights)
    mix = Mix(tuple(map(str, range(len(weights)))), tuple(weights), sizes, seed=data.draw(st.integers(0, 3)))
    drawn: list[list[int]] = [[] for _ in weights]
    for index in range(2 * sum(weights)):
        place = mix.place_of(index)
        source = next(one for one in range(len(sizes)) if place < sum(sizes[: one + 1]))
        drawn[source].append(place)
    for source, places in enumerate(drawn):
        size = sizes[source]
        for first in range(0, len(places) - size + 1, size):
            assert len(set(places[first : first + size])) == size


def test_items_are_drawn_in_exact_proportion_and_follow_from_the_seed(tmp_path: Path) -> None:
    environment = mixed(tmp_path)
    items = [environment.train_item(index) for index in range(400)]
    assert Counter(item.source for item in items) == {"a": 300, "b": 100}
    assert all(sum(item.source == "b" for item in items[first : first + 4]) == 1 for first in range(0, 400, 4))
    again = mixed(tmp_path)
    assert [again.train_item(index) for index in reversed(range(400))][::-1] == items
    reseeded = mixed(tmp_path, seed=1)
    other = [reseeded.train_item(index) for index in range(400)]
    assert [item.source for item in other] == [item.source for item in items]
    assert other != items


def test_a_restarted_process_goes_on_with_the_same_items(tmp_path: Path) -> None:
    whole = mixed(tmp_path)
    expected = [whole.train_item(index).prompt for index in range(30)]
    cursor, drawn = ItemCursor(tmp_path / "cursor.json"), []
    environment = mixed(tmp_path)
    for _ in range(13):
        index = cursor.take()
        drawn.append(environment.train_item(index).prompt)
        cursor.finish(index)
    asyncio.run(cursor.save())
    cursor, environment = ItemCursor(tmp_path / "cursor.json"), mixed(tmp_path)
    drawn += [environment.train_item(cursor.take()).prompt for _ in range(17)]
    assert drawn == expected


def test_each_source_keeps_its_own_held_out_rows(tmp_path: Path) -> None:
    environment = mixed(tmp_path)
    held_out = environment.eval_items()
    assert Counter(item.source for item in held_out) == {"a": 20, "b": 4}, "one in ten of each"
    assert [item.source for item in held_out[:8]] == ["a", "b"] * 4, "in turn: the first ones are of all sources"
    assert not {item.prompt for item in held_out} & {environment.train_item(index).prompt for index in range(400)}
    assert mixed(tmp_path, seed=5).eval_items() == held_out


def test_held_out_rows_of_one_source_are_not_trained_on_from_another(tmp_path: Path) -> None:
    first, second = write_rows(tmp_path / "first.jsonl", 30, "q"), write_rows(tmp_path / "second.jsonl", 60, "q")
    (test_of_first, test_of_second) = (
        write_rows(tmp_path / f"test{n}.jsonl", n, letter) for n, letter in ((10, "q"), (5, "z"))
    )
    config = EnvConfig(data=f"{first},{second}", eval_data=f"{test_of_first},{test_of_second}")
    data = load_data(config, lambda row: Item.ask(row.text("question"), answer=row.text("answer")))
    assert (len(data.train), len(data.held_out), data.num_kept_apart) == (20 + 50, 15, 20)
    assert Counter(item.source for item in data.held_out) == {"first": 10, "second": 5}
    with pytest.raises(ConfigError, match=r"names 1 source, and --env\.data 2"):
        load_data(
            EnvConfig(data=f"{first},{second}", eval_data=str(test_of_first)), lambda row: Item.ask("?", answer="1")
        )


def test_sources_may_have_columns_of_their_own(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "first.jsonl", 20, "a")
    second = write_rows(tmp_path / "second.jsonl", 20, "b", question="problem", answer="solution")
    config = EnvConfig(data=f"{first},{second}", data_columns="question=problem answer=solution")

    def to_item(row: Row) -> Item:
        return Item.ask(row.text("question"), answer=row.text("answer"))

    assert len(load_data(config, to_item).train) == 36


def test_difficulty_prefers_items_within_the_source_of_the_turn(tmp_path: Path) -> None:
    environment = mixed(tmp_path, weights="2 1", sizes=(60, 20))
    chooser = DifficultySelection(environment.candidate, seed=0, path=tmp_path / "difficulty.json")
    indexes = [chooser.item_index(turn) for turn in range(600)]
    assert Counter(environment.train_item(index).source for index in indexes) == {"a": 400, "b": 200}
    seen = {environment.train_item(index).prompt for index in indexes}
    assert len(seen) == 54 + 18, "every item may be chosen"


def test_a_group_carries_the_figures_of_its_source() -> None:
    group = build_group(rollouts(1.0, 0.0, None), temperature=1.0, source="b", sources=("a", "b"))
    assert group.metrics is not None
    assert {name: value for name, value in group.metrics.items() if name.startswith("source/")} == {
        "source/b/score": 0.5, "source/b/accuracy": pytest.approx(1 / 3), "source/a/share": 0.0, "source/b/share": 1.0,
    }  # fmt: skip
    alone = build_group(rollouts(1.0, 0.0), temperature=1.0)
    assert not any(name.startswith("source/") for name in alone.metrics or {})


def test_an_evaluation_has_the_accuracy_of_each_source(tmp_path: Path) -> None:
    items = [Item(({"role": "user", "content": str(n)},), "1", source="ab"[n % 2]) for n in range(6)]
    answers = [rollouts(float(n < 4 and item.source == "a")) for n, item in enumerate(items)]
    result = summarize(EnvConfig(name="jsonl"), 3, items, answers, seconds=1.0)
    assert {source: (part.num_right, part.num_prompts) for source, part in result.by_source.items()} == {
        "a": (2, 3), "b": (0, 3),
    }  # fmt: skip
    metrics = eval_metrics(result)
    assert metrics["eval/source/a/percent_correct"] == pytest.approx(2 / 3)
    assert metrics["eval/source/b/percent_correct_high"] == result.by_source["b"].interval_95[1]
    assert "a: 2 right on 3 prompts = 66.7%" in format_result(result)
    assert [sample.source for sample in result.samples] == ["a", "b"] * 3
    save_result(result, tmp_path / "evals")
    history = HistoryReader(tmp_path / "metrics.jsonl", tmp_path / "evals").read()
    assert {source: [one.num_right for one in found] for source, found in history.by_env.items()} == {
        "a": [2],
        "b": [0],
    }
    assert [one.env for one in history.measured] == ["", "a", "b"]
    run = RunFolder(tmp_path)
    assert [one.num_prompts for one in run.held_out()] == [6]
    assert run.held_out_by_env()["a"][0].accuracy == pytest.approx(2 / 3)
    save_run(load_run(None, {"env.name": "jsonl", "env.data": "a.jsonl:1,c.jsonl:1"}), tmp_path / "config.json")
    assert list(run.held_out_by_env()) == ["a", "c", "b"], "also those that no evaluation has yet"
    assert charts_of(run)[1].title == "Held-out accuracy by data source"


def test_sources_are_parsed_from_flags_and_lists(tmp_path: Path) -> None:
    assert parse_sources("a.jsonl:0.5, b.jsonl") == (DataSource("a.jsonl", "0.5"), DataSource("b.jsonl", "1"))
    (tmp_path / "run.toml").write_text('[env]\nname = "jsonl"\ndata = ["a.jsonl:3", "b.jsonl:1"]\n')
    assert load_run(tmp_path / "run.toml").env.data == "a.jsonl:3,b.jsonl:1"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("a.jsonl:1,", "names no source in one place"),
        ("a.jsonl:1,a.jsonl:2", "names a.jsonl twice"),
        ("a.jsonl:1,b.jsonl:0", "the weight 0"),
        ("a.jsonl:-1,b.jsonl:1", "the weight -1"),
    ],
)
def test_sources_that_cannot_be_drawn_from_are_refused(data: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_run(None, {"env.name": "jsonl", "env.data": data})


def test_weights_are_taken_exactly_as_they_are_written() -> None:
    assert whole_weights(parse_sources("a:0.7,b:0.2,c:0.1")) == (7, 2, 1)
    assert whole_weights(parse_sources("a:300,b:100")) == (3, 1)
    with pytest.raises(ConfigError, match="repeat only after"):
        whole_weights(parse_sources("a:0.123457,b:0.876544"))


def test_sources_have_short_names_of_their_own() -> None:
    names = ("data/math/train.jsonl", "data/code/train.jsonl", "openai/gsm8k:main", "rows.parquet")
    assert labels_of_sources([DataSource(name) for name in names]) == ("math-train", "code-train", "gsm8k", "rows")


def test_paths_of_all_sources_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", 3, "a")
    monkeypatch.chdir(tmp_path)
    config = resolve_paths(load_run(None, {"env.name": "jsonl", "env.data": "rows.jsonl:3,openai/gsm8k:main:1"}))
    assert config.env.data == f"{tmp_path / 'rows.jsonl'}:3,openai/gsm8k:main:1"
