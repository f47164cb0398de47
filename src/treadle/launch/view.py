"""Show the progress of a run: a live panel on a terminal, plain lines anywhere else, and the address of its page."""

from __future__ import annotations

import os
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from treadle.config.schema import RunConfig
from treadle.formatting import duration, gigabytes, model_name, percent, sparkline, with_interval
from treadle.launch.monitor import RunStatus
from treadle.log import get_logger
from treadle.report.history import GENERATION_S, SECONDS_PER_STEP, TOKENS_PER_SECOND, Evaluation, History
from treadle.watch.describe import SILENT_AFTER_S, describe_work, is_long, shortened, wait_to_show
from treadle.wire.hub import LastReport

log = get_logger("launch")

WAITING_LINE_EVERY_S = 15.0
PAGE_PATH = "/dash/"
_UNKNOWN = "–"
NUM_ALARMS_SHOWN = 2
NUM_STEPS_SHOWN = 20  # within these the trainer repeats a warning that still applies
# Figures of a plain step line.
_FIGURES: Mapping[str, Callable[[float], str]] = {
    "reward": "reward {:.3f}".format,
    "rollout/accuracy": lambda share: f"accuracy {percent(share)}",
    "completions/clipped_ratio": lambda share: f"ended {100 * (1 - share):.0f} %",  # by themselves
    TOKENS_PER_SECOND["generated"]: "generated {:.0f} tokens/s".format,
    TOKENS_PER_SECOND["trained"]: "trained {:.0f} tokens/s".format,
    "perf/step_s": "{:.1f} s".format,
    "sample/staleness_mean": "age {:.1f}".format,
}


@dataclass
class ViewState:
    """Everything that a view shows; the launcher keeps it up to date."""

    config: RunConfig
    run_name: str
    history: History = field(default_factory=History)
    phase: str = "starting hub and engine"
    num_queued: int | None = None
    memory_bytes: int = 0
    status: RunStatus = field(default_factory=RunStatus)
    begun: float = field(default_factory=time.monotonic)
    how_to_leave: str = "Ctrl-C stops"
    clock: Callable[[], float] = time.monotonic


def current_phase(history: History, config: RunConfig) -> str:
    """What the run is doing, from its files: `measuring held-out accuracy before training`."""
    evaluates = any(env.num_eval > 0 for env in config.environments)
    if not history.steps:
        is_waiting = evaluates and history.before is None
        return "measuring held-out accuracy before training" if is_waiting else "collecting the first batch"
    if history.last_step < config.steps:
        return "training"
    return "measuring held-out accuracy after training" if evaluates and history.after is None else "finishing"


class LiveView:
    """A panel that is redrawn in place about three times a second."""

    def __init__(self, console: Console | None = None, *, interval_s: float = 0.3) -> None:
        self.live = Live(console=console or Console(), auto_refresh=False, transient=True)
        self._interval_s = interval_s
        self._next_draw = 0.0

    def open(self) -> None:
        self.live.start()

    def update(self, state: ViewState) -> None:
        if time.monotonic() >= self._next_draw:
            self.live.update(draw(state), refresh=True)
            self._next_draw = time.monotonic() + self._interval_s

    def close(self) -> None:
        self.live.stop()


class PlainView:
    """One line per step, evaluation, phase and problem, for files, pipes and small terminals.

    step  12/50  reward 0.310  accuracy 28.0 %  ended 97 %  generated 812 tokens/s  trained 412 tokens/s  8.1 s  ...

    After 15 s without a line it prints what is waited for: `evaluating at step 0: 128 of 256, 20 s`. An explanation is
    added if a process has a problem or has waited for more than half of its deadline (watch/describe.py).
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._progress: tuple[str, int, int] = ("", 0, 0)  # phase, last step, number of evaluations
        self._evaluated: set[tuple[str, int]] = set()  # environment and step
        self._progress_s = 0.0
        self._printed_s = 0.0
        self._is_first = True
        self._num_health_lines = 0
        self._num_alarms = 0
        self._num_findings = 0
        self._num_restarts = 0

    def open(self) -> None:
        return

    def update(self, state: ViewState) -> None:
        now_s, history = state.clock(), state.history
        if self._is_first:  # earlier lines of a resumed run are not printed again
            self._is_first = False
            self._progress = ("", history.last_step, len(history.measured))
            self._evaluated = {(one.env, one.step) for one in history.measured}
            self._num_health_lines = len(history.health)
        for line in self._new_lines(state):
            self._print(line, now_s)
        progress = (state.phase, history.last_step, len(history.measured))
        if progress != self._progress:  # the step may be lower: a resumed trainer repeats lost steps
            self._progress, self._progress_s = progress, now_s
        if now_s - self._printed_s >= WAITING_LINE_EVERY_S:
            waiting = f"{state.status.now or state.phase}, {duration(now_s - self._progress_s)}"
            self._print("; ".join([waiting, *state.status.notes]), now_s)

    def close(self) -> None:
        return

    def _new_lines(self, state: ViewState) -> Iterator[str]:
        history, status = state.history, state.status
        last_phase, last_step, _ = self._progress
        for evaluation in history.measured:
            if (evaluation.env, evaluation.step) in self._evaluated:
                continue
            self._evaluated.add((evaluation.env, evaluation.step))
            name = f" of {evaluation.env}" if evaluation.env else ""
            interval = f"{percent(evaluation.low)} to {percent(evaluation.high)}"
            mean = ""
            if evaluation.mean_score is not None:
                score = with_interval(evaluation.mean_score, evaluation.score_low, evaluation.score_high)
                mean = f", mean score {score}"
            unscored = f", {evaluation.num_unscored} not scored" if evaluation.num_unscored else ""
            shown = f"{percent(evaluation.accuracy)} ({interval}){mean}{unscored}"
            yield f"held-out accuracy{name} at step {evaluation.step}: {shown}"
        for number, step in enumerate(history.steps, start=1):
            if int(step["step"]) > last_step:
                yield _step_line(History(history.steps[:number]), state.config.steps)
        yield from (f"health: {line}" for line in history.health[self._num_health_lines :])
        yield from (f"watchdog: {alarm}" for alarm in status.alarms[self._num_alarms :])
        yield from (f"health: {finding}" for finding in status.findings[self._num_findings :])
        yield from (f"restart: {text}" for text in status.restarts[self._num_restarts :])
        self._num_restarts = len(status.restarts)
        self._num_health_lines = len(history.health)
        self._num_alarms, self._num_findings = len(status.alarms), len(status.findings)
        if state.phase != last_phase:
            yield f"{state.phase}..."

    def _print(self, line: str, now_s: float) -> None:
        print(line, file=self._out, flush=True)
        self._printed_s = now_s


def _step_line(history: History, num_steps: int) -> str:
    """The line of the last step in `history`, without figures that were not measured."""
    figures = [words(value) for key, words in _FIGURES.items() if (value := history.last(key)) is not None]
    parts = [f"step {history.last_step:>3}/{num_steps}", *figures]
    pace = history.mean("perf/step_s")
    if pace is not None and history.last_step < num_steps:
        parts.append(f"{duration(pace * (num_steps - history.last_step))} left")
    return "  ".join(parts)


View = LiveView | PlainView


def choose_view(*, plain: bool) -> View:
    """A live panel on a terminal, unless --plain is given."""
    return PlainView() if plain or not Console().is_terminal else LiveView()


class Screen:
    """Updates a view. It must never end a run: the first error is logged, and the view stops."""

    def __init__(self, view: View, state: ViewState, refresh: Callable[[ViewState], None]) -> None:
        self._view: View | None = view
        self._state = state
        self._refresh = refresh

    def __enter__(self) -> Screen:
        self._try(lambda view: view.open())
        return self

    def __exit__(self, *_: object) -> None:
        self._try(lambda view: view.close())

    def tick(self) -> None:
        def show(view: View) -> None:
            self._refresh(self._state)
            view.update(self._state)

        self._try(show)

    def _try(self, act: Callable[[View], None]) -> None:
        if self._view is None:
            return
        try:
            act(self._view)
        except Exception as error:
            failed, self._view = self._view, None
            log.warning("view_stopped", error=repr(error))
            if isinstance(failed, LiveView):
                failed.live.console.show_cursor()


# ---- panel


def draw(state: ViewState) -> RenderableType:
    history = state.history
    accuracy = history.last("rollout/accuracy")
    generated_tok_s = state.status.generated_tok_s
    if generated_tok_s is None:  # the engine does not report
        generated_tok_s = history.last(TOKENS_PER_SECOND["generated"])
    figures = Table.grid(padding=(0, 2), expand=True)
    for _ in range(3):
        figures.add_column(justify="right", style="dim", no_wrap=True)
        figures.add_column(justify="left", no_wrap=True, ratio=1)
    figures.add_row(
        "reward", _number(history.last("reward"), "{:.3f}"),
        "accuracy", _UNKNOWN if accuracy is None else percent(accuracy),
        "generated tokens/s", _number(generated_tok_s, "{:,.0f}"),
    )  # fmt: skip
    figures.add_row(
        "queue", _UNKNOWN if state.num_queued is None else f"{state.num_queued} groups",
        "staleness", _number(history.last("sample/staleness_mean"), "{:.1f}"),
        "trained tokens/s", _number(history.last(TOKENS_PER_SECOND["trained"]), "{:,.0f}"),
    )  # fmt: skip
    figures.add_row("memory", gigabytes(state.memory_bytes) if state.memory_bytes else _UNKNOWN)
    lines: list[RenderableType] = [_progress(state), *_work(state.status), Text(), figures, _seconds(history)]
    rewards = history.values("reward")
    if rewards:
        ends = f"  {rewards[0]:.3f} → {rewards[-1]:.3f}"
        lines.append(Text.assemble(("reward per step    ", "dim"), (sparkline(rewards), "green"), ends))
    if history.evaluations:
        shown = [history.evaluations[0], *history.evaluations[1:][-2:]]
        scores = "  →  ".join(_number(evaluation.mean_score, "{:.3f}") for evaluation in shown)
        lines.append(Text.assemble(("held-out accuracy  ", "dim"), (_accuracies(history.evaluations), "bold")))
        lines.append(Text.assemble(("held-out score     ", "dim"), scores))
        if shown[-1].num_unscored:
            lines.append(Text(f"! {shown[-1].num_unscored} held-out answers could not be scored", style="yellow"))
    for label, evaluations in history.by_env.items():
        if evaluations:
            lines.append(Text.assemble((f"  {label:<17}", "dim"), _accuracies(evaluations)))
    # Older lines that were not repeated no longer apply.
    recent = [line for line in history.health if line.step > history.last_step - NUM_STEPS_SHOWN]
    lines += [Text(f"! {line}", style="yellow") for line in recent[-2:]]
    if state.status.standings:
        lines += [Text(), _processes(state.status.standings)]
    lines += [Text(f"! {finding}", style="yellow") for finding in state.status.findings[-NUM_ALARMS_SHOWN:]]
    restarts = [text.partition("\n")[0] for text in state.status.restarts[-NUM_ALARMS_SHOWN:]]
    lines += [Text(f"! {line}", style="yellow") for line in restarts]
    lines += [Text(f"! {alarm}", style="red") for alarm in state.status.alarms[-NUM_ALARMS_SHOWN:]]
    # rich cuts the end of a long title.
    about = f"  {state.config.task_name}  {model_name(state.config.model)}"
    name = Text.assemble((state.run_name, "bold"), about)
    return Panel(Group(*lines), title=name, title_align="left", subtitle=state.how_to_leave, subtitle_align="right")


def time_left_s(history: History, num_steps: int) -> float | None:
    """From the mean of the last ten steps: steps become faster when completions become shorter."""
    recent = history.values("perf/step_s")[-10:]
    return sum(recent) / len(recent) * max(0, num_steps - history.last_step) if recent else None


def _progress(state: ViewState) -> RenderableType:
    num_steps, done = state.config.steps, state.history.last_step
    left = time_left_s(state.history, num_steps)
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    times = duration(state.clock() - state.begun)
    if left is not None and done < num_steps:
        times += f", {duration(left)} left"
    row.add_row(f"step {done}/{num_steps}", ProgressBar(total=num_steps, completed=done), times)
    return Group(Text(state.phase, style="cyan"), row)


def _seconds(history: History) -> Text:
    """Seconds of the last step by part; groups are generated in parallel, and may take longer than a step."""
    parts = [
        f"{word} {value:.1f}" for word, keys in SECONDS_PER_STEP.items() if (value := history.last(*keys)) is not None
    ]
    if (generation := history.last(GENERATION_S)) is not None:
        parts.append(f"in parallel: generation {generation:.1f}")
    return Text.assemble(("seconds per step   ", "dim"), "   ".join(parts) or _UNKNOWN)


def _accuracies(evaluations: tuple[Evaluation, ...]) -> str:
    """Accuracy of the first evaluation and the last two."""
    shown = [evaluations[0], *evaluations[1:][-2:]]
    return "  →  ".join(f"{percent(evaluation.accuracy)} at step {evaluation.step}" for evaluation in shown)


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


def _processes(standings: tuple[LastReport, ...]) -> RenderableType:
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


def _doing(standing: LastReport) -> Text:
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


# ---- page


@dataclass(frozen=True)
class RunPage:
    hub_url: str
    watch_url: str = field(repr=False)  # the same with an observer's token, where the hub asks for one
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    find_browser: Callable[[], webbrowser.BaseBrowser] = webbrowser.get
    path: str = PAGE_PATH

    def announcement(self, *, opens: bool) -> str:
        """What to tell the user at the start; `opens`: whether they asked for the page to be opened."""
        by_hand = "; no browser was found on this machine: open it by hand" if opens and not self.can_open() else ""
        return f"page: {self.shown_url}{by_hand}"

    def can_open(self) -> bool:
        """Not in a browser without a window, which would take the terminal, unless the user chose it."""
        try:
            browser = self.find_browser()
        except webbrowser.Error:
            return False
        return type(browser) is not webbrowser.GenericBrowser or "BROWSER" in self.environment

    @property
    def shown_url(self) -> str:
        """Without the token, which must not end up in a log."""
        if self.watch_url == self.hub_url:
            return f"{self.hub_url}{self.path}"
        return f"{self.hub_url}/t/TOKEN{self.path} (`treadle token observer` prints TOKEN)"

    def open(self, *, within_s: float = 0.0) -> None:
        """Open it in a thread, because some browsers return only when closed; wait up to `within_s` for the thread."""
        if not self.can_open():
            return
        address = f"{self.watch_url}{self.path}"  # with the token: for the browser alone
        thread = threading.Thread(target=webbrowser.open, args=(address,), name="browser", daemon=True)
        thread.start()
        thread.join(within_s)
