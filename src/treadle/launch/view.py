"""Show the progress of a run: a live panel on a terminal, plain lines anywhere else, and the address of its page."""

from __future__ import annotations

import os
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live

from treadle.config.schema import RunConfig
from treadle.formatting import duration, percent
from treadle.launch.monitor import RunStatus
from treadle.launch.panel import Snapshot, draw
from treadle.log import get_logger
from treadle.report.history import TOKENS_PER_SECOND, History

log = get_logger("launch")

WAITING_LINE_EVERY_S = 15.0
PAGE_PATH = "/dash/"
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

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.begun

    def snapshot(self) -> Snapshot:
        return Snapshot(
            self.config,
            self.run_name,
            self.history,
            self.phase,
            self.num_queued,
            self.memory_bytes,
            self.elapsed_s,
            self.status,
            self.how_to_leave,
        )


class View(Protocol):
    def open(self) -> None: ...
    def update(self, state: ViewState) -> None: ...
    def close(self) -> None: ...


def choose_view(*, plain: bool) -> View:
    """A live panel on a terminal, unless --plain is given."""
    return PlainView() if plain or not Console().is_terminal else LiveView()


def current_phase(history: History, config: RunConfig) -> str:
    """What the run is doing, from its files: `measuring held-out accuracy before training`."""
    evaluates = any(env.num_eval > 0 for env in config.environments)
    if not history.steps:
        is_waiting = evaluates and history.before is None
        return "measuring held-out accuracy before training" if is_waiting else "collecting the first batch"
    if history.last_step < config.steps:
        return "training"
    return "measuring held-out accuracy after training" if evaluates and history.after is None else "finishing"


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
                failed.restore_terminal()


class LiveView:
    """A panel that is redrawn in place about three times a second."""

    def __init__(self, console: Console | None = None, *, interval_s: float = 0.3) -> None:
        self._live = Live(console=console or Console(), auto_refresh=False, transient=True)
        self._interval_s = interval_s
        self._next_draw = 0.0

    def open(self) -> None:
        self._live.start()

    def update(self, state: ViewState) -> None:
        if time.monotonic() >= self._next_draw:
            self._live.update(draw(state.snapshot()), refresh=True)
            self._next_draw = time.monotonic() + self._interval_s

    def close(self) -> None:
        self._live.stop()

    def restore_terminal(self) -> None:
        """Show the cursor again after an error."""
        self._live.console.show_cursor()


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
            mean = "" if evaluation.mean_score is None else f", mean score {evaluation.mean_score:.3f}"
            shown = f"{percent(evaluation.accuracy)} ({interval}){mean}"
            yield f"held-out accuracy{name} at step {evaluation.step}: {shown}"
        for number, step in enumerate(history.steps, start=1):
            if int(step["step"]) > last_step:
                yield _step_line(History(history.steps[:number]), state.config.steps)
        yield from (f"health: {line}" for line in history.health[self._num_health_lines :])
        yield from (f"watchdog: {alarm}" for alarm in status.alarms[self._num_alarms :])
        yield from (f"health: {finding}" for finding in status.findings[self._num_findings :])
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
        thread = threading.Thread(target=webbrowser.open, args=(self.address(),), name="browser", daemon=True)
        thread.start()
        thread.join(within_s)

    def address(self) -> str:
        """With the token: for the browser alone."""
        return f"{self.watch_url}{self.path}"
