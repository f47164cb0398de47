"""`treadle compare RUN RUN...`: print a comparison as text or JSON, and write it into one HTML file.

The file is a page of its own (dash/page/compare.html); `treadle dash FOLDER` serves the same page with data from
`page_answer`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from treadle.config.load import replace_text
from treadle.dash.export import export_page
from treadle.dash.run_folder import HeldOut
from treadle.formatting import counted, duration, gigabytes, near, one_line, percent, with_interval
from treadle.report.comparison import (
    MEAN_STEPS,
    AnswerComparison,
    Comparison,
    RunFigures,
    SeedGroup,
    compare_folders,
)
from treadle.report.statistics import Estimate

PAGE_FILE = "comparison.html"
NUM_PRINTED = 2  # examples of each kind, in the terminal
_HEADS = ("", "run", "seed", "held-out before", "held-out after")
_SCORE_HEADS = ("score before", "score after")  # where a score says more than right or wrong
_LAST_HEADS = ("final reward", "steps", "time", "memory")
_NOTE = (
    "In brackets: 95 % intervals, of a run over its prompts, of a mean over its seeds. Held-out: accuracy; score: the "
    f"mean score of the same answers. Final reward: mean of the last {MEAN_STEPS} steps."
)
_LONGEST_TEXT = 300  # characters of a prompt or an answer in the terminal
_LONGEST_VALUE = 60


def write_comparison(folders: Sequence[Path], out: Path | None, *, is_json: bool) -> int:
    """Print the comparison. As JSON no page is written unless `out` names it."""
    comparison = compare_folders(folders)
    if is_json:
        print(msgspec.json.format(msgspec.json.encode(comparison), indent=2).decode())
    else:
        print(text_of(comparison))
    if out is not None or not is_json:
        file = (out or Path(comparison.runs[0].folder).parent / PAGE_FILE).expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, render_comparison(comparison))
        mask = os.umask(0)
        os.umask(mask)
        file.chmod(0o666 & ~mask)  # it is made to be shown; secret settings are not in it
        if not is_json:
            print(f"\ncurves, with all of this: {near(file.resolve())}")
    return 0


def render_comparison(comparison: Comparison) -> str:
    answers = {"kind": "comparison", "comparison": page_answer(comparison)}
    return export_page("Comparison of runs", answers, index="compare.html", entry="compare.js")


def page_answer(comparison: Comparison) -> dict[str, Any]:
    """What the page shows (dash/page/compare.js)."""
    return {
        "words": comparison.words,
        "note": _NOTE,
        "table": table_of(comparison),
        "settings": settings_table(comparison),
        "answers": [{"words": answers_in_words(one), "comparison": one} for one in comparison.answers],
        "answers_note": answers_note(comparison),
        "charts": comparison.charts,
        "curves": comparison.curves,
    }


def table_of(comparison: Comparison) -> list[list[str]]:
    """The heads, a row for each run, and a row for each group of several."""
    groups = [group for group in comparison.groups if len(group.runs) > 1]
    ends = [end for run in comparison.runs for end in (run.before, run.after) if end is not None]
    is_graded = any(end.score_low is not None for end in ends)
    return [
        [*_HEADS, *(_SCORE_HEADS if is_graded else ()), *_LAST_HEADS],
        *(_row(run, with_scores=is_graded) for run in comparison.runs),
        *(_row_of_group(group, with_scores=is_graded) for group in groups),
    ]


def settings_table(comparison: Comparison) -> list[list[str]]:
    """The heads and a row for each setting that differs; empty where only the seeds do."""
    if not comparison.settings:
        return []
    heads = ["setting", *(f"run {_numbers(group)}" for group in comparison.groups)]
    return [heads, *([one.key, *(value or "–" for value in one.values)] for one in comparison.settings)]


def answers_note(comparison: Comparison) -> str:
    if not comparison.answers:
        return "The runs were asked no common held-out prompt."
    return "" if len(comparison.answers) == 1 else "The p-values are not adjusted for the number of comparisons."


def text_of(comparison: Comparison) -> str:
    """The comparison as text for a terminal."""
    parts = [" ".join(comparison.words), aligned(table_of(comparison)), _NOTE]
    if comparison.settings:
        shortened = [[one_line(cell, _LONGEST_VALUE) for cell in row] for row in settings_table(comparison)]
        parts.append("Settings that differ:\n" + aligned(shortened))
    parts += [*map(_answers_text, comparison.answers), answers_note(comparison)]
    return "\n\n".join(filter(None, parts))


def _row(run: RunFigures, *, with_scores: bool) -> list[str]:
    """Number, name, seed, held-out before and after, final reward, steps, time and memory of a run, as text."""
    scores = [_score(_score_estimate(end)) for end in (run.before, run.after)] if with_scores else []
    is_newest = run.after is None or run.after.step == run.steps_taken
    return [
        str(run.number),
        run.name,
        str(run.seed),
        _interval(_estimate(run.before)),
        _interval(_estimate(run.after)) + ("" if is_newest or run.after is None else f" at step {run.after.step}"),
        *scores,
        "–" if run.final_reward is None else f"{run.final_reward:.3f}",
        str(run.steps_taken) if run.steps_taken == run.steps else f"{run.steps_taken} of {run.steps}",
        duration(run.total_s) if run.total_s else "–",
        gigabytes(run.peak_memory_bytes) if run.peak_memory_bytes else "–",
    ]


def _estimate(held_out: HeldOut | None) -> Estimate | None:
    return None if held_out is None else Estimate(held_out.accuracy, held_out.low, held_out.high)


def _score_estimate(held_out: HeldOut | None) -> Estimate | None:
    if held_out is None or held_out.mean_score is None:
        return None
    return Estimate(held_out.mean_score, held_out.score_low, held_out.score_high)


def _score(estimate: Estimate | None) -> str:
    return "–" if estimate is None else with_interval(estimate.mean, estimate.low, estimate.high)


def _row_of_group(group: SeedGroup, *, with_scores: bool) -> list[str]:
    scores = [_score(group.score_before), _score(group.score_after)] if with_scores else []
    accuracies = [_interval(group.before), _interval(group.after)]
    return ["", f"mean of {_numbers(group)}", "", *accuracies, *scores, _score(group.final_reward), "", "", ""]


def _numbers(group: SeedGroup) -> str:
    return ", ".join(map(str, group.runs))


def _interval(estimate: Estimate | None) -> str:
    """ "73.0 % (67.2 to 78.1)"."""
    if estimate is None:
        return "–"
    if estimate.low is None or estimate.high is None:
        return percent(estimate.mean)
    return f"{percent(estimate.mean)} ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


def answers_in_words(one: AnswerComparison) -> str:
    """ "run 2 against run 1, on 256 prompts: 40 only run 2 right, 12 only run 1 right, p = 0.0001"."""
    p_value = f"p = {one.p_value:.2g}" if one.p_value >= 1e-4 else "p < 0.0001"
    unscored = f" ({one.num_unscored} more without a score in one of them)" if one.num_unscored else ""
    return (
        f"run {one.second} against run {one.first}, on {counted(one.num_prompts, 'common prompt')}{unscored}: only run "
        f"{one.second} right {one.only_second}, only run {one.first} right {one.only_first}, both right "
        f"{one.both_right}, both wrong {one.both_wrong}; exact McNemar test {p_value}"
    )


def _answers_text(one: AnswerComparison) -> str:
    lines = [f"held-out answers, {answers_in_words(one)}"]
    for is_first_right in (False, True):
        for answer in [each for each in one.examples if each.is_first_right is is_first_right][:NUM_PRINTED]:
            verdicts = ("right", "wrong") if is_first_right else ("wrong", "right")
            lines.append(f"  {one_line(answer.prompt, _LONGEST_TEXT)}  (expected: {one_line(answer.gold, 60)})")
            for number, verdict, text in zip(
                (one.first, one.second), verdicts, (answer.first, answer.second), strict=True
            ):
                lines.append(f"    run {number} {verdict}: {one_line(text, _LONGEST_TEXT)}")
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns that begin below each other.

    >>> print(aligned([["run", "steps"], ["long name", "50"]]))
    run        steps
    long name  50
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
