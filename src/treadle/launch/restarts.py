"""Decide about restarts of trainer ranks, engines of a fleet and other processes; find a port where ranks meet.

one rank dies ──> its connections close ──> the others end with an error, or are killed after RANKS_END_S
              ──> all ranks start again from the last checkpoint, at most `max_restarts` times in a run

one server or environment dies ──> it starts again; with an engine the ranks too, which publish to it

Nothing is restarted after an error that has a remedy, after a lack of memory, or when it crashes again before a further
step was taken.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from treadle.errors import is_out_of_memory
from treadle.formatting import counted
from treadle.launch.machine import find_port, is_port_busy
from treadle.launch.process_spec import ProcessSpec

RANKS_END_S = 10.0  # for the other ranks to end by themselves
SETTLE_S = 0.5
MAX_FAILED_STARTS = 6  # of an engine, in a row
LONGEST_PAUSE_S = 30.0
NUM_QUOTED_LINES = 5
_USER_ERROR_CODE = 2
_LOST_OTHERS = re.compile(r"^rank \d+ of \d+ (lost (the others|rank)|did not find the others)\b")
_CLOSED = re.compile(r"Connection (closed|reset) by peer")  # an error of torch that nobody has translated


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended; `message`: its own error message, "" without one; `exit`: the exit code in words."""

    name: str
    code: int
    message: str = ""
    exit: str = ""
    last_lines: tuple[str, ...] = ()

    @property
    def is_victim(self) -> bool:
        """It ended because another rank did."""
        is_cut_off = not self.message and self.code > 0 and any(map(_CLOSED.search, self.last_lines[-3:]))
        return is_cut_off or bool(_LOST_OTHERS.match(self.message))

    @property
    def is_crash(self) -> bool:
        """It was ended by a signal or an error without a remedy; a new start may succeed."""
        if self.code == _USER_ERROR_CODE or is_out_of_memory("\n".join((self.message, *self.last_lines))):
            return False
        return self.code < 0 or not self.message or self.is_victim


def first_of(ends: Sequence[RankEnd]) -> RankEnd:
    """The rank that ended first; `ends` are in the order in which the ends were seen.

    >>> lost = "rank 0 of 2 lost the others while adding up the gradients: closed"
    >>> first_of([RankEnd("trainer", 1, lost), RankEnd("trainer-1", -9)]).name
    'trainer-1'
    """
    return next((end for end in ends if not end.is_victim), ends[0])


@dataclass(frozen=True)
class Progress:
    """The last step in the metrics, and the step of the newest checkpoint."""

    step: int
    checkpoint: int

    def has_moved_since(self, earlier: Progress) -> bool:
        """Whether steps were taken between two crashes. After a restart, metrics continue from the checkpoint.

        >>> Progress(7, 4).has_moved_since(Progress(7, 4)), Progress(6, 4).has_moved_since(Progress(7, 4))
        (False, True)
        """
        return (
            self.step > earlier.step
            or self.checkpoint > earlier.checkpoint
            or earlier.checkpoint < self.step < earlier.step
        )


class TrainerRestarts:
    """Counts the restarts of a run and decides about the next. `say` gets a line about
    each, and below it the last lines of the log of the rank that ended first."""

    def __init__(self, max_restarts: int, progress: Callable[[], Progress], say: Callable[[str], None]) -> None:
        self._max_restarts = max_restarts
        self._progress = progress
        self._say = say
        self._last: Progress | None = None
        self._num_restarts = 0

    def refusal(self, ends: Sequence[RankEnd], num_ranks: int) -> str:
        """Why the ranks are not started again; "": they are, and it is announced."""
        first, now = first_of(ends), self._progress()
        if not first.is_crash:
            return "a new start would end in the same way"
        if self._max_restarts == 0:
            return "--max-restarts is 0"
        restarts = counted(self._num_restarts, "restart")
        if self._num_restarts >= self._max_restarts:
            return f"it crashed again after {restarts} (--max-restarts {self._max_restarts})"
        if self._last is not None and not now.has_moved_since(self._last):
            return f"it crashed again after {restarts}, before it had taken a further step"
        self._last = now
        self._num_restarts += 1
        quoted = [f"\n  | {line}" for line in first.last_lines[-NUM_QUOTED_LINES:]]
        self._say("".join([self._line(first, num_ranks, now), *quoted]))
        return ""

    def _line(self, first: RankEnd, num_ranks: int, now: Progress) -> str:
        what = "the trainer starts" if num_ranks == 1 else f"all {num_ranks} ranks start"
        start_point = f"the checkpoint of step {now.checkpoint}" if now.checkpoint else "step 0, without a checkpoint"
        reason = first.message.partition("\n")[0] or first.exit
        return (
            f"{first.name} died after step {now.step}: {reason}; {what} again from {start_point} "
            f"(restart {self._num_restarts} of {self._max_restarts})"
        )


# ---- engines


class EngineRestarts:
    """When to start an engine of a fleet again that has ended. The pause grows while it ends again before it has
    loaded its model; the run goes on with the other engines, and waits if there are none. `say` gets a line about each;
    `has_loaded`: whether the engine of this name and pid (None: not known) ever had; `has_joined`: whether an
    engine that the run did not start serves it, asked when all of its own are given up."""

    def __init__(
        self,
        say: Callable[[str], None],
        has_loaded: Callable[[str, int | None], bool],
        has_joined: Callable[[], bool] = lambda: False,
    ) -> None:
        self.has_joined = has_joined
        self._say = say
        self._has_loaded = has_loaded
        self._num_failed: dict[str, int] = {}  # starts in a row

    def pause_s(self, name: str, pid: int | None, end: str) -> float | None:
        """Seconds until its next start; None: it is not started again."""
        failed = 0 if self._has_loaded(name, pid) else self._num_failed.get(name, 0) + 1
        self._num_failed[name] = failed
        if failed >= MAX_FAILED_STARTS:
            self._say(f"{name} ended {failed} times in a row before it had loaded ({end}); it is not started again")
            return None
        pause_s = min(2.0**failed, LONGEST_PAUSE_S)
        self._say(f"{name} ended ({end}); it starts again in {pause_s:.0f} s, receives the weights and is verified")
        return pause_s

    def at_free_port(self, spec: ProcessSpec) -> ProcessSpec:
        """The engine at another port if a program of this machine has taken its own since."""
        url = urlsplit(spec.ready_url or "")
        host, port = url.hostname, url.port
        if not spec.may_move or host is None or port is None or not is_port_busy(host, port):
            return spec
        free = find_port(host)
        self._say(f"port {port} of {spec.name} is in use by another program; it starts at {free}")
        return spec.at_port(free)


# ---- other processes, and engines without a fleet


class Replacements:
    """Counts the restarts of environments, engine, hub and router, each its own, by the same rules. `say` gets the name
    of the process and a line; `has_published`: whether the trainer that runs now has published its weights."""

    def __init__(
        self,
        max_restarts: int,
        progress: Callable[[], Progress],
        say: Callable[[str, str], None],
        has_published: Callable[[], bool],
    ) -> None:
        self.has_published = has_published
        self._max_restarts = max_restarts
        self._progress = progress
        self._say = say
        self._first = progress()  # when this session began
        self._last: dict[str, Progress] = {}
        self._num_restarts: Counter[str] = Counter()

    def refusal(self, ends: Sequence[RankEnd]) -> str:
        """Why the processes are not started again; "": they are, and it is announced."""
        now = self._progress()
        for end in ends:
            restarts = counted(self._num_restarts[end.name], "restart")
            if not end.is_crash:
                return "a new start would end in the same way"
            if self._max_restarts == 0:
                return "--max-restarts is 0"
            if self._num_restarts[end.name] >= self._max_restarts:
                return f"{end.name} ended again after {restarts} (--max-restarts {self._max_restarts})"
            # An error of Python repeats itself; a process that was killed by a signal starts once without a step.
            last = self._last.get(end.name, self._first if end.code > 0 else None)
            if last is not None and not now.has_moved_since(last):
                return f"{end.name} ended after {restarts}, before a further step was taken"
        for end in ends:
            self._last[end.name] = now
            self._num_restarts[end.name] += 1
            count = f"restart {self._num_restarts[end.name]} of {self._max_restarts}"
            reason = end.message.partition("\n")[0] or end.exit
            self._say(end.name, f"{end.name} died after step {now.step}: {reason}; it starts again ({count})")
        return ""


# ---- where ranks meet


def with_rendezvous(specs: Iterable[ProcessSpec]) -> list[ProcessSpec]:
    """The processes with a port that is free now, at which their ranks find each other."""
    specs = list(specs)
    if sum(spec.kind == "trainer" for spec in specs) < 2:
        return specs
    port = {"MASTER_PORT": str(find_port("127.0.0.1"))}
    return [replace(spec, env={**spec.env, **port}) if spec.kind == "trainer" else spec for spec in specs]
