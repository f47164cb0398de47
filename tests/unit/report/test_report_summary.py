"""The report's figures are the run's figures."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from tests.written_run import history_of, write_health, write_run
from treadle.report.history import History
from treadle.report.summary import (
    Outcome,
    choose_examples,
    draw_plot,
    load_summary,
    print_report,
    save_summary,
    summarize,
)


def printed(summary) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_report(summary, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_summary_holds_the_figures_of_the_run(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    outcome = Outcome(True, 254.04, 4_210_000_000, {"trainer": 2_500_000_000, "engine": 1_200_000_000})
    summary = summarize(config, tmp_path, history_of(config, tmp_path), outcome)
    save_summary(summary, tmp_path)
    figures = json.loads((tmp_path / "summary.json").read_text())
    assert figures["held_out_before"]["accuracy"] == 0.016
    assert figures["held_out_after"]["accuracy"] == 0.73
    assert figures["held_out_after"]["interval_95"] == pytest.approx([0.72, 0.75])
    assert figures["seconds_per_step"] == {"total": 5.0, "generation": 3.0, "training": 4.0, "waiting": 0.5}
    assert (figures["steps_taken"], figures["total_s"], figures["peak_memory_bytes"]) == (
        50,
        254.0,
        4_210_000_000,
    )
    assert load_summary(tmp_path) == summary


def test_report_says_it_in_words(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    outcome = Outcome(True, 254.0, 4_210_000_000, {"trainer": 2_500_000_000})
    text = printed(summarize(config, tmp_path, history_of(config, tmp_path), outcome))
    assert "50 steps in 4 min 14 s" in text
    assert "1.6 % (0.6 to 3.6) -> 73.0 % (72.0 to 75.0), 95 % intervals, 256 prompts" in text
    assert re.search(r"held-out mean score +0\.008 -> 0\.365\n", text)
    assert re.search(r"tokens per second +generated 812, trained 412\n", text)
    assert "5.00 (training 4.00, waiting 0.50); in parallel, generation of a group 3.00" in text
    assert "4.21 GB over all processes" in text
    assert f"chat {tmp_path}" in text
    for place in ("metrics.jsonl", "logs"):
        assert place in text


def test_a_graded_score_is_reported_with_its_interval(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    file = tmp_path / "evals" / "step-50.json"
    values = json.loads(file.read_text()) | {"mean_score": 0.365, "mean_score_interval_95": [0.34, 0.39]}
    file.write_text(json.dumps(values))
    summary = summarize(config, tmp_path, history_of(config, tmp_path), Outcome(True, 254.0))
    assert summary.held_out_after is not None
    assert summary.held_out_after["mean_score_interval_95"] == [0.34, 0.39]
    assert re.search(r"held-out mean score +0\.008 -> 0\.365 \(0\.340 to 0\.390\), 95 % intervals\n", printed(summary))


def test_a_summary_of_one_step_uses_the_singular(tmp_path: Path) -> None:
    config = write_run(tmp_path, num_steps=1, is_evaluated=False)
    summary = summarize(config, tmp_path, history_of(config, tmp_path), Outcome(True, 5.0))
    assert "\n1 step in 5 s\n" in printed(summary)


@pytest.mark.parametrize(("equal", "is_said"), [((1.0, 1.0), True), ((1.0, 0.9), False), ((), False)])
def test_a_run_in_which_nothing_was_learned_says_so(equal: tuple[float, ...], is_said: bool, tmp_path: Path) -> None:
    config = write_run(tmp_path, num_steps=2, is_evaluated=False)
    steps = tuple({"step": n + 1, "frac_reward_zero_std": share} for n, share in enumerate(equal))
    summary = summarize(config, tmp_path, History(steps), Outcome(True, 5.0))
    assert ("so the weights did not change" in printed(summary)) == is_said


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ((), "trained model                   none"),
        (("final_model",), "trained model                   {}/final_model"),
        (("final_adapter",), "trained adapter                 {}/final_adapter"),
        (("final_adapter", "final_model"), "trained model                   {}/final_model"),
        (("final_model", "final_adapter"), "trained adapter                 {}/final_adapter"),  # the model is older
    ],
)
def test_a_summary_names_the_result_that_exists(made: tuple[str, ...], says: str, tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints"
    for second, name in enumerate(made):
        (saved / name).mkdir(parents=True)
        os.utime(saved / name, (second, second))
    config = write_run(tmp_path)
    config = config.model_copy(update={"train": config.train.model_copy(update={"save_path": saved})})
    summary = summarize(config, tmp_path, history_of(config, tmp_path), Outcome(True, 254.0))
    assert says.format(saved) in printed(summary)
    assert summary.final_model == (str(saved / made[-1]) if made else "")


def test_report_shows_the_last_health_lines(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    write_health(tmp_path, *((step, f"mean_kl 0.{step} [/x]") for step in range(51, 57)))
    summary = summarize(config, tmp_path, history_of(config, tmp_path), Outcome(True, 254.0))
    text = printed(summary)
    lines = [line.split("  ")[-1].strip() for line in text.splitlines() if "mean_kl" in line]
    assert lines == [f"step {step}: mean_kl 0.{step} [/x]" for step in (53, 54, 55, 56)]
    assert "(2 earlier ones are in the trainer's log)" in text
    save_summary(summary, tmp_path)
    assert load_summary(tmp_path) == summary


def test_remarks_on_the_health_of_a_run_name_the_flags_of_run(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    write_health(tmp_path, (3, "clipped_fraction 0.4; lower --lr or raise --kl-coef"), (4, "raise --env.max-age"))
    first, second = (line.message for line in history_of(config, tmp_path).health)
    assert first == "clipped_fraction 0.4; lower --train.lr or raise --train.kl-coef"
    assert second == "raise --env.max-age"


def test_examples_that_became_right_come_first(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    history = history_of(config, tmp_path)
    examples = choose_examples(history.before, history.after)
    assert [example["prompt"] for example in examples] == ["c", "d", "b"]
    assert examples[0]["before"] == "answer 0\n to c"
    assert examples[0]["after"] == "answer 50\n to c"
    assert (examples[0]["before_is_right"], examples[0]["after_is_right"]) == (False, True)
    assert choose_examples(history.before, None) == []


def test_answers_that_could_not_be_scored_are_said_once_and_are_no_example(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    file = tmp_path / "evals" / "step-50.json"
    values = json.loads(file.read_text())
    for sample in values["samples"]:
        if sample["prompt"] in "bc":  # b was right before
            sample |= {"is_right": False, "reward": None, "outcome": "judge_failed"}
    file.write_text(json.dumps(values | {"num_unscored": 2}))
    history = history_of(config, tmp_path)
    summary = summarize(config, tmp_path, history, Outcome(True, 254.0))
    assert [example["prompt"] for example in summary.examples] == ["d", "a", "e"]
    said = "2 held-out answers at step 50 could not be scored and are not in the figures"
    assert said in printed(summary)
    again = summarize(config, tmp_path, history, Outcome(True, 254.0, findings=tuple(summary.findings)))
    assert again.findings == [said]


def change_evaluation(path: Path, *, completion: str = "42", ended: dict[str, bool], share: float) -> None:
    values = json.loads(path.read_text())
    values |= {"ended": share, "generation_params": {"n": 1, "temperature": 0.0, "max_tokens": 16}}
    for sample in values["samples"]:
        sample |= {"ended": ended.get(sample["prompt"], True), "completion": completion}
    path.write_text(json.dumps(values))


def test_examples_whose_answer_now_ends_by_itself_are_preferred(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    change_evaluation(tmp_path / "evals" / "step-50.json", ended={"c": False}, share=0.9)
    history = history_of(config, tmp_path)
    examples = choose_examples(history.before, history.after)
    assert [(example["prompt"], example["after_ended"]) for example in examples] == [
        ("d", True), ("c", False), ("b", True),
    ]  # fmt: skip


def test_examples_are_whole_and_say_where_they_were_cut_off(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    answer = "word " * 100 + "end"
    change_evaluation(tmp_path / "evals" / "step-0.json", completion=answer, ended={"d": False}, share=0.41)
    change_evaluation(tmp_path / "evals" / "step-50.json", completion="x" * 700, ended={}, share=0.996)
    summary = summarize(config, tmp_path, history_of(config, tmp_path), Outcome(True, 1.0))
    console = Console(file=io.StringIO(), width=40)
    print_report(summary, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    before = [line for line in lines if line.startswith("    before")]
    assert [line.removeprefix("    before wrong ") for line in before[:2]] == [
        answer,
        f"{answer} (cut off at 16 tokens)",
    ]
    assert any("x" * 599 + "…" in line for line in lines)


def test_the_share_of_answers_that_end_by_themselves_is_reported(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    change_evaluation(tmp_path / "evals" / "step-0.json", ended={}, share=0.41)
    change_evaluation(tmp_path / "evals" / "step-50.json", ended={}, share=0.996)
    summary = summarize(config, tmp_path, history_of(config, tmp_path), Outcome(True, 1.0))
    assert (summary.ended_before, summary.ended_after) == (0.41, 0.996)
    assert "answers that end by themselves  41.0 % -> 99.6 %\n" in printed(summary)


def test_evaluations_that_do_not_say_what_ended_are_read(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    summary = summarize(config, tmp_path, history_of(config, tmp_path), Outcome(True, 1.0))
    assert (summary.ended_before, summary.ended_after) == (None, None)
    text = printed(summary)
    assert "end by themselves" not in text
    assert "cut off" not in text


def test_a_run_that_wrote_nothing_has_a_report_too(tmp_path: Path) -> None:
    config = write_run(tmp_path / "other")
    text = printed(summarize(config, tmp_path, History(), Outcome(False, 2.0)))
    assert "0 steps in 2 s" in text
    assert "not measured" in text


def test_an_evaluation_of_an_earlier_end_is_not_the_result(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 51}\n')
    history = history_of(config, tmp_path)
    assert history.before is not None
    assert history.after is None


def test_times_of_several_lives_add_up_and_peaks_do_not(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    earlier = summarize(config, tmp_path, History(), Outcome(False, 100.0, 500, {"hub": 50, "env": 70}))
    whole = Outcome(True, 20.0, 400, {"hub": 60}).after(earlier)
    assert whole == Outcome(True, 120.0, 500, {"hub": 60, "env": 70})


def test_markup_in_a_completion_is_shown_as_it_is(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    path = tmp_path / "evals" / "step-50.json"
    values = json.loads(path.read_text())
    for sample in values["samples"]:
        sample["completion"] = "[bold]42[/nonsense]"
    path.write_text(json.dumps(values))
    text = printed(summarize(config, tmp_path, history_of(config, tmp_path), Outcome(True, 1.0)))
    assert "[bold]42[/nonsense]" in text


def test_plot_is_drawn_beside_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    config = write_run(tmp_path)
    history = history_of(config, tmp_path)
    assert draw_plot(history, summarize(config, tmp_path, history, Outcome(True, 1.0))) == ""
    assert (tmp_path / "reward.png").stat().st_size > 10_000
