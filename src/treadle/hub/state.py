"""State shared by all requests of one hub, and the answers that are computed from it.

HubState holds the store, the configuration, the validation workers, the presence of environments and the reports of
processes. `env_status` is what /status-env answers; `explain` says why there is no batch.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from treadle.config.schema import HubConfig
from treadle.hub.batching import plan
from treadle.hub.engine_table import EngineTable
from treadle.hub.messages import GroupRules
from treadle.hub.metrics import Metrics
from treadle.hub.presence import GONE_AFTER_S, Presence
from treadle.hub.validation_workers import ValidationWorkers
from treadle.log import get_logger
from treadle.store import EnvLoad, EnvRecord, LeaseTerms, Limits, RunState, Store, batches, groups, runs
from treadle.watch.describe import ENDED, cleaned, describe_problems, describe_wait, describe_work
from treadle.watch.watchdog import ProcessFacts, report_of
from treadle.wire.hub import LastReport, ProcessReport, ReportTaken

Clock = Callable[[], float]
MAX_VALIDATION_WORKERS = 4
MAX_DELIVERIES = 5  # a batch that failed this often is set aside (dead-lettered)
QUEUE_LIMIT_BYTES = 4 * 2**30  # of groups that wait
SETTLE_S = 1.0
ASKS_AGAIN_S = 5.0  # a trainer that polls for a batch does so more often than this
FORGOTTEN_AFTER_S = 600.0  # a process without reports
FORGET_EVERY_S = 1.0
MOST_OF_A_KIND = 4000  # reports of processes; as many as a hub has connections
DUMPS_APART_S = 60.0  # limits the size of the log
MIN_ENV_WEIGHT = 0.01
log = get_logger("hub")

_Key = tuple[str, str, int]  # kind, machine, pid

# ---- process reports


class ProcessReports:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reports: dict[_Key, tuple[ProcessReport, float]] = {}
        self._to_dump: dict[_Key, str] = {}
        self._blamed: set[tuple[_Key, str]] = set()  # waits (process, what) that were acted upon
        self._dumped_s: dict[_Key, float] = {}
        self._forgot_s = -FORGET_EVERY_S
        self.elsewhere: Sequence[LastReport] = ()  # of processes that report to another hub on the same database
        self._hub_dumped_s = -DUMPS_APART_S
        self.hub_is_blamed = ""  # why the hub should write its own stacks; the caller that writes them clears it

    def take(self, report: ProcessReport) -> ReportTaken:
        """Store the report; answer whether the process should write its stacks, because another waits for it."""
        report = cleaned(report)
        key = (report.kind, report.machine, report.pid)
        self._forget_old()
        if report.state == ENDED:
            self._reports.pop(key, None)
            self._to_dump.pop(key, None)
            return ReportTaken()
        if key not in self._reports and sum(other[0] == report.kind for other in self._reports) >= MOST_OF_A_KIND:
            return ReportTaken()  # a report that is not kept asks for no stacks: nothing would ever remove that request
        if key not in self._reports:
            self._forget_crashed(report)
        self._reports[key] = (report, self._clock())
        self._blame(key, report)
        why = self._to_dump.pop(key, "")
        if why and self._clock() - self._dumped_s.get(key, -DUMPS_APART_S) >= DUMPS_APART_S:
            self._dumped_s[key] = self._clock()
            return ReportTaken(dump=why)
        return ReportTaken()

    def _forget_crashed(self, report: ProcessReport) -> None:
        """A trainer, or an engine of a fleet, that was started again replaces the one that could not say that it
        ends."""
        is_unique = report.kind == "trainer" or report.serves is not None
        same = [
            key
            for key, (other, _) in self._reports.items()
            if is_unique and (other.kind, other.machine, other.name) == (report.kind, report.machine, report.name)
        ]
        for key in same:
            self._reports.pop(key)
            self._to_dump.pop(key, None)

    def standings(self) -> list[LastReport]:
        """The processes that report here, then those that report to other hubs on the same database."""
        return [*self.standings_here(), *self.elsewhere]

    def standings_here(self) -> list[LastReport]:
        self._forget_old()
        return self._last_reports(self._reports.values())

    def engines_of_fleet(self) -> list[LastReport]:
        """Of `standings`, those of engines that take part in this run's fleet."""
        self._forget_old()
        here = self._last_reports(entry for entry in self._reports.values() if entry[0].serves is not None)
        return [*here, *(last for last in self.elsewhere if last.report.serves is not None)]

    def _last_reports(self, entries: Iterable[tuple[ProcessReport, float]]) -> list[LastReport]:
        now_s = self._clock()
        return [LastReport(report=report, heard_s=round(now_s - heard_s, 1)) for report, heard_s in entries]

    def clear(self) -> None:
        self._reports.clear()
        self._to_dump.clear()
        self._blamed.clear()

    def _blame(self, key: _Key, report: ProcessReport) -> None:
        """Ask the processes that a late wait depends on for their stacks, once for each wait."""
        late = {(key, wait.what) for wait in report.waits if wait.is_late}
        self._blamed = {(who, what) for who, what in self._blamed if who != key or (who, what) in late}
        for wait in report.waits:
            if wait.is_late and (key, wait.what) not in self._blamed:
                self._blamed.add((key, wait.what))
                if wait.of == "hub" and self._clock() - self._hub_dumped_s >= DUMPS_APART_S:
                    self._hub_dumped_s, self.hub_is_blamed = self._clock(), describe_wait(report, wait)
                for other in self._reports:
                    if other[0] == wait.of and other != key:
                        self._to_dump[other] = describe_wait(report, wait)

    def _forget_old(self) -> None:
        now_s = self._clock()
        if now_s - self._forgot_s < FORGET_EVERY_S:
            return
        self._forgot_s = now_s
        for key in [key for key, (_, heard_s) in self._reports.items() if now_s - heard_s > FORGOTTEN_AFTER_S]:
            del self._reports[key]
            self._to_dump.pop(key, None)
            self._dumped_s.pop(key, None)
            self._blamed = {(who, what) for who, what in self._blamed if who != key}


# ---- shared state


class BatchSignal:
    """Wakes calls that wait for a batch. Take `event`, then check the queue, then wait: no notification is missed."""

    def __init__(self) -> None:
        self.event = asyncio.Event()  # set at the next ring; a new one takes its place
        self.closing = False
        self._num_waiting = 0
        self._last_unmet_s: float | None = None  # when a trainer last asked for a batch in vain
        self.somebody_waits_elsewhere = False  # at another hub on the same database

    @property
    def somebody_waits(self) -> bool:
        """Whether a trainer wants a batch and there is none; some trainers hold the call, others poll."""
        return self.somebody_waits_here or self.somebody_waits_elsewhere

    @property
    def somebody_waits_here(self) -> bool:
        unmet_s = self._last_unmet_s
        return self._num_waiting > 0 or (unmet_s is not None and time.monotonic() - unmet_s < ASKS_AGAIN_S)

    def asked(self, *, is_met: bool) -> None:
        self._last_unmet_s = None if is_met else time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    def ring(self) -> None:
        self.event.set()
        self.event = asyncio.Event()

    def close(self) -> None:
        """The process ends: answer all waiting calls now."""
        self.closing = True
        self.ring()


@dataclass(frozen=True, slots=True)
class HubState:
    store: Store
    config: HubConfig
    presence: Presence
    batch_signal: BatchSignal
    validators: ValidationWorkers
    metrics: Metrics
    process_reports: ProcessReports
    engine_table: EngineTable
    terms: LeaseTerms
    limits: Limits
    clock: Clock
    full_weight_age: int | None  # older groups get less weight; None: all count in full, or stale ones are dropped
    # Acknowledgements of delivered batches that are not committed yet.
    settling: set[asyncio.Future[None]] = field(default_factory=set)
    # Two environments of one name that register at once must not both resume the same record.
    registering: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def build(cls, store: Store, config: HubConfig, clock: Clock) -> HubState:
        known = [env.env_id for env in store.read(runs.read_envs)]
        presence = Presence(
            clock,
            lambda: store.read(runs.read_envs),
            lambda env_id: store.read(runs.read_env, env_id),
            known,
        )
        terms = LeaseTerms(
            lease_s=config.lease_s,
            max_deliveries=MAX_DELIVERIES,
            plan=plan,
            is_alive=presence.is_alive,
            drop_older_than=config.max_age if config.stale == "drop" else None,
        )
        return cls(
            store=store,
            config=config,
            presence=presence,
            batch_signal=BatchSignal(),
            validators=ValidationWorkers(
                config.validation_workers or max(1, min(MAX_VALIDATION_WORKERS, (os.cpu_count() or 2) - 1))
            ),
            metrics=Metrics(),
            process_reports=ProcessReports(clock),
            engine_table=EngineTable(clock),
            terms=terms,
            clock=clock,
            limits=Limits(groups=config.queue_limit_groups, bytes=QUEUE_LIMIT_BYTES),
            full_weight_age=config.max_age if config.stale == "downweight" else None,
        )

    def is_run_at_work(self) -> bool:
        """Whether any process reports, any environment calls or any trainer asks for a batch."""
        reports = any(standing.heard_s <= GONE_AFTER_S for standing in self.process_reports.standings())
        return reports or self.presence.is_anybody_here or self.batch_signal.somebody_waits

    async def settled(self) -> None:
        """Await this before reporting the step: a trainer that has received its batch must see it as delivered."""
        if self.settling:
            await asyncio.wait(self.settling, timeout=SETTLE_S)

    def rules(self) -> GroupRules:
        """GroupRules for groups that arrive now."""
        run, num_envs, newest_step = self.store.read(runs.admission_facts)
        trainer = run.trainer
        return GroupRules(
            num_envs=num_envs,
            vocab_size=trainer.vocab_size if trainer else None,
            max_token_len=trainer.max_token_len if trainer and trainer.max_token_len > 0 else None,
            batch_size=trainer.batch_size if trainer and trainer.batch_size > 0 else None,
            newest_version=newest_step,
        )


# ---- reset


async def reset(hub: HubState) -> None:
    await asyncio.wrap_future(hub.store.write(runs.reset))
    hub.presence.forget()
    hub.process_reports.clear()
    hub.engine_table.clear()
    hub.metrics.forget_envs()
    hub.batch_signal.ring()
    log.warning("reset")


# ---- figures for environments


def env_status(env: EnvRecord, envs: Sequence[EnvRecord], load: EnvLoad, run: RunState) -> dict[str, int | float]:
    """Atropos' figures, from which its environments decide whether to generate more.

    `queue_size` is in groups of the asking environment: its own sequences, and those of the others as far as
    they exceed the share of a batch that is set aside for them.
    """
    batch_size = max(0, run.trainer.batch_size) if run.trainer else 0
    group_size = max(1, env.group_size, load.largest_own_group)
    largest = max(1, load.largest_group)
    minimum = {e.env_id: min(1.0, max(0.0, e.min_batch_allocation or 0.0)) for e in envs if e.connected}
    own = load.sequences.get(env.env_id, 0)
    others = 0
    for env_id, sequences in load.sequences.items():
        if env_id != env.env_id:
            reserved = int(batch_size * minimum.get(env_id, 0.0)) if env_id is not None else 0
            others += max(0, math.ceil(sequences / largest) * largest - reserved)
    return {
        "current_step": run.current_step,
        "queue_size": (own + others) // group_size,
        "unallocated_fraction": 1.0 - min(1.0, sum(minimum.values())),
        "self_queue_size": own // group_size,
        "max_group_size": largest,
        "env_weight": _share(env, envs),
    }


def _share(env: EnvRecord, envs: Sequence[EnvRecord]) -> float:
    total = sum(other.max_token_length * max(0.0, other.weight) for other in envs if other.connected)
    if total <= 0 or not math.isfinite(total):
        return MIN_ENV_WEIGHT
    share = env.max_token_length * env.weight / total
    return max(MIN_ENV_WEIGHT, share) if math.isfinite(share) else MIN_ENV_WEIGHT


# ---- explanations


def explain(hub: HubState) -> str:
    """All that is known: why there is no batch, and what the processes that should make one wait for."""
    # The trainer's own wait is this very question.
    others = [standing for standing in hub.process_reports.standings() if standing.report.kind != "trainer"]
    own = LastReport(report=report_of("hub", "hub", ProcessFacts(), hub.store.waits), heard_s=0.0)
    return "; ".join(
        [why_no_batch(hub), *(line for standing in [own, *others] for line in describe_problems(standing))]
    )


def why_no_batch(hub: HubState) -> str:
    """The same for as long as nothing happens."""
    store = hub.store
    trainer = store.read(runs.read_run).trainer
    if trainer is None:
        return "no trainer has registered, so the size of a batch is not known"
    planned = store.read(batches.plan_next, trainer.batch_size, hub.terms)
    if planned.ids is not None:
        return "a batch is ready and waits for the trainer"
    leased = store.read(groups.counts).leased.groups
    held = f"; {leased} more are in batches that were given out" if leased else ""
    envs = [env for env in store.read(runs.read_envs) if env.connected]
    silent = [env.name for env in envs if not hub.presence.is_alive(env.env_id)]
    reason = f"{planned.reason}{held}; {len(envs)} environment{'' if len(envs) == 1 else 's'} registered"
    reason += "".join(
        f"; the groups of {env.name} ({env.group_size}) never fit into a batch of {trainer.batch_size}: lower "
        "--env.group-size, or raise the trainer's --batch-size"
        for env in envs
        if env.group_size > trainer.batch_size
    )
    works = [standing.report.work for standing in hub.process_reports.standings() if standing.report.work is not None]
    reason = "; ".join([reason, *map(describe_work, works)])
    return f"{reason}; silent for a while: {', '.join(silent)}" if silent else reason
