"""What a user sees while a run goes on: a live panel on a terminal, one plain line per step anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live

from treadle.config.schema import RunConfig
from treadle.launch.history import History
from treadle.launch.overseer import Sight
from treadle.launch.panel import Picture, draw
from treadle.launch.wording import duration, percent
from treadle.log import get_logger

log = get_logger("launch")

LONGEST_SILENCE_S = 30.0  # then a plain view says what is waited for


@dataclass
class RunState:
    """Everything a view may show; the launcher keeps it up to date."""

    config: RunConfig
    run_name: str
    history: History = field(default_factory=History)
    phase: str = "starting hub and engine"
    num_queued: int | None = None
    memory_bytes: int = 0
    sight: Sight = field(default_factory=Sight)
    begun: float = field(default_factory=time.monotonic)
    how_to_leave: str = "Ctrl-C stops"
    clock: Callable[[], float] = time.monotonic

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.begun

    def picture(self) -> Picture:
        return Picture(
            self.config,
            self.run_name,
            self.history,
            self.phase,
            self.num_queued,
            self.memory_bytes,
            self.elapsed_s,
            self.sight,
            self.how_to_leave,
        )


class View(Protocol):
    def open(self) -> None: ...
    def update(self, state: RunState) -> None: ...
    def close(self) -> None: ...


def choose_view(*, plain: bool) -> View:
    """A live panel needs a terminal that can be drawn on; --plain refuses it."""
    return PlainView() if plain or not Console().is_terminal else LiveView()


def current_phase(history: History, config: RunConfig) -> str:
    """What the run is doing, told from what it has written: `measuring held-out accuracy before training`."""
    evaluates = config.env.num_eval > 0
    if not history.steps:
        is_waiting = evaluates and history.before is None
        return "measuring held-out accuracy before training" if is_waiting else "collecting the first batch"
    if history.last_step < config.steps:
        return "training"
    return "measuring held-out accuracy after training" if evaluates and history.after is None else "finishing"


class Screen:
    """Keeps a view up to date. It must never end a run: its first problem is logged, then it stays silent."""

    def __init__(self, view: View, state: RunState, refresh: Callable[[RunState], None]) -> None:
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
            broken, self._view = self._view, None
            log.warning("view_stopped", error=repr(error))
            if isinstance(broken, LiveView):
                broken.restore_terminal()


class LiveView:
    """A panel that is redrawn in place, about three times a second."""

    def __init__(self, console: Console | None = None, *, interval_s: float = 0.3) -> None:
        self._live = Live(console=console or Console(), auto_refresh=False, transient=True)
        self._interval_s = interval_s
        self._next_draw = 0.0

    def open(self) -> None:
        self._live.start()

    def update(self, state: RunState) -> None:
        if time.monotonic() >= self._next_draw:
            self._live.update(draw(state.picture()), refresh=True)
            self._next_draw = time.monotonic() + self._interval_s

    def close(self) -> None:
        self._live.stop()

    def restore_terminal(self) -> None:
        """Give the cursor back, whatever broke."""
        self._live.console.show_cursor()


class PlainView:
    """`step 12/50  reward 0.31  accuracy 28 %  412 tokens/s  ...`, for files, pipes and small terminals."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._last_phase = ""
        self._last_step: int | None = None
        self._num_evaluations: int | None = None
        self._num_health_lines = 0
        self._num_alarms = 0
        self._num_findings = 0
        self._silent_since_s: float | None = None

    def open(self) -> None:
        return

    def update(self, state: RunState) -> None:
        history = state.history
        if self._last_step is None:  # a resumed run does not tell its past again
            self._last_step, self._num_evaluations = history.last_step, len(history.evaluations)
            self._num_health_lines = len(history.health)
        for evaluation in history.evaluations[self._num_evaluations :]:
            interval = f"{percent(evaluation.low)} to {percent(evaluation.high)}"
            self._say(f"held-out accuracy at step {evaluation.step}: {percent(evaluation.accuracy)} ({interval})")
        self._num_evaluations = len(history.evaluations)
        for number, step in enumerate(history.steps, start=1):
            if int(step["step"]) > self._last_step:
                self._say(_step_line(History(history.steps[:number]), state.config.steps))
        for line in history.health[self._num_health_lines :]:
            self._say(f"health: {line}")
        self._num_health_lines = len(history.health)
        for alarm in state.sight.alarms[self._num_alarms :]:
            self._say(f"watchdog: {alarm}")
        self._num_alarms = len(state.sight.alarms)
        for finding in state.sight.findings[self._num_findings :]:
            self._say(f"health: {finding}")
        self._num_findings = len(state.sight.findings)
        self._last_step = history.last_step  # may go back: a resumed trainer takes lost steps again
        if state.phase != self._last_phase:
            self._say(f"{state.phase}...")
            self._last_phase = state.phase
        if self._silent_since_s is None:
            self._silent_since_s = state.clock()
        elif state.sight.notes and state.clock() - self._silent_since_s > LONGEST_SILENCE_S:
            self._say(f"{state.phase}: {'; '.join(state.sight.notes)}")

    def close(self) -> None:
        return

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)
        self._silent_since_s = None  # the silence begins anew


def _step_line(history: History, num_steps: int) -> str:
    """The line of the last step in `history`; a figure that was not measured is left out."""
    parts = [f"step {history.last_step:>3}/{num_steps}"]
    for key, text in (
        ("reward", "reward {:.3f}"),
        ("perf/trained_tok_s_wall_clock", "{:.0f} tokens/s"),
        ("perf/step_s", "{:.1f} s"),
        ("sample/staleness_mean", "age {:.1f}"),
    ):
        value = history.last(key)
        if value is not None:
            parts.append(text.format(value))
    accuracy = history.last("rollout/accuracy")
    if accuracy is not None:
        parts.insert(2, f"accuracy {percent(accuracy)}")
    pace = history.mean("perf/step_s")
    if pace is not None and history.last_step < num_steps:
        parts.append(f"{duration(pace * (num_steps - history.last_step))} left")
    return "  ".join(parts)
