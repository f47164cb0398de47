"""Runs side by side: intervals over seeds, the paired test, settings and answers that differ, and the page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient

from tests.written_run import evaluation, write_finished
from treadle import cli
from treadle.config.load import load_run, save_run
from treadle.envs.eval_statistics import t_quantile
from treadle.errors import ConfigError
from treadle.launch.dash_command import open_start_page
from treadle.report.comparison import Comparison, compare_folders
from treadle.report.comparison_curves import estimates_by_step
from treadle.report.comparison_output import render_comparison, text_of
from treadle.report.statistics import mcnemar_p, mean_of_seeds


@pytest.fixture
def seeded(tmp_path: Path) -> list[Path]:
    """Two settings with three seeds each."""
    rates = {"slow": (1e-6, 0.1), "fast": (1e-5, 0.2)}
    return [
        write_finished(tmp_path / f"{name}-{seed}", "abcd"[:seed], seed=seed, reward=reward * seed, **{"train.lr": lr})
        for name, (lr, reward) in rates.items()
        for seed in (1, 2, 3)
    ]


def test_quantiles_of_students_t_are_those_of_the_tables() -> None:
    known = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 7: 2.365, 10: 2.228, 29: 2.045, 120: 1.980}
    assert {degrees: round(t_quantile(degrees), 3) for degrees in known} == known
    assert round(t_quantile(5, 0.99), 3) == 4.032


def test_a_mean_over_seeds_has_an_interval_from_two_seeds_on() -> None:
    estimate = mean_of_seeds([1.0, 2.0, 3.0])  # 2 +- 4.303 * 1 / sqrt(3)
    assert (estimate.mean, round(estimate.low or 0, 3), round(estimate.high or 0, 3)) == (2.0, -0.484, 4.484)
    assert (mean_of_seeds([0.5]).low, mean_of_seeds([0.5]).high) == (None, None)
    assert mean_of_seeds([0.5, 0.5]).low == 0.5


@pytest.mark.parametrize(
    ("only_first", "only_second", "p_value"),
    [(0, 0, 1.0), (1, 0, 1.0), (3, 3, 1.0), (0, 5, 2 / 32), (5, 0, 2 / 32), (1, 6, 16 / 128), (10, 25, 0.01667385)],
)
def test_mcnemars_exact_p_value(only_first: int, only_second: int, p_value: float) -> None:
    assert mcnemar_p(only_first, only_second) == pytest.approx(p_value, abs=1e-8)


def test_mcnemars_test_takes_thousands_of_prompts() -> None:
    assert 0 < mcnemar_p(1500, 2000) < 1e-15


def test_runs_that_differ_only_by_seed_are_grouped(seeded: list[Path]) -> None:
    comparison = compare_folders(seeded)
    assert [group.runs for group in comparison.groups] == [(1, 2, 3), (4, 5, 6)]
    slow = comparison.groups[0]
    assert slow.name == "run 1, 2, 3: train.lr 1e-06"
    assert compare_folders(seeded[:2]).groups[0].name == "run 1, 2: slow-1 and 1 other seed"
    assert slow.after == mean_of_seeds([1 / 8, 2 / 8, 3 / 8]).as_share()
    assert slow.final_reward is not None
    assert slow.final_reward.mean == pytest.approx(0.1 * 2 * 2.5)  # four steps: 0.1 * seed * (1 + 2 + 3 + 4) / 4
    assert [(one.key, one.values) for one in comparison.settings] == [("train.lr", ("1e-06", "1e-05"))]
    assert [(one.first, one.second) for one in comparison.answers] == [(1, 4), (2, 5), (3, 6)], "by seed"


def test_settings_of_where_a_run_ran_are_no_difference(tmp_path: Path) -> None:
    folders = [
        write_finished(tmp_path / name, "ab", **{"hub.port": port, "train.save_path": tmp_path / name / "checkpoints"})
        for name, port in (("one", 8123), ("two", 8456))
    ]
    comparison = compare_folders(folders)
    assert comparison.settings == ()
    assert len(comparison.groups) == 1


def test_a_seed_that_was_run_twice_is_one_sample(seeded: list[Path], tmp_path: Path) -> None:
    again = write_finished(tmp_path / "again", "a", seed=2, reward=0.2, **{"train.lr": 1e-6})
    longer = write_finished(tmp_path / "longer", "abcd", seed=3, reward=0.3, num_steps=5, **{"train.lr": 1e-6})
    for folder, seed, steps in ((again, 2, 4), (longer, 3, 4)):
        config = load_run(folder / "config.json").model_copy(update={"steps": steps, "seed": seed})
        save_run(config, folder / "config.json", derived={"train.metrics_file"})
    comparison = compare_folders([*seeded[:3], again, longer])
    (group,) = comparison.groups
    assert (group.runs, group.repeated) == ((1, 2, 5), (3, 4)), "of a seed the run with the most steps"
    assert group.after == mean_of_seeds([1 / 8, 2 / 8, 4 / 8]).as_share()
    assert comparison.curves[0].held_out[0].accuracy == 1 / 8
    assert "In no mean, because another run has the same settings and seed: 3, 4." in text_of(comparison)
    only = compare_folders([seeded[1], again]).groups[0].after
    assert only is not None
    assert (only.mean, only.low) == (0.25, None), "one seed gives no interval"


def test_a_shared_setting_is_listed_once(tmp_path: Path) -> None:
    folders = [write_finished(tmp_path / f"{model}", "ab", model=model) for model in ("first-model", "second-model")]
    assert [one.key for one in compare_folders(folders).settings] == ["model"]


def test_answers_to_the_same_prompts_are_paired(tmp_path: Path) -> None:
    first, second = (
        write_finished(tmp_path / "first", "abc"),
        write_finished(tmp_path / "second", "bcdefgh", **{"train.lr": 0.5}),
    )
    (answers,) = compare_folders([first, second]).answers
    counts = (answers.both_right, answers.only_first, answers.only_second, answers.both_wrong)
    assert counts == (2, 1, 5, 0)
    assert answers.p_value == mcnemar_p(1, 5)
    assert [(one.prompt, one.is_first_right) for one in answers.examples] == [
        ("d", False), ("e", False), ("f", False), ("g", False), ("h", False), ("a", True),
    ]  # fmt: skip


def test_runs_without_a_common_prompt_are_compared_without_answers(tmp_path: Path) -> None:
    first, second = write_finished(tmp_path / "first", "abc"), write_finished(tmp_path / "second", "abc")
    other = evaluation(4, {"another": True}, 1.0)
    (second / "evals" / "step-4.json").write_text(json.dumps(other))
    comparison = compare_folders([first, second])
    assert comparison.answers == ()
    assert "no common held-out prompt" in text_of(comparison)


def test_answers_that_could_not_be_scored_are_in_no_pair(tmp_path: Path) -> None:
    first = write_finished(tmp_path / "first", "abcdefgh")
    second = write_finished(tmp_path / "second", "abcdefgh", **{"train.lr": 0.5})
    file = second / "evals" / "step-4.json"
    values = json.loads(file.read_text())
    for sample in values["samples"][:6]:  # the judge failed
        sample |= {"is_right": False, "reward": None, "outcome": "judge_failed"}
    file.write_text(json.dumps(values | {"num_unscored": 6}))
    comparison = compare_folders([first, second])
    (answers,) = comparison.answers
    assert (answers.num_prompts, answers.num_unscored) == (2, 6)
    assert (answers.both_right, answers.only_first, answers.p_value) == (2, 0, 1.0)
    said = text_of(comparison)
    assert "on 2 common prompts (6 more without a score in one of them)" in said
    assert "Could not be scored, and are in no figure: 6 answers of run 2 at step 4." in said


def test_graded_scores_are_shown_with_their_intervals(seeded: list[Path]) -> None:
    assert "score after" not in text_of(compare_folders(seeded[:2]))
    for folder, score in zip(seeded[:2], (0.5, 0.7), strict=True):
        file = folder / "evals" / "step-4.json"
        values = json.loads(file.read_text()) | {
            "mean_score": score,
            "mean_score_interval_95": [score - 0.1, score + 0.1],
        }
        file.write_text(json.dumps(values))
    comparison = compare_folders(seeded[:2])
    assert comparison.groups[0].score_after == mean_of_seeds([0.5, 0.7])
    lines = text_of(comparison).splitlines()
    assert next(line for line in lines if "score before" in line).count("score after") == 1
    assert "0.062" in lines[3]
    assert "0.500 (0.400 to 0.600)" in lines[3]
    assert "0.600 (-0.671 to 1.871)" in next(line for line in lines if "mean of 1, 2" in line)


def test_steps_that_one_seed_lacks_are_not_in_the_mean() -> None:
    assert list(estimates_by_step([{1: 0.0, 2: 1.0, 3: 2.0}, {1: 1.0, 3: 4.0}])) == [1, 3]
    thinned = estimates_by_step([dict.fromkeys(range(1000), 0.5)] * 2, num_points=100)
    assert (len(thinned), {one.mean for one in thinned.values()}) == (100, {0.5})


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    run, empty, unevaluated = (tmp_path / name for name in ("run", "empty", "unevaluated"))
    write_finished(run, "ab")
    empty.mkdir()
    save_run(load_run(None, {}), empty / "config.json")
    write_finished(unevaluated, "ab")
    for path in (unevaluated / "evals").iterdir():
        path.unlink()
    for folders, problem in (
        ([run], "two runs or more"),
        ([run, run], "two runs or more"),
        ([run, tmp_path], "is not the folder of a run"),
        ([run, empty], "has no results yet"),
        ([run, unevaluated], "has no evaluation"),
    ):
        with pytest.raises(ConfigError, match=problem) as refused:
            compare_folders(folders)
        assert refused.value.fix


def test_the_table_shows_runs_means_settings_and_answers(seeded: list[Path]) -> None:
    lines = text_of(compare_folders(seeded)).splitlines()
    assert lines[0].startswith("6 runs: smollm2-135m-instruct on arithmetic")
    assert next(line for line in lines if line.startswith("1 ")).split()[1:3] == ["slow-1", "1"]
    assert any("mean of 4, 5, 6" in line and "25.0 % (0.0 to 56.1)" in line for line in lines)
    assert any(line.split() == ["train.lr", "1e-06", "1e-05"] for line in lines)
    assert any(line.startswith("held-out answers, run 4 against run 1, on 8 common prompts") for line in lines)
    assert "The p-values are not adjusted for the number of comparisons." in lines


class Exported(HTMLParser):
    """The data in a page, and the elements that could load something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def test_the_page_holds_the_curves_with_their_intervals(seeded: list[Path]) -> None:
    exported = Exported(render_comparison(compare_folders(seeded)))
    assert not exported.tags & {"img", "link", "iframe", "object"}
    shown = json.loads(exported.scripts[0])["comparison"]
    slow, fast = shown["curves"]
    assert fast["steps"]["reward"] == [1, 2, 3, 4]
    assert fast["values"]["reward"] == pytest.approx([0.4, 0.8, 1.2, 1.6])
    expected = mean_of_seeds([0.2, 0.4, 0.6])
    assert (fast["low"]["reward"][0], fast["high"]["reward"][0]) == pytest.approx((expected.low, expected.high), 1e-4)
    assert [point["accuracy"] for point in slow["held_out"]] == [0.125, 0.25]
    assert shown["charts"][0]["title"] == "Held-out accuracy"
    assert shown["table"][1][1:3] == ["slow-1", "1"]
    assert "class ComparisonCard extends Card" in exported.scripts[-1]


def test_the_command_prints_a_table_or_json_and_writes_a_page(
    seeded: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", *map(str, seeded[:2])]
    assert run(words) == 0
    assert "comparison.html" in capsys.readouterr().out
    assert (tmp_path / "comparison.html").stat().st_size > 50_000
    (tmp_path / "comparison.html").unlink()
    assert run([*words, "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=Comparison)
    assert [one.name for one in found.runs] == ["slow-1", "slow-2"]
    assert not (tmp_path / "comparison.html").exists()
    assert run(words[:2]) == 2
    assert "treadle report RUN" in capsys.readouterr().err


def run(words: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return ended.value.code


def test_the_start_page_compares_the_runs_that_were_picked(seeded: list[Path], tmp_path: Path) -> None:
    with open_start_page(tmp_path) as app, TestClient(app) as client:
        found = client.get("/api/comparison", params={"runs": "slow-1/fast-1"})
        assert [row[1] for row in found.json()["table"][1:]] == ["slow-1", "fast-1"]
        assert client.get("/compare.html").status_code == 200
        assert client.get("/api/comparison", params={"runs": "slow-1/.."}).status_code == 404
        too_few = client.get("/api/comparison", params={"runs": "slow-1"})
        assert (too_few.status_code, "two runs" in too_few.json()["detail"]) == (422, True)
