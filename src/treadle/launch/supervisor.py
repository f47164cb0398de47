"""Start the processes of a plan, watch them, and stop them in order.

start some -> wait until ready -> start the rest -> watch ----> complete ----> stop
                     |                               |                          ^
                     +-- one dies: end of its log ---+-- Ctrl-C ----------------+
                         (trainer ranks and engines of a fleet: restarts.py)
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from treadle.background import awake_s
from treadle.errors import ProcessDied
from treadle.launch.child_process import ChildProcess, describe_exit
from treadle.launch.placement import LocalPlacement, Placement
from treadle.launch.process_spec import ProcessSpec
from treadle.launch.restarts import (
    RANKS_END_S,
    SETTLE_S,
    EngineRestarts,
    Replacements,
    TrainerRestarts,
    first_of,
    with_rendezvous,
)
from treadle.net.probe import answers_ok

# Order of waiting for the end of processes, and seconds for each; what is left then is killed. The trainer has the
# most, because it saves a checkpoint, and a large one takes long on a slow disk.
STOP_ORDER = (("trainer", 300.0), ("env", 1.0), ("router", 1.0), ("engine", 1.0), ("hub", 0.6))
_OTHERS_S = 1.0
MACHINE_WAIT_S = 600.0  # for another machine in place of a lost one
SAY_EVERY_S = 15.0
_POLL_S = 0.1
_READY_POLL_S = 0.25
_READY_ANSWER_S = 0.5  # short, because the launcher waits for it: the port is open before the server answers


def _no_machine(spec: ProcessSpec) -> ProcessDied:
    return ProcessDied(
        f"the machine of {spec.name} was lost, and no other one was found within {MACHINE_WAIT_S:.0f} s",
        fix="continue with treadle run --resume when the cluster has a free machine",
    )


class StopRequest:
    """Counts SIGINT, SIGTERM and SIGHUP. The handler only changes a number, so it is safe at any time."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
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
    """The user asked to stop; the children are still running. Not an error."""


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
        placement: Placement | None = None,
        on_wait: Callable[[str], None] = lambda _: None,
        say_every_s: float = SAY_EVERY_S,
        restarts: TrainerRestarts | None = None,
        engine_restarts: EngineRestarts | None = None,
        replacements: Replacements | None = None,
    ) -> None:
        """`placement`: where processes are started; None: on this machine. `restarts`: decides whether trainer ranks
        that crashed are started again, `engine_restarts` when engines of a fleet are, and `replacements` whether other
        processes are; None: never."""
        self._stop = stop
        self._on_tick = on_tick
        self._stop_order = stop_order
        self._grace_s = grace_s
        self._placement = placement or LocalPlacement()
        self._on_wait = on_wait
        self._say_every_s = say_every_s
        self._restarts = restarts
        self._engine_restarts = engine_restarts
        self._engine_starts: dict[str, float | None] = {}  # when engines that ended start again; None: never
        self._has_served = False  # whether an engine was ready once
        self._replacements = replacements
        self._children: dict[str, ChildProcess] = {}
        self._displaced: dict[str, tuple[ProcessSpec, float]] = {}  # environments without a machine, and since when

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    @property
    def pids(self) -> Mapping[str, int]:
        """Of the processes on this machine."""
        children = dict(self._children)  # a copy, because other threads read it
        return {name: child.pid for name, child in children.items() if child.pid is not None}

    def reported_pid(self, name: str) -> int | None:
        child = self._children.get(name)
        return None if child is None else child.reported_pid

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Start these together, and return when all are ready; of the engines of a fleet one is enough."""
        begun = awake_s()
        for spec in with_rendezvous(specs):
            self._children[spec.name] = ChildProcess(spec, self._placement)
        waiting = [self._children[spec.name] for spec in specs]
        next_look = begun
        while waiting:
            self._tick()
            # Some may have been started again, and environments may wait for another machine.
            waiting = [self._children[c.spec.name] for c in waiting if c.spec.name in self._children]
            if awake_s() >= next_look:
                urls = {child: child.spec.ready_url for child in waiting}
                is_ready = {c: not url or answers_ok(url, timeout_s=_READY_ANSWER_S) for c, url in urls.items()}
                self._has_served |= any(c.spec.kind == "engine" and ready for c, ready in is_ready.items())
                for child in (c for c, ready in is_ready.items() if ready):
                    child.spec = child.spec.without_first_flags()
                waiting = [c for c, ready in is_ready.items() if not ready and not self._may_be_late(c)]
                next_look = awake_s() + _READY_POLL_S
            late = [c for c in waiting if awake_s() - begun > c.spec.ready_timeout_s]
            if late:
                raise late[0].exit_error(f"was not ready after {late[0].spec.ready_timeout_s:.0f} s")

    def _may_be_late(self, child: ChildProcess) -> bool:
        """Whether `start` need not wait for it: an engine of a fleet that has another one, or that is given up."""
        is_given_up = self._engine_starts.get(child.spec.name, 0.0) is None
        return self._is_of_fleet(child) and (self._has_served or is_given_up)

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Return when `is_over` or when a worker has ended with exit code 0; raise if a process fails or ends early."""
        while not is_over() and not self._tick():
            pass

    def watch(self, is_trained: Callable[[], bool] = lambda: True) -> None:
        """Return when every worker has ended with exit code 0; raise if a process fails or ends too early.

        `is_trained` says whether the trainer has taken all its steps; exit code 0 does not prove that.
        """
        first_end: float | None = None
        while True:
            ended = self._tick()
            workers = [child for child in self._children.values() if not child.spec.serves]
            trainers = [child for child in ended if child.spec.kind == "trainer"]
            if trainers and not is_trained():
                raise trainers[0].exit_error("ended before its last step")
            if len(ended) == len(workers):
                return
            if ended and first_end is None:
                first_end = awake_s()
            # A trainer whose environment has ended would wait for ever; its last steps may take a while.
            starved = ended and not trainers
            if starved and first_end is not None and awake_s() - first_end > self._grace_s:
                raise ended[0].exit_error("ended while the trainer still needed it")

    def shut_down(self) -> None:
        """Stop everything in order; a further Ctrl-C kills what is left at once."""
        if not self._children:
            return
        num_requests = self._stop.count
        for child in self._children.values():  # together: ranks save faster while no environment uses the engine
            if child.spec.kind in ("trainer", "env"):
                child.terminate()
        limits = dict(self._stop_order)
        others = [child for child in self._children.values() if child.spec.kind not in limits]
        in_order = [child for kind in limits for child in self._children.values() if child.spec.kind == kind]
        try:
            for child in [*others, *in_order]:
                child.terminate()
                self._wait_for_end(child, limits.get(child.spec.kind, _OTHERS_S), num_requests)
        finally:
            for child in self._children.values():
                child.kill()

    def _wait_for_end(self, child: ChildProcess, limit_s: float, num_requests: int) -> None:
        begun = said_at = awake_s()
        while child.poll() is None and awake_s() - begun < limit_s and self._stop.count == num_requests:
            time.sleep(0.02)
            if awake_s() - said_at > self._say_every_s:
                said_at = awake_s()
                self._on_wait(f"waiting for the {child.spec.name} to end, {said_at - begun:.0f} s")

    def _tick(self) -> list[ChildProcess]:
        """Sleep, update the view, then poll every process. Returns those that have ended with exit code 0.

        Callers use this list instead of polling again, which could find another end.
        """
        self._pause()
        self._start_displaced()
        ended = [child for child in self._children.values() if child.poll() is not None]
        ended = [child for child in ended if not self._starts_again(child)]
        crashed = [c for c in ended if c.spec.kind != "trainer" and (c.poll() != 0 or c.spec.serves)]
        if crashed:
            self._replace(crashed)
            return []
        if any(child.poll() != 0 for child in ended):  # only of the trainer by now
            self._restart_trainer()
            return [child for child in ended if child.spec.kind != "trainer"]
        return ended

    def _pause(self) -> None:
        time.sleep(_POLL_S)
        self._on_tick()
        if self._stop.count:
            raise Stopped

    def _starts_again(self, child: ChildProcess) -> bool:
        """Whether this child that has ended is an engine of a fleet, which starts again, now or later, or is given up
        while others serve. Raises why it ended if it is the last one, or refused its settings before any has served."""
        name = child.spec.name
        if self._engine_restarts is None or not self._is_of_fleet(child):
            return False
        if name not in self._engine_starts:
            if not self._has_served and not child.rank_end().is_crash:
                raise child.exit_error()
            pause_s = self._engine_restarts.pause_s(name, child.reported_pid, describe_exit(child.poll()))
            self._engine_starts[name] = None if pause_s is None else awake_s() + pause_s
            engines = [other.spec.name for other in self._children.values() if other.spec.kind == "engine"]
            is_last = all(self._engine_starts.get(engine, 0.0) is None for engine in engines)
            if is_last and not self._engine_restarts.has_joined():
                raise child.exit_error(note=", and no other engine serves")
        due_s = self._engine_starts[name]
        if due_s is not None and awake_s() >= due_s and self._placement.has_machine(child.spec):
            del self._engine_starts[name]
            is_here = child.pid is not None
            spec = self._engine_restarts.at_free_port(child.spec) if is_here else child.spec
            self._children[name] = ChildProcess(spec, self._placement)
        return True

    def _is_of_fleet(self, child: ChildProcess) -> bool:
        """Whether it is an engine of a fleet: it starts again by itself, and the trainer stays."""
        return self._engine_restarts is not None and child.spec.kind == "engine"

    def _replace(self, crashed: list[ChildProcess]) -> None:
        """Start processes again that are no trainers; raises why the first ended, if that is refused.

        A new engine has the weights of its model: the trainer starts again too (also one that has ended well) and
        publishes, then the environments. Their own ends may follow from that of the engine, so they do not count.
        """
        is_engine = any(child.spec.kind == "engine" for child in crashed)
        causes = [child for child in crashed if child.spec.kind != "env" or not is_engine]
        replacements, first = self._replacements, causes[0]
        refusal = "" if replacements is None else replacements.refusal([child.rank_end() for child in causes])
        if replacements is None or refusal:
            why = "" if first.poll() != 0 else "ended before its time"
            raise first.exit_error(why, f", not started again: {refusal}" if refusal else "")
        running = [child for child in self._children.values() if child not in crashed]
        callers = [c for c in running if c.spec.kind == "trainer" or (c.spec.kind == "env" and c.poll() is None)]
        again = [*crashed, *(callers if is_engine else ())]
        for child in again:
            child.kill()
            del self._children[child.spec.name]
        specs = [child.spec for child in again]
        if is_engine:
            specs += [spec for spec, _ in self._displaced.values()]
            self._displaced.clear()
        self._wait_for_machines(spec for spec in specs if spec.kind != "env")
        self.start([spec for spec in specs if spec.kind not in ("trainer", "env")])
        self.start([spec for spec in specs if spec.kind == "trainer"])
        if is_engine:
            self.wait(replacements.has_published)
        self._displaced |= {spec.name: (spec, awake_s()) for spec in specs if spec.kind == "env"}
        self._start_displaced()

    def _start_displaced(self) -> None:
        """Start the environments for which there is a machine again; the others wait, and the run goes on."""
        for spec, since_s in list(self._displaced.values()):
            if self._placement.has_machine(spec):
                del self._displaced[spec.name]
                self._children[spec.name] = ChildProcess(spec, self._placement)
            elif awake_s() - since_s > MACHINE_WAIT_S and not self._has_environment():
                raise _no_machine(spec)

    def _has_environment(self) -> bool:
        return any(child.spec.kind == "env" and child.poll() is None for child in self._children.values())

    def _wait_for_machines(self, specs: Iterable[ProcessSpec]) -> None:
        """Return when there is a machine for each of these, without which the run cannot go on."""
        began, missing = awake_s(), list(specs)
        while missing := [spec for spec in missing if not self._placement.has_machine(spec)]:
            if awake_s() - began > MACHINE_WAIT_S:
                raise _no_machine(missing[0])
            self._pause()

    def _restart_trainer(self) -> None:
        """Start all ranks again after one has failed; raises why the first failed, if that is refused."""
        ranks = {child.spec.name: child for child in self._children.values() if child.spec.kind == "trainer"}
        failed = self._wait_for_ranks(list(ranks.values()))
        for child in ranks.values():
            child.kill()
        for child in self._children.values():  # its end may be what the ranks failed by
            if child.poll() and child not in failed and child.spec.name not in ranks and not self._is_of_fleet(child):
                if self._replacements is None:
                    raise child.exit_error()
                return  # it is replaced next, and with an engine the ranks; else they are looked at again
        ends = [child.rank_end() for child in failed]
        first = ranks[first_of(ends).name]
        refusal = "restarts are off" if self._restarts is None else self._restarts.refusal(ends, len(ranks))
        if refusal:
            raise first.exit_error(note=f", not started again: {refusal}" if self._restarts else "")
        self._wait_for_machines(child.spec for child in ranks.values())
        for spec in with_rendezvous(child.spec for child in ranks.values()):
            self._children[spec.name] = ChildProcess(spec, self._placement)

    def _wait_for_ranks(self, ranks: Sequence[ChildProcess]) -> list[ChildProcess]:
        """The ranks that failed by themselves, in the order in which their ends were seen. Other processes have
        SETTLE_S to end too: what took them down may have taken down the trainer."""
        begun, failed = awake_s(), []
        while True:
            failed += [rank for rank in ranks if rank.poll() and rank not in failed]
            have_ended = all(rank.poll() is not None for rank in ranks)
            if awake_s() - begun > (SETTLE_S if have_ended else RANKS_END_S):
                return failed
            self._pause()
