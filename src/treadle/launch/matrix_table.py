"""Compare the runs of a matrix: one row per mode, as text, JSON, a plot and a page.

run folder -> read_record() -> RunRecord -> row_of() -> ModeRow -> text_of() | draw_plot() | render_page()
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, StrictUndefined

from treadle.formatting import counted, one_line
from treadle.launch.child_process import last_words
from treadle.report.history import History, Step, is_number
from treadle.report.summary import RunRecord
from treadle.track.plot import load_pyplot

Result = Literal["passed", "failed", "stopped", "not possible", "not run"]
LONGEST_REASON = 300  # characters
_TEMPLATE = Path(__file__).with_name("matrix_page.html")
_LOG_LINE = "  | "  # how an error quotes the log of a process
_MISMATCH = "LogProb Alignment: MISMATCH!"


@dataclass(frozen=True)
class Column:
    """One figure of a mode. `meaning` is printed below the table."""

    key: str
    title: str
    unit: str
    meaning: str
    shown: Callable[[float], str]


def _digits(value: float) -> str:
    """
    >>> [_digits(value) for value in (0.0123, 4.567, 45.67, 4567.8)]
    ['0.012', '4.57', '45.7', '4,568']
    """
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{3 if abs(value) < 1 else 2 if abs(value) < 10 else 1}f}"


def _small(value: float) -> str:
    """
    >>> _small(0.0000123), _small(0.0312), _small(0.0)
    ('1.2e-05', '0.031', '0')
    """
    return "0" if value == 0 else f"{value:.3f}" if abs(value) >= 0.001 else f"{value:.1e}"


COLUMNS = (
    Column("step_s", "step", "s", "seconds per step: mean of all steps but the first, which waits for the start",
           _digits),
    Column("publish_s", "publish", "s", "seconds that the trainer spent on publishing, per publish; restarts included",
           _digits),
    Column("sent_mb", "sent", "MB", "weights handed over per publish; 0: the engine reads the trainer's own",
           lambda value: "0" if value == 0 else _digits(value)),
    Column("memory_gb", "memory", "GB", "peak of all processes together; shared pages count once", _digits),
    Column("device_gb", "GPU", "GB", "most memory that the trainer held on its GPU", _digits),
    Column("tokens_s", "tokens", "/s", "tokens of prompts and completions, per second of the same steps", _digits),
    Column("canary", "canary", "nats", "parity: trainer's against engine's logprobs of a fixed text, last publish",
           _small),
    Column("sampled", "sampled", "nats",
           "parity: the same on the sampled tokens, mean of the steps that trained on the newest version", _small),
    Column("first_reward", "reward", "first", "mean reward of the first step: sampled before any update", _digits),
    Column("last_reward", "reward", "last", "mean reward of the last step", _digits),
)  # fmt: skip


@dataclass(frozen=True)
class ModeRow:
    """One mode. `reason`: why it failed or cannot run; `checks`: what was looked at, and what was found."""

    mode: str
    result: Result
    reason: str = ""
    flags: str = ""  # of `treadle run`
    run: str = ""  # folder of its run, below the matrix's
    steps: int = 0
    num_publishes: int = 0
    figures: Mapping[str, float | None] = field(default_factory=dict)
    rewards: tuple[float | None, ...] = ()
    checks: tuple[str, ...] = ()
    engine: str = ""  # "vllm 0.32.0"


@dataclass(frozen=True)
class Matrix:
    """What is written about all modes."""

    name: str
    task: str
    model: str
    seed: int
    steps: int
    machine: str
    date: str
    rows: tuple[ModeRow, ...]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns for which at least one mode has a figure."""
        return tuple(column for column in COLUMNS if any(row.figures.get(column.key) is not None for row in self.rows))

    @property
    def headline(self) -> str:
        engines = ", ".join(dict.fromkeys(row.engine for row in self.rows if row.engine)) or "no engine yet"
        return f"{self.task}, {self.model}, {counted(self.steps, 'step')}, seed {self.seed}, engine {engines}"


def row_of(mode: str, flags: str, record: RunRecord, run: str, error: str = "") -> ModeRow:
    """The row of a mode that has a run; `error`: the error that ended the run this time."""
    history, summary, train = record.history, record.summary, record.config.train
    last = record.config.steps  # always published
    published = [s for s in history.steps if s["step"] % train.publish_interval == 0 or s["step"] >= last]
    checks, problem = check_run(record)
    error = error or summary.last_words
    result: Result = "passed"
    reason = ""
    if not summary.is_complete:
        result = "failed" if error else "stopped"
        reason = one_sentence(error) if error else f"after step {history.last_step} of {record.config.steps}"
    elif problem:
        result, reason = "failed", problem
    return ModeRow(
        mode=mode,
        result=result,
        reason=reason,
        flags=flags,
        run=run,
        steps=history.last_step,
        num_publishes=len(published),
        figures=figures_of(record, published),
        rewards=tuple(_number(step.get("reward")) for step in history.steps),
        checks=checks,
        engine=", then ".join(record.engines),
    )


def figures_of(record: RunRecord, published: Sequence[Step]) -> dict[str, float | None]:
    history, memory = record.history, record.summary.peak_memory_bytes
    timed = History(history.steps[1:] or history.steps)
    seconds, tokens = sum(timed.values("perf/step_s")), sum(timed.values("batch/tokens_per_step"))
    on_policy = History(tuple(step for step in history.steps if step.get("sample/staleness_max") == 0))
    canaries, rewards = history.values("sync/canary_mean_abs_diff"), history.values("reward")
    device = history.values("perf/max_memory_allocated_gb")
    num = len(published)
    return {
        "step_s": timed.mean("perf/step_s"),
        # Of all steps: a restart is waited for by the step after it.
        "publish_s": sum(history.values("perf/weight_sync_s")) / num if num else None,
        "sent_mb": sum(history.values("sync/bytes")) / num / 1e6 if num else None,
        "memory_gb": memory / 1e9 if memory else None,
        "device_gb": max(device) if any(device) else None,
        "tokens_s": tokens / seconds if seconds else None,
        "canary": canaries[-1] if canaries else None,
        "sampled": on_policy.mean("sampling/sampling_logp_difference/mean"),
        "first_reward": rewards[0] if rewards else None,
        "last_reward": rewards[-1] if rewards else None,
    }


def check_run(record: RunRecord) -> tuple[tuple[str, ...], str]:
    """Check that the weights arrived. Returns (all findings, the first problem or "")."""
    config, history = record.config, record.history
    done: list[str] = []
    wrong: list[str] = []

    def note(is_right: bool, words: str) -> None:
        (done if is_right else wrong).append(words)

    note(history.last_step >= config.steps, f"{history.last_step} of {config.steps} steps were taken")
    answered = history.after.policy_version if history.after is not None else None
    if answered is not None:
        expected = "" if answered == config.steps else f", not {config.steps}"
        note(not expected, f"the engine answered the last evaluation as version {answered}{expected}")
    elif history.last_step >= config.steps:  # a publish that another version answers ends the run
        done.append(f"the engine confirmed version {config.steps}")
    last = history.steps[-1] if history.steps else {}
    canary = _number(last.get("sync/canary_mean_abs_diff"))
    if canary is not None:  # a publish whose canary is over its tolerance ends the run
        done.append(f"logprobs of trainer and engine differ by {_small(canary)} nats after the last publish")
    elif config.train.verify_publish == "off":
        wrong.append("parity was not measured, because --train.verify-publish is off")
    else:
        wrong.append("parity was not measured at the last publish")
    not_finite = [step["step"] for step in history.steps if _number(step.get("reward")) is None]
    note(not not_finite, f"the reward of step {not_finite[0]} is not finite" if not_finite else "rewards are finite")
    mismatches = [str(line) for line in history.health if _MISMATCH in line.message]
    done += [f"remark of the trainer: {one_line(line, LONGEST_REASON)}" for line in mismatches[:1]]
    return (*wrong, *done), wrong[0] if wrong else ""


def one_sentence(error: str) -> str:
    """The error of a run on one line; if it quotes the log of a process, with the last message there."""
    lines = error.splitlines() or [""]
    message, _ = last_words([line.removeprefix(_LOG_LINE) for line in lines if line.startswith(_LOG_LINE)])
    head = lines[0].removesuffix("; the end of its log:")
    return one_line(f"{head}: {message}" if message else head, LONGEST_REASON)


def text_of(matrix: Matrix) -> str:
    """The table for a terminal, and below it a line for each mode and each column."""
    columns = matrix.columns
    lines = [["mode", "result", *(column.title for column in columns)], ["", "", *(c.unit for c in columns)]]
    for row in matrix.rows:
        lines.append([row.mode, row.result, *(cell_of(row, column) for column in columns)])
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    text = [matrix.headline, f"on {matrix.machine}, {matrix.date}", ""]
    for line in lines:
        names = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        figures = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
        text.append("  ".join([*names, *figures]).rstrip())
    text.append("")
    text += [f"{row.mode}: {verdict(row)}" for row in matrix.rows]
    if columns:
        text.append("")
        text += [f"{column.title} ({column.unit}): {column.meaning}" for column in columns]
    return "\n".join(text) + "\n"


def verdict(row: ModeRow) -> str:
    """The result with its reason: "passed: 5 of 5 steps were taken; ..."."""
    why = row.reason if row.result != "passed" else "; ".join(row.checks)
    return f"{row.result}: {why}" if why else row.result


def cell_of(row: ModeRow, column: Column) -> str:
    value = row.figures.get(column.key)
    return "" if value is None else column.shown(value)


def draw_plot(matrix: Matrix, path: Path) -> None:
    """One panel per figure, with a bar for each mode, and one with the reward of each step."""
    pyplot = load_pyplot()
    rows = [row for row in matrix.rows if any(value is not None for value in row.figures.values())]
    bars = [column for column in matrix.columns if not column.key.endswith("reward")]
    colours = {row.mode: pyplot.get_cmap("tab10")(place % 10) for place, row in enumerate(rows)}
    num_columns = 4
    num_rows = -(-(len(bars) + 1) // num_columns)
    size = (3.6 * num_columns, (1.0 + 0.28 * max(4, len(rows))) * num_rows + 0.5)
    figure, grid = pyplot.subplots(num_rows, num_columns, figsize=size, dpi=110, layout="constrained", squeeze=False)
    places = [axes for line in grid for axes in line]
    for axes, column in zip(places, bars, strict=False):
        _draw_bars(axes, rows, column, colours)
        axes.tick_params(labelleft=bool(axes.get_subplotspec().is_first_col()))
    _draw_rewards(places[len(bars)], rows, colours)
    for axes in places[len(bars) + 1 :]:
        axes.set_visible(False)
    figure.suptitle(f"{matrix.headline}\n{matrix.machine}, {matrix.date}", fontsize=10, x=0.01, ha="left")
    figure.savefig(path)
    pyplot.close(figure)


def _draw_bars(axes: Any, rows: Sequence[ModeRow], column: Column, colours: Mapping[str, Any]) -> None:
    values = [row.figures.get(column.key) for row in rows]
    known = [value for value in values if value]
    is_wide = bool(known) and max(known) > 30 * min(known)
    least = min(known) / 3 if is_wide else 0.0
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        end = max(value or 0.0, least)
        axes.barh(place, end - least, left=least, color=colours[row.mode], height=0.7)
        said = " not measured" if value is None else f" {column.shown(value)}"
        axes.text(end, place, said, va="center", fontsize=8, color="#1b1b1b")
    if is_wide:
        axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [row.mode for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"{column.title} ({column.unit})" + (", log scale" if is_wide else ""), loc="left", fontsize=9)
    axes.margins(x=0.3)
    axes.xaxis.set_visible(False)  # the bars say their values
    _style_axes(axes)


def _draw_rewards(axes: Any, rows: Sequence[ModeRow], colours: Mapping[str, Any]) -> None:
    for place, row in enumerate(rows):
        points = [(step, value) for step, value in enumerate(row.rewards, start=1) if value is not None]
        steps, values = [step for step, _ in points], [value for _, value in points]
        width = 1.2 + 0.9 * (len(rows) - 1 - place)  # the same seed often gives the same curve: each stays visible
        axes.plot(steps, values, color=colours[row.mode], linewidth=width, marker="o", markersize=width + 2)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title("reward by step", loc="left", fontsize=9)
    _style_axes(axes)


def _style_axes(axes: Any) -> None:
    axes.tick_params(labelsize=8)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def render_page(matrix: Matrix, picture: bytes) -> str:
    """One HTML file that loads nothing and runs nothing; `picture` is the plot, b"" if there is none."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    columns = matrix.columns
    return template.render(
        matrix=matrix,
        columns=columns,
        rows=[(row, [cell_of(row, column) for column in columns], verdict(row)) for row in matrix.rows],
        picture=base64.b64encode(picture).decode(),
    )


def _number(value: object) -> float | None:
    return float(value) if is_number(value) and math.isfinite(value) else None
