"""Draw the live panel. Pure: Snapshot of a run -> rich renderable."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from treadle.config.schema import RunConfig
from treadle.formatting import duration, gigabytes, model_name, percent, sparkline
from treadle.launch.monitor import RunStatus
from treadle.report.history import GENERATION_S, SECONDS_PER_STEP, TOKENS_PER_SECOND, Evaluation, History
from treadle.track.files import HealthEvent
from treadle.watch.describe import SILENT_AFTER_S, describe_work, is_long, shortened, wait_to_show
from treadle.wire.hub import ProcessStanding

_UNKNOWN = "–"
NUM_ALARMS_SHOWN = 2
NUM_STEPS_SHOWN = 20  # within these the trainer repeats a warning that still applies


@dataclass(frozen=True)
class Snapshot:
    config: RunConfig
    run_name: str
    history: History
    phase: str
    num_queued: int | None
    memory_bytes: int
    elapsed_s: float
    status: RunStatus
    how_to_leave: str


def draw(snapshot: Snapshot) -> RenderableType:
    history = snapshot.history
    figures = Table.grid(padding=(0, 2), expand=True)
    for _ in range(3):
        figures.add_column(justify="right", style="dim", no_wrap=True)
        figures.add_column(justify="left", no_wrap=True, ratio=1)
    figures.add_row(
        "reward", _number(history.last("reward"), "{:.3f}"),
        "accuracy", _accuracy(history.last("rollout/accuracy")),
        "generated tokens/s", _number(_generated_tok_s(snapshot), "{:,.0f}"),
    )  # fmt: skip
    figures.add_row(
        "queue", _UNKNOWN if snapshot.num_queued is None else f"{snapshot.num_queued} groups",
        "staleness", _number(history.last("sample/staleness_mean"), "{:.1f}"),
        "trained tokens/s", _number(history.last(TOKENS_PER_SECOND["trained"]), "{:,.0f}"),
    )  # fmt: skip
    figures.add_row("memory", gigabytes(snapshot.memory_bytes) if snapshot.memory_bytes else _UNKNOWN)
    lines: list[RenderableType] = [_progress(snapshot), *_work(snapshot.status), Text(), figures, _seconds(history)]
    rewards = history.values("reward")
    if rewards:
        ends = f"  {rewards[0]:.3f} → {rewards[-1]:.3f}"
        lines.append(Text.assemble(("reward per step    ", "dim"), (sparkline(rewards), "green"), ends))
    if history.evaluations:
        lines += _held_out(history.evaluations)
    for label, evaluations in history.by_env.items():
        if evaluations:
            lines.append(Text.assemble((f"  {label:<17}", "dim"), _accuracies(evaluations)))
    lines += [Text(f"! {line}", style="yellow") for line in recent_health(history)]
    if snapshot.status.standings:
        lines += [Text(), _processes(snapshot.status.standings)]
    lines += [Text(f"! {finding}", style="yellow") for finding in snapshot.status.findings[-NUM_ALARMS_SHOWN:]]
    lines += [Text(f"! {alarm}", style="red") for alarm in snapshot.status.alarms[-NUM_ALARMS_SHOWN:]]
    # rich cuts the end of a long title.
    about = f"  {snapshot.config.task_name}  {model_name(snapshot.config.model)}"
    name = Text.assemble((snapshot.run_name, "bold"), about)
    return Panel(Group(*lines), title=name, title_align="left", subtitle=snapshot.how_to_leave, subtitle_align="right")


def time_left_s(history: History, num_steps: int) -> float | None:
    """From the mean of the last ten steps: steps become faster when completions become shorter."""
    recent = history.values("perf/step_s")[-10:]
    return sum(recent) / len(recent) * max(0, num_steps - history.last_step) if recent else None


def recent_health(history: History) -> list[HealthEvent]:
    """The last two health lines; older ones that were not repeated no longer apply."""
    oldest = history.last_step - NUM_STEPS_SHOWN
    return [line for line in history.health if line.step > oldest][-2:]


def _progress(snapshot: Snapshot) -> RenderableType:
    num_steps, done = snapshot.config.steps, snapshot.history.last_step
    left = time_left_s(snapshot.history, num_steps)
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    times = duration(snapshot.elapsed_s) + (f", {duration(left)} left" if left is not None and done < num_steps else "")
    row.add_row(f"step {done}/{num_steps}", ProgressBar(total=num_steps, completed=done), times)
    return Group(Text(snapshot.phase, style="cyan"), row)


def _seconds(history: History) -> Text:
    """Seconds of the last step by part; groups are generated in parallel, and may take longer than a step."""
    parts = [
        f"{word} {value:.1f}" for word, keys in SECONDS_PER_STEP.items() if (value := history.last(*keys)) is not None
    ]
    if (generation := history.last(GENERATION_S)) is not None:
        parts.append(f"in parallel: generation {generation:.1f}")
    return Text.assemble(("seconds per step   ", "dim"), "   ".join(parts) or _UNKNOWN)


def _generated_tok_s(snapshot: Snapshot) -> float | None:
    """The present rate of the engine; that of the last step if it does not report."""
    now = snapshot.status.generated_tok_s
    return snapshot.history.last(TOKENS_PER_SECOND["generated"]) if now is None else now


def _accuracies(evaluations: tuple[Evaluation, ...]) -> str:
    """Accuracy of the first evaluation and the last two."""
    shown = [evaluations[0], *evaluations[1:][-2:]]
    return "  →  ".join(f"{percent(evaluation.accuracy)} at step {evaluation.step}" for evaluation in shown)


def _held_out(evaluations: tuple[Evaluation, ...]) -> list[RenderableType]:
    shown = [evaluations[0], *evaluations[1:][-2:]]
    scores = "  →  ".join(_number(evaluation.mean_score, "{:.3f}") for evaluation in shown)
    return [
        Text.assemble(("held-out accuracy  ", "dim"), (_accuracies(evaluations), "bold")),
        Text.assemble(("held-out score     ", "dim"), scores),
    ]


def _work(status: RunStatus) -> list[RenderableType]:
    """A progress bar for each long task of a process."""
    rows: list[RenderableType] = []
    for standing in status.standings:
        work = standing.report.work
        if work is not None:
            row = Table.grid(padding=(0, 2), expand=True)
            row.add_column(no_wrap=True)
            row.add_column(ratio=1)
            row.add_row(Text(describe_work(work)), ProgressBar(total=max(1, work.total), completed=work.done))
            rows.append(row)
    return rows


def _processes(standings: tuple[ProcessStanding, ...]) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    for justify in ("left", "right", "right", "right"):
        table.add_column(justify=justify, no_wrap=True, style="dim")
    table.add_column(ratio=1, no_wrap=True)
    for standing in standings:
        report = standing.report
        table.add_row(
            Text(report.name),
            f"pid {report.pid}",
            gigabytes(report.memory_bytes) if report.memory_bytes else _UNKNOWN,
            "" if report.policy_version is None else f"version {report.policy_version}",
            _doing(standing),
        )
    return table


def _doing(standing: ProcessStanding) -> Text:
    report = standing.report
    if standing.heard_s > SILENT_AFTER_S:
        return Text(f"no report for {standing.heard_s:.0f} s", style="red")
    wait = wait_to_show(report)
    if wait is None:
        return Text(report.state)
    words = f"waits {duration(wait.seconds)} for "
    if is_long(wait):
        return Text(words + wait.what, style="red" if wait.is_late else "yellow")
    return Text(words + shortened(wait.what))


def _number(value: float | None, pattern: str) -> str:
    return _UNKNOWN if value is None else pattern.format(value)


def _accuracy(value: float | None) -> str:
    return _UNKNOWN if value is None else percent(value)
