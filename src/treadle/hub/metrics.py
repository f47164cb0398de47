"""The figures of GET /metrics. What must survive a restart is in the store; the rest counts since the process started.

Every group that was ever accepted is in exactly one place:
accepted = queue + leased + trained + dropped + dead, of each environment and in sum.
"""

from __future__ import annotations

import platform
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

from treadle.net.prometheus_text import Family, Histogram, Page
from treadle.store import Batch, Figures, Tally

if TYPE_CHECKING:
    from treadle.hub.endpoint import Endpoint

MAX_NAMED_ENVS = 1000  # each has a dozen series; what further environments do is counted together
NO_ENV = "none"  # names end with a number, so no environment has this name or the next
FURTHER_ENVS = "further"
UNKNOWN_ROUTE = "none"

REQUEST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
COMMIT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
COMMIT_JOBS = (1, 2, 4, 8, 16, 32, 64)
WAIT_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)
AGES = (0, 1, 2, 3, 4, 6, 8, 16, 32, 64)


class MonotonicCount:
    """Turn a count that the store may lower into one that only grows, as Prometheus counters must.

    A batch that is dissolved (the trainer returned with another batch size) is queued again: its groups were delivered
    and will be delivered once more.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._taken_back: Counter[str] = Counter()

    def value(self, env: str, count: int) -> int:
        self._taken_back[env] += max(0, self._last.get(env, 0) - count)
        self._last[env] = count
        return count + self._taken_back[env]


class Metrics:
    """What passed through this process. All but `commit` is called from one thread."""

    def __init__(self) -> None:
        self._started_at = time.time()
        self._requests: defaultdict[tuple[str, str, str], Histogram] = defaultdict(lambda: Histogram(REQUEST_S))
        self._refused_requests: Counter[tuple[str, str, str]] = Counter()  # (method, route, reason)
        self._refused_posts: Counter[tuple[int | None, str]] = Counter()  # (env id, reason)
        self._batches: Counter[str] = Counter()  # "first" or "repeated"
        self._downweighted = 0
        self._ages = Histogram(AGES)
        self._waits_s = Histogram(WAIT_S)
        self._commits_s = Histogram(COMMIT_S)
        self._commit_jobs = Histogram(COMMIT_JOBS)
        self._waived: Counter[str] = Counter()  # name of the environment
        self._delivered = MonotonicCount()
        self.after_event = 0  # waived minimums up to this event are counted

    # ---- what happens

    def request(self, endpoint: Endpoint, status: int, reason: str, seconds: float) -> None:
        self._requests[endpoint.method, endpoint.path, f"{status // 100}xx"].observe(seconds)
        if reason:
            self._refused_requests[endpoint.method, endpoint.path, reason] += 1

    def no_route(self, reason: str) -> None:
        """Count a request for an unknown path or method, without its name, which comes from outside."""
        self._refused_requests[UNKNOWN_ROUTE, UNKNOWN_ROUTE, reason] += 1

    def refuse_post(self, env_ids: Iterable[int | None], reason: str) -> None:
        """`env_ids` must be known ones: anybody can make up others without end."""
        self._refused_posts.update((env_id, reason) for env_id in env_ids)

    def deliver(self, batch: Batch, max_age: int | None = None) -> None:
        """`max_age`: groups that are older count less."""
        is_first = batch.deliveries <= 1
        self._batches["first" if is_first else "repeated"] += 1
        if not is_first:
            return
        now = time.time()
        for group in batch.groups:
            self._waits_s.observe(max(0.0, now - group.received_at))
            if group.policy_version is not None:  # the trainer of step s is at version s - 1
                age = max(0, batch.step - 1 - group.policy_version)
                self._ages.observe(age)
                self._downweighted += max_age is not None and age > max_age

    def forget_envs(self) -> None:
        """After a reset the ids are given to others."""
        self._refused_posts.clear()
        self._waived.clear()
        self._delivered = MonotonicCount()

    def commit(self, num_jobs: int, seconds: float) -> None:
        """On the writer's thread, which alone touches these two."""
        self._commit_jobs.observe(num_jobs)
        self._commits_s.observe(seconds)

    # ---- the page

    def page(self, figures: Figures, idle_s: Callable[[int], float], num_readers: int) -> str:
        self._waived.update(figures.waived)
        self.after_event = figures.newest_event
        names = {env.env_id: env.name for env in figures.envs[:MAX_NAMED_ENVS]}
        page = Page()
        labels = {"version": version("treadle"), "python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
        page.family("treadle_hub_build_info", "gauge", "always 1; what the hub is made of").add(1, labels)
        started = page.family("treadle_hub_start_time_seconds", "gauge", "when the process started, Unix time")
        started.add(self._started_at)
        _places(page, figures, names, self._delivered)
        _run(page, figures, names, idle_s)
        self._doings(page, names)
        self._times(page)
        page.family("treadle_hub_event_readers", "gauge", "readers of /v1/events").add(num_readers)
        return page.text()

    def _doings(self, page: Page, names: Mapping[int, str]) -> None:
        family = page.family("treadle_hub_refused_posts_total", "counter", "posts of groups refused, since the start")
        _add_reasons(family, self._refused_posts, names)
        family = page.family("treadle_hub_refused_requests_total", "counter", "requests refused, since the start")
        for (method, route, reason), count in self._refused_requests.items():
            family.add(count, {"method": method, "route": route, "reason": reason})
        family = page.family("treadle_hub_batches_delivered_total", "counter", "batches given out, since the start")
        for delivery in ("first", "repeated"):
            family.add(self._batches[delivery], {"delivery": delivery})
        family = page.family("treadle_hub_downweighted_groups_total", "counter", "stale groups that count less")
        family.add(self._downweighted)
        family = page.family("treadle_hub_minimums_waived_total", "counter", "batches formed without a minimum")
        known = set(names.values())
        waived: Counter[str] = Counter()
        for name, count in self._waived.items():
            waived[name if name in known else FURTHER_ENVS] += count
        for name, count in waived.items():
            family.add(count, {"env": name})

    def _times(self, page: Page) -> None:
        family = page.family("treadle_hub_request_seconds", "histogram", "from a request's head to its answer")
        for (method, route, status), seconds in list(self._requests.items()):
            family.add_histogram(seconds, {"method": method, "route": route, "status": status})
        for name, text, histogram in (
            ("queue_wait_seconds", "from the arrival of a group to its first delivery", self._waits_s),
            ("delivered_age_versions", "policy versions between sampling and training of a group", self._ages),
            ("commit_seconds", "one transaction with its sync to disk", self._commits_s),
            ("commit_jobs", "changes that shared a transaction", self._commit_jobs),
        ):
            page.family(f"treadle_hub_{name}", "histogram", text).add_histogram(histogram)


def _places(page: Page, figures: Figures, names: Mapping[int, str], delivered: MonotonicCount) -> None:
    """Where the groups are."""
    by_env: defaultdict[str, dict[str, Tally]] = defaultdict(dict, {name: {} for name in names.values()})
    for (state, env_id), tally in figures.groups.items():
        states = by_env[_name(names, env_id)]
        so_far = states.get(state, Tally())
        states[state] = Tally(
            so_far.groups + tally.groups, so_far.sequences + tally.sequences, so_far.bytes + tally.bytes
        )
    for name, text, of_states in (
        ("accepted_groups_total", "groups stored", ("queued", "leased", "trained", "dropped", "dead")),
        ("trained_groups_total", "groups whose step was acknowledged", ("trained",)),
        ("dead_groups_total", "groups whose deliveries failed too often", ("dead",)),
        ("queue_groups", "groups that wait", ("queued",)),
        ("leased_groups", "groups of batches that are given out, or that were given back", ("leased",)),
    ):
        family = page.family(f"treadle_hub_{name}", "counter" if name.endswith("_total") else "gauge", text)
        for env, states in by_env.items():
            family.add(sum(states[state].groups for state in of_states if state in states), {"env": env})
    family = page.family("treadle_hub_delivered_groups_total", "counter", "groups given out; repeats do not count")
    for env, states in by_env.items():
        count = sum(states[state].groups for state in ("leased", "trained", "dead") if state in states)
        family.add(delivered.value(env, count), {"env": env})
    sequences = page.family("treadle_hub_queue_sequences", "gauge", "sequences that wait")
    num_bytes = page.family("treadle_hub_queue_bytes", "gauge", "bytes of the groups that wait")
    for env, states in by_env.items():
        waiting = states.get("queued", Tally())
        sequences.add(waiting.sequences, {"env": env})
        num_bytes.add(waiting.bytes, {"env": env})
    family = page.family("treadle_hub_dropped_groups_total", "counter", "groups dropped before any delivery")
    _add_reasons(family, figures.dropped, names)
    at = figures.oldest_waiting_at
    family = page.family("treadle_hub_oldest_waiting_seconds", "gauge", "how long the oldest group has waited")
    family.add(0.0 if at is None else max(0.0, time.time() - at))


def _run(page: Page, figures: Figures, names: Mapping[int, str], idle_s: Callable[[int], float]) -> None:
    page.family("treadle_hub_step", "gauge", "the optimizer step acknowledged last").add(figures.run.current_step)
    trainer = figures.run.trainer
    page.family("treadle_hub_trainer_registered", "gauge", "1 once a trainer registered").add(int(trainer is not None))
    family = page.family("treadle_hub_batch_size", "gauge", "sequences of a batch; 0 until a trainer registers")
    family.add(trainer.batch_size if trainer else 0)
    connected = page.family("treadle_hub_env_connected", "gauge", "0 once an environment said that it leaves")
    idle = page.family("treadle_hub_env_idle_seconds", "gauge", "since a connected environment was last heard of")
    for env in figures.envs[:MAX_NAMED_ENVS]:
        connected.add(int(env.connected), {"env": env.name})
        if env.connected:
            idle.add(round(idle_s(env.env_id), 3), {"env": env.name})


def _add_reasons(family: Family, counts: Mapping[tuple[int | None, str], int], names: Mapping[int, str]) -> None:
    """Counts by environment and reason; several environments may share a name on the page."""
    named: Counter[tuple[str, str]] = Counter()
    for (env_id, reason), count in counts.items():
        named[_name(names, env_id), reason] += count
    for (env, reason), count in named.items():
        family.add(count, {"env": env, "reason": reason})


def _name(names: Mapping[int, str], env_id: int | None) -> str:
    return NO_ENV if env_id is None else names.get(env_id, FURTHER_ENVS)
