"""Start the processes of a plan, watch them, and stop them in order.

start some -> wait until ready -> start the rest -> watch ----> complete ----> stop
                     |                               |                          ^
                     +-- one dies: its last words ---+-- Ctrl-C ----------------+
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, MappingProxyType

from treadle.clock import awake_s
from treadle.launch.plan import ProcessSpec
from treadle.launch.ports import Listeners
from treadle.launch.process import ChildProcess

# Who is waited for in which order, and for how many seconds. The trainer has by far the longest, because it saves a
# checkpoint, and a large one takes its time on a slow disk; whoever is left then is killed.
STOP_ORDER = (("trainer", 300.0), ("env", 1.0), ("engine", 1.0), ("hub", 0.6))
_OTHERS_S = 1.0
SAY_EVERY_S = 15.0
_POLL_S = 0.1
_READY_POLL_S = 0.25


class StopRequest:
    """Counts Ctrl-C and SIGTERM. Only a number changes in the handler, so it can interrupt anything."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # only that one may have handlers
            yield
            return
        kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {kind: signal.signal(kind, self._note) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


class Stopped(Exception):
    """Not an error: the user asked to stop. The children are still running."""


class Supervisor:
    """Owns the children of one run.

    with Supervisor(stop, on_tick=view.update) as supervisor:
        supervisor.start(plan.processes[:2])
        supervisor.start(plan.processes[2:])
        supervisor.watch(is_trained=lambda: True)
    """

    def __init__(
        self,
        stop: StopRequest,
        *,
        on_tick: Callable[[], None] = lambda: None,
        stop_order: Sequence[tuple[str, float]] = STOP_ORDER,
        grace_s: float = 120.0,
        listeners: Listeners = MappingProxyType({}),
        on_wait: Callable[[str], None] = lambda _: None,
        say_every_s: float = SAY_EVERY_S,
    ) -> None:
        """`listeners`: held for the servers among the children, by their names; handed over at their start."""
        self._stop = stop
        self._on_tick = on_tick
        self._stop_order = stop_order
        self._grace_s = grace_s
        self._listeners = listeners
        self._on_wait = on_wait
        self._say_every_s = say_every_s
        self._children: dict[str, ChildProcess] = {}

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    @property
    def pids(self) -> Mapping[str, int]:
        return {name: child.pid for name, child in dict(self._children).items()}  # a copy: threads may ask

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Start these together and return when each of them is ready."""
        begun = awake_s()
        waiting = []
        for spec in specs:
            self._children[spec.name] = ChildProcess(spec, self._listeners.get(spec.name))
            waiting.append(self._children[spec.name])
        next_look = begun
        while waiting:
            self._tick()
            if awake_s() >= next_look:
                waiting = [child for child in waiting if not child.is_ready()]
                next_look = awake_s() + _READY_POLL_S
            late = [c for c in waiting if awake_s() - begun > c.spec.ready_timeout_s]
            if late:
                raise late[0].death(f"was not ready after {late[0].spec.ready_timeout_s:.0f} s")

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Return when `is_over`, or when a process has ended well; raise when one ends badly or too early."""
        while not is_over() and not self._tick():
            pass

    def watch(self, is_trained: Callable[[], bool] = lambda: True) -> None:
        """Return when every worker has ended well; raise when any process ends badly or too early.

        `is_trained` says whether the trainer has taken all its steps; an exit code 0 alone does not.
        """
        first_end: float | None = None
        while True:
            ended = self._tick()
            workers = [child for child in self._children.values() if not child.spec.serves]
            if any(child.spec.name == "trainer" for child in ended) and not is_trained():
                raise self._children["trainer"].death("ended before its last step")
            if len(ended) == len(workers):
                return
            if ended and first_end is None:
                first_end = awake_s()
            # The last evaluation may take its time; a trainer without an environment can only wait for ever.
            starved = ended and all(child.spec.name != "trainer" for child in ended)
            if starved and first_end is not None and awake_s() - first_end > self._grace_s:
                raise ended[0].death("ended while the trainer still needed it")

    def shut_down(self) -> None:
        """Stop everything in order; a further Ctrl-C kills what is left at once."""
        if not self._children:
            return
        patience = self._stop.count
        for name in self._children:  # all at once: the trainer saves faster when nobody asks the engine
            if name == "trainer" or name.partition("-")[0] == "env":  # "env", or of several "env-gsm8k"
                self._children[name].terminate()
        named = [name for name, _ in self._stop_order]
        others = [(name, _OTHERS_S) for name in self._children if name not in named]
        try:
            for name, limit_s in [*others, *self._stop_order]:
                child = self._children.get(name)
                if child is not None:
                    child.terminate()
                    self._wait_for_end(child, limit_s, patience)
        finally:
            for child in self._children.values():
                child.kill()

    def _wait_for_end(self, child: ChildProcess, limit_s: float, patience: int) -> None:
        begun = said_at = awake_s()
        while child.poll() is None and awake_s() - begun < limit_s and self._stop.count == patience:
            time.sleep(0.02)
            if awake_s() - said_at > self._say_every_s:
                said_at = awake_s()
                self._on_wait(f"waiting for the {child.spec.name} to end, {said_at - begun:.0f} s")

    def _tick(self) -> list[ChildProcess]:
        """Rest for a moment, let the view draw, then look after everybody; those that have ended well.

        What is found here is what the caller acts on: a second look could find somebody newly dead.
        """
        time.sleep(_POLL_S)
        self._on_tick()
        if self._stop.count:
            raise Stopped
        ended = [child for child in self._children.values() if child.poll() is not None]
        for child in ended:
            if child.poll() != 0:
                raise child.death()
            if child.spec.serves:
                raise child.death("ended before its time")
        return ended
