"""Observe a live run: its processes, its engine and the length of its queue."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from treadle.config.env import process_of
from treadle.config.section import HUB_TABLE
from treadle.dash.run_folder import CONFIG_FILE, RunFolder
from treadle.dash.status import EngineStatus
from treadle.net.probe import get_json
from treadle.store import ReadFailed, Store, groups
from treadle.wire.bridge import TOKEN_VARIABLE

if TYPE_CHECKING:
    import psutil  # type: ignore[import-untyped]

SAMPLE_EVERY_S = 2.0
MAX_SAMPLES = 2_000
ROLES = {"hub": "hub", "engine": "engine", "env": "env", "train": "trainer"}  # verb on the command line -> process name
RANK_FLAG = "--trainer-rank"  # of a rank other than 0
NAME_FLAG = "--name"
LOOK_EVERY_S = 1.0
FIND_EVERY_S = 5.0  # listing all processes of a large machine takes a good part of a second
ENGINE_TIMEOUT_S = 0.5


class QueueSample(msgspec.Struct, frozen=True):
    at: float  # Unix time
    queued: int  # groups waiting
    leased: int  # groups in training


@dataclass
class BoundedSamples:
    """A bounded number of samples over any time span: when full, every second one is dropped.

    >>> history = BoundedSamples(max_samples=4)
    >>> for second in range(9):
    ...     history.add(QueueSample(second, second, 0))
    >>> [sample.at for sample in history.samples]
    [0, 2, 4, 6, 8]
    """

    max_samples: int = MAX_SAMPLES
    samples: list[QueueSample] = field(default_factory=list)
    _every: int = 1
    _num_seen: int = 0

    def add(self, sample: QueueSample) -> None:
        if self._num_seen % self._every == 0:
            if len(self.samples) > self.max_samples:
                self.samples = self.samples[::2]
                self._every *= 2
            if self._num_seen % self._every == 0:
                self.samples.append(sample)
        self._num_seen += 1


class QueueHistory:
    """Samples the queue length in a thread while this hub is up. In memory: a restart starts an empty history."""

    def __init__(
        self, store: Store, *, every_s: float = SAMPLE_EVERY_S, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._every_s = every_s
        self._clock = clock
        self._kept = BoundedSamples()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="page-queue", daemon=True)
        self._thread.start()

    def samples(self) -> list[QueueSample]:
        """The samples that are kept, and a current one."""
        return [*self._kept.samples, self._look()]

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> QueueSample:
        counts = self._store.read(groups.counts)
        return QueueSample(self._clock(), counts.queued.groups, counts.leased.groups)

    def _watch(self) -> None:
        is_over = False
        while not is_over:
            with contextlib.suppress(ReadFailed):  # the hub reports problems of its queue itself
                self._kept.add(self._look())
            is_over = self._is_over.wait(self._every_s)


class ProcessView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: str  # "running", "ended" or "not running here"
    pid: int | None = None
    memory_bytes: int | None = None
    version: int | None = None
    heard_s: float | None = None  # seconds since its last report or log line
    detail: str = ""


class ProcessTable:
    """Finds the processes of one run by the settings file on their command lines, on this machine."""

    def __init__(self, run: RunFolder | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, psutil.Process] = {}
        self._found_s = -math.inf

    def look(self) -> list[ProcessView]:
        """Takes milliseconds: do not call it on an event loop."""
        import psutil  # slow to import: only when the page is open, so that a hub restarts fast

        with self._lock:
            self._known.setdefault("hub", psutil.Process())
            names = self._run.log_names() if self._run is not None else []
            wanted = [*dict.fromkeys(["hub", *names])]
            is_missing = any(name not in self._known or not self._known[name].is_running() for name in wanted)
            if is_missing and self._clock() - self._found_s >= FIND_EVERY_S:
                self._find()
                self._found_s = self._clock()
            return [self._view(name) for name in wanted]

    def _find(self) -> None:
        import psutil

        if self._run is None:
            return
        settings = str(self._run.path / CONFIG_FILE)
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if settings not in words or "treadle" not in words[:-1]:
                continue
            verb, *rest = words[words.index("treadle") + 1 :]
            if verb in ROLES and ROLES[verb] != "hub":
                own = process_of(rest[0]) if verb == "env" and rest else ""  # one of several environments
                if verb == "engine" and NAME_FLAG in rest[:-1]:  # one of several engines
                    own = rest[rest.index(NAME_FLAG) + 1]
                if verb == "train" and RANK_FLAG in rest[:-1]:
                    own = f"trainer-{rest[rest.index(RANK_FLAG) + 1]}"
                self._known[own if own in self._run.log_names() else ROLES[verb]] = process

    def _view(self, name: str) -> ProcessView:
        import psutil

        process = self._known.get(name)
        written_at = self._run.log_written_at(name) if self._run is not None else None
        heard_s = None if written_at is None else max(0.0, time.time() - written_at)
        if process is None:
            return ProcessView(name=name, state="not running here", heard_s=heard_s)
        try:
            is_running = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            memory = (
                sum(_memory_of(one) for one in [process, *process.children(recursive=True)]) if is_running else None
            )
        except psutil.Error:
            is_running, memory = False, None
        state = "running" if is_running else "ended"
        return ProcessView(name=name, state=state, pid=process.pid, memory_bytes=memory, heard_s=heard_s)


def _memory_of(process: psutil.Process) -> int:
    import psutil

    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0  # it ended after it was listed


class EngineMonitor:
    """Polls the engine at most once a second, for all viewers; remembers since when it has been paused."""

    def __init__(self, config: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        urls = (config.get("train") or {}).get("engine_url") or ""
        urls = [urls] if isinstance(urls, str) else list(urls)
        self._url = str(urls[0]) if len(urls) == 1 and urls[0] != HUB_TABLE else ""  # several are in the hub's table
        self._token = _token((config.get("engine") or {}).get("token_file"))
        self._clock = clock
        self._lock = threading.Lock()
        self._asked_s = -1e9
        self._paused_since_s: float | None = None
        self._answer: dict[str, Any] | None = None

    def look(self) -> EngineStatus | None:
        """None: the settings of this run name no engine."""
        if not self._url:
            return None
        with self._lock:
            if self._clock() - self._asked_s >= LOOK_EVERY_S:
                self._answer = get_json(f"{self._url}/bridge/info", token=self._token, timeout_s=ENGINE_TIMEOUT_S)
                self._asked_s = self._clock()
            answer = self._answer
            if answer is None:
                return EngineStatus(answers=False)
            if not answer.get("is_paused"):
                self._paused_since_s = None
            elif self._paused_since_s is None:
                self._paused_since_s = self._clock()
            paused_s = None if self._paused_since_s is None else self._clock() - self._paused_since_s
            return EngineStatus(answers=True, version=answer.get("update_count"), paused_s=paused_s)


def _token(token_file: object) -> str:
    from_environment = os.environ.get(TOKEN_VARIABLE, "")
    if from_environment or not isinstance(token_file, str):
        return from_environment
    try:
        return Path(token_file).expanduser().read_text().strip()
    except OSError:
        return ""  # the engine answers 401, and the page shows that it does not answer
