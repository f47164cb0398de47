"""Publish to a fleet: several engines, which may die, return and join during a run.

    hub's table, --engine-url ──> members ──> a thread each:  receive version v  ->  prove  ->  serving
                                                 ^                 |
    publish(v): give v to all ───────────────────┘                 └──> failed or late: out, the others go on
    once a second: a new engine, or one that returns, is taken in; a silent one is out

How they receive it is the business of FileFleetSync and BroadcastFleetSync (fleet_transports.py). A member serves after
its proof: fingerprints, canary and version, compared with what the trainer had when it published. The trainer posts its
verdicts to the hub, where environments read them. What a proof needs is kept with the version, so an engine can be
proved at any time, also while the trainer computes.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from treadle.background import awake_s, in_background
from treadle.config import TrainConfig
from treadle.config.section import HUB_TABLE
from treadle.errors import ConfigError, SyncError, TreadleError
from treadle.log import get_logger
from treadle.net.address import shown_url
from treadle.sync.fleet_members import FleetMember, HubTable, NamedEngines, PublishedVersion, worst_of
from treadle.sync.protocol import (
    LOADING_S,
    AttachedModel,
    EngineLink,
    Publishable,
    PublishResult,
    SyncMode,
    attach_adapters,
    attach_own_weights,
    check_same_dtype,
    check_same_quantization,
)
from treadle.sync.variables import num_engines_awaited
from treadle.sync.verify import Compared, ExpectedState, PublishVerifier
from treadle.sync.version_files import HandedOver
from treadle.wire.bridge import BridgeInfo
from treadle.wire.engines import (
    SILENT_AFTER_S,
    TABLE_POLL_S,
    EngineEntry,
    Engines,
    EngineVerdicts,
    table_interval,
)

REFRESH_EVERY_S = 1.0
FORGET_AFTER_S = 70.0  # an engine that is not listed, and does not answer
FIRST_RETRY_S = 2.0
LONGEST_RETRY_S = 60.0
TABLE_READ_S = 1.5  # environments with requests in flight have read the table this long after it was due
POLL_S = 0.05
log = get_logger("sync")


class FleetSync(SyncMode, ABC):
    """SyncMode for several engines. Calls come from the trainer's thread; each engine is proved in a thread."""

    def __init__(self, config: TrainConfig, table: HubTable | None = None) -> None:
        self._config = config.model_copy(update={"verify_publish": "always"})  # every version is proved by the canary
        self._compares: Compared = "adapter" if config.mode.adapters else "weights"
        self._table = table or HubTable(config.hub_url)
        self._named = NamedEngines([url for url in config.engine_url if url != HUB_TABLE], config.publish_deadline_s)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._posting = threading.Lock()
        self._members: dict[str, FleetMember] = {}  # by engine_id
        self._attached: BridgeInfo | None = None  # of the engine that training began with
        self._expecting: PublishVerifier | None = None  # computes what engines must have
        self._published: PublishedVersion | None = None
        self._posts_verdicts = False  # from the first publish on
        self._sequence = 0  # of the last post
        self._has_warned_of_none = False
        self._refresh_thread: threading.Thread | None = None

    # ---- how engines receive a version

    @abstractmethod
    def _save(self, policy: Publishable, version: int) -> Path | None:
        """Write what engines load; None: nothing."""

    @abstractmethod
    def _distribute(self, policy: Publishable, published: PublishedVersion, members: Sequence[FleetMember]) -> None:
        """Give a new version to these members and let each prove it (`_begin`); the caller waits for the proofs."""

    @abstractmethod
    def _hand_over(self, member: FleetMember, published: PublishedVersion) -> HandedOver:
        """The first half of the member's thread; the proof is the second."""

    @abstractmethod
    def _clean_up(self, member: FleetMember, handed: HandedOver) -> None:
        """Free what older versions take in the engine; called when the version is proved."""

    @abstractmethod
    def _num_bytes(self, published: PublishedVersion, handed: Sequence[HandedOver]) -> int:
        """That went to the engines."""

    def _end_proofs(self) -> None:
        """Called before a new version replaces the last one: wait for proofs that it would disturb."""

    def _receive_later(self, member: FleetMember, published: PublishedVersion) -> None:
        """The member has joined, or returned, after this version was published."""
        self._begin(member, published)

    # ---- SyncMode

    def attach(self) -> AttachedModel:
        """Wait for the first engine, or as many as `min_engines`; training starts from the model of one."""
        began, num_awaited = awake_s(), num_engines_awaited(self._config, os.environ)
        attach = attach_adapters if self._compares == "adapter" else attach_own_weights
        problem: TreadleError | None = None
        while True:
            self._refresh_members()
            there = self._list_members()
            for member in there if len(there) >= num_awaited else ():
                try:
                    self._check_same_start(member)  # `attach` waits for one that has died as if it were still loading
                    attached = attach(self._config, member.link)
                    self._attached = member.link.get("/bridge/info", BridgeInfo)
                except TreadleError as error:  # it has died since it was listed, or serves another model
                    problem = error
                    self._take_out(member, error.message)
                    continue
                self._start_refreshing()
                return attached
            if awake_s() - began > LOADING_S:
                found = f"{len(there)} of {num_awaited} engines have" if num_awaited > 1 else "no engine has"
                raise problem or SyncError(f"{found} joined this run within {LOADING_S:.0f} s", fix=_START_ONE)
            time.sleep(POLL_S * 4)

    def settle(self) -> None:
        """Proofs are complete when `publish` returns."""

    def publish(self, policy: Publishable, version: int) -> PublishResult:
        started = time.monotonic()
        policy.write_live_weights()
        folder = self._save(policy, version)
        expected = self._expect(policy, version)
        if self._published is None:
            self._replace_earlier_verdicts()
        published = PublishedVersion(version, folder, expected)
        saved = time.monotonic()
        self._end_proofs()
        with self._lock:
            is_first = self._published is None
            self._published = published
            members = [member for member in self._members.values() if member.state != "out"]
            # A joining engine that has proved an earlier version would else be late at every publish.
            awaited = [m for m in members if is_first or m.state == "serving" or m.has_proved]
            for member in members:
                member.pending = published
        self._distribute(policy, published, members)
        proved = self._wait_until_proved(policy, awaited, version)
        self._post_verdicts()
        handed = [member.handed for member in proved if member.handed is not None]
        log.info("fleet_published", version=version, engines=len(proved), seconds=time.monotonic() - started)
        return PublishResult(
            version=version,
            wait_s=0.0,
            write_s=time.monotonic() - saved,
            hold_s=max((one.held_s for one in handed), default=0.0),
            num_bytes=self._num_bytes(published, handed),
            verified=worst_of(m.verified for m in proved if m.verified is not None),
        )

    def _expect(self, policy: Publishable, version: int) -> ExpectedState:
        """What every engine must have; computed now, because the weights change before the last engine joins."""
        expected: ExpectedState | None = None
        began, logged = awake_s(), ""
        while expected is None:
            try:
                verifier = self._expecting or self._new_verifier(self._any_link())
                expected, self._expecting = verifier.expect(policy, version), verifier
            except TreadleError as error:  # an engine that is split over several workers is asked for their parts
                if awake_s() - began > LOADING_S + self._config.publish_deadline_s:
                    raise
                if error.message != logged:
                    log.warning("engine_not_asked_for_parts", problem=error.message)
                    logged = error.message
                time.sleep(REFRESH_EVERY_S)
        found = {} if expected.fingerprints is None else expected.fingerprints()
        return replace(expected, fingerprints=lambda: found, uncached_canary=None)

    def _any_link(self) -> EngineLink:
        problem: TreadleError = SyncError("no engine of this run answers", fix=_START_ONE)
        for member in self._list_members():
            try:
                self._check_fits(member)
            except TreadleError as error:
                problem = error
            else:
                return member.link
        raise problem

    def _new_verifier(self, link: EngineLink) -> PublishVerifier:
        return PublishVerifier(self._config, link, compares=self._compares)

    def _wait_until_proved(self, policy: Publishable, awaited: list[FleetMember], version: int) -> list[FleetMember]:
        """The members that have proved this version. The awaited ones have until the deadline; without any, the next
        engine that joins is waited for."""
        began = awake_s()
        deadline_s = self._config.publish_deadline_s
        while True:
            if (welcome := self.welcome()) is not None:
                welcome(policy)
            with self._lock:
                late = [m for m in awaited if m.state != "out" and m.proved_version != version]
                proved = [m for m in self._members.values() if m.state == "serving" and m.proved_version == version]
                waited_s = awake_s() - began
                if not late and proved:
                    return proved
                if late and waited_s > deadline_s:
                    for member in late:
                        self._take_out(member, f"it did not adopt version {version} within {deadline_s:.0f} s")
                    continue
                if not late and not self._has_warned_of_none:
                    self._has_warned_of_none = True
                    log.warning("no_engine_left", version=version, waiting_s=LOADING_S, fix=_START_ONE)
                if not late and waited_s > LOADING_S + deadline_s:
                    reasons = "; ".join(f"{shown_url(m.url)}: {m.reason}" for m in self._members.values() if m.reason)
                    raise SyncError(
                        f"version {version} was not verified in any engine within {waited_s:.0f} s "
                        f"({reasons or 'none joined'})",
                        fix=_START_ONE,
                    )
                self._changed.wait(POLL_S)

    # ---- one member

    def _begin(self, member: FleetMember, published: PublishedVersion) -> None:
        """Bring this version to the member, after what is under way there; an older one that waits is skipped."""
        member.pending = published
        if not member.is_busy:
            member.receiving = published
            in_background("engine", partial(self._bring_pending, member))

    def _bring_pending(self, member: FleetMember) -> None:
        """The member's thread."""
        while True:
            with self._lock:
                published = member.receiving = member.pending
            if published is None:
                return
            self._bring(member, published)
            with self._lock:
                if member.pending is published:
                    member.pending = None

    def _bring(self, member: FleetMember, published: PublishedVersion) -> None:
        try:
            self._check_fits(member)
            handed = self._hand_over(member, published)
            verified = member.verifier.check(published.expected, handed.version, handed.adapter)
            self._check_same_start(member)
            self._clean_up(member, handed)
        except Exception as error:  # whatever is wrong with one engine, the others go on
            why = error.message if isinstance(error, TreadleError) else f"{type(error).__name__}: {error}"
            with self._lock:  # it may have answered under this version: a later proof begins a new range
                member.proved_since = member.proved_version = None
            if self._published is published:
                self._take_out(member, why)
            else:  # the next version may succeed
                in_background("verdicts", self._post_verdicts)
            return
        with self._lock:
            if self._members.get(member.engine_id) is not member:
                return
            if member.proved_since is None or (member.proved_version or 0) > published.version:
                member.proved_since = published.version
            member.proved_version, member.proved_at = published.version, time.time()
            member.handed, member.verified, member.has_proved = handed, verified, True
            if self._published is published:  # else the next version follows
                if member.state != "serving":
                    log.info("engine_serves", engine=shown_url(member.url), version=published.version)
                member.state, member.reason, member.num_failures = "serving", "", 0
                self._has_warned_of_none = False
            self._changed.notify_all()
        in_background("verdicts", self._post_verdicts)

    def _check_fits(self, member: FleetMember) -> BridgeInfo:
        info = self._check_same_start(member)
        first = self._attached
        check_same_dtype(self._config, info.dtype)
        check_same_quantization(self._config, info)
        if first is not None and (info.dtype, info.has_lora) != (first.dtype, first.has_lora):
            raise ConfigError(
                f"its weights are {info.dtype}, and those of the run's engines {first.dtype}"
                if info.dtype != first.dtype
                else "it takes no adapters, and the run publishes them",
                fix="start it with `treadle engine --join HUB`, without --dtype and --enable-lora",
            )
        if first is not None and self._compares == "weights" and info.num_workers != first.num_workers:
            raise ConfigError(
                f"its weights are split over {info.num_workers} GPUs, and those of the run's engines over "
                f"{first.num_workers}: their parts cannot be compared",
                fix="start it with as many --gpus as the run's other engines",
            )
        return info

    def _check_same_start(self, member: FleetMember) -> BridgeInfo:
        info = member.link.get("/bridge/info", BridgeInfo)
        if info.engine_id != member.engine_id:
            raise SyncError(f"the engine at {shown_url(member.url)} was restarted", fix="it joins again by itself")
        return info

    def _take_out(self, member: FleetMember, reason: str) -> None:
        with self._lock:
            if member.state != "out":
                log.warning("engine_out", engine=shown_url(member.url), reason=reason, was=member.state)
            member.state, member.reason, member.has_proved = "out", reason, False
            member.num_failures += 1
            member.retry_at_s = awake_s() + min(FIRST_RETRY_S * 2**member.num_failures, LONGEST_RETRY_S)
            self._changed.notify_all()
        in_background("verdicts", self._post_verdicts)

    # ---- who is there

    def _list_members(self) -> list[FleetMember]:
        """Those that are not out, the ones that serve first."""
        with self._lock:
            there = [member for member in self._members.values() if member.state != "out"]
        return sorted(there, key=lambda member: member.state != "serving")

    def _start_refreshing(self) -> None:
        if self._refresh_thread is None:
            self._refresh_thread = threading.Thread(target=self._keep_refreshing, name="fleet", daemon=True)
            self._refresh_thread.start()

    def _keep_refreshing(self) -> None:
        failures: set[type[Exception]] = set()  # logged once each
        while True:
            time.sleep(REFRESH_EVERY_S)
            try:
                self._refresh_members()
            except Exception as error:  # as long as the trainer runs
                if type(error) not in failures:
                    failures.add(type(error))
                    log.error("fleet_not_refreshed", exc_info=True, problem=str(error))

    def _refresh_members(self) -> None:
        """Take in engines that are new, take out those that are gone, and give those that return the last version."""
        table = self._post_verdicts()
        listed = [] if table is None else [entry for entry in table.engines if entry.served is not None]
        found = {e.engine_id: e.url for e in listed if e.state != "silent"}
        found |= self._named.poll(apart_from={entry.url for entry in listed})
        now_s = awake_s()
        with self._lock:
            if table is None:  # the hub restarts: nothing is known of engines that report to it
                for member in self._members.values():
                    if member.url not in self._named.urls:
                        member.seen_s = now_s
            for engine_id, url in found.items():
                member = self._members.get(engine_id) or self._take_in(engine_id, url)
                member.seen_s = now_s
            for member in list(self._members.values()):
                self._refresh_member(member, now_s, _is_silent(member.engine_id, listed))

    def _refresh_member(self, member: FleetMember, now_s: float, is_silent: bool) -> None:
        is_gone = is_silent or now_s - member.seen_s > SILENT_AFTER_S
        if is_gone and member.state != "out":
            self._take_out(member, "it does not report any more")
        elif is_gone and now_s - member.seen_s > FORGET_AFTER_S:
            del self._members[member.engine_id]
        elif not is_gone and member.pending is None:
            published = self._published
            has_proved = published is not None and member.proved_version == published.version
            if (has_proved and member.state == "serving") or (member.state == "out" and now_s < member.retry_at_s):
                return
            member.state = "joining"
            if published is not None:
                self._receive_later(member, published)

    def _take_in(self, engine_id: str, url: str) -> FleetMember:
        for other in self._members.values():
            if other.url == url and other.state != "out":
                self._take_out(other, "it was restarted")
        link = EngineLink(url, self._config.publish_deadline_s, save_path=self._config.save_path)
        member = FleetMember(engine_id, link, self._new_verifier(link), seen_s=awake_s())
        self._members[engine_id] = member
        log.info("engine_joins", engine=shown_url(url), engine_id=engine_id)
        return member

    def _replace_earlier_verdicts(self) -> None:
        """Withdraw the proofs that engines gave an earlier trainer, before any of them loads weights of this one: the
        versions that they cover may be published again."""
        began = awake_s()
        self._posts_verdicts = True
        while (table := self._post_verdicts()) is None and awake_s() - began < self._config.publish_deadline_s:
            time.sleep(REFRESH_EVERY_S)
        num_present, spread_s = (1, 0.0) if table is None else (table.num_present, table.spread_s)
        time.sleep(TABLE_READ_S + spread_s + table_interval(TABLE_POLL_S, num_present))

    def _post_verdicts(self) -> Engines | None:
        """The table, with what this trainer knows. Before its first publish those of an earlier one stand."""
        with self._posting:
            if not self._posts_verdicts:
                return self._table.exchange(None)
            table = self._post_once()
            if table is not None and table.sequence > self._sequence:  # verdicts of an earlier trainer are in force
                self._sequence = table.sequence
                table = self._post_once()
            return table

    def _post_once(self) -> Engines | None:
        with self._lock:
            verdicts = [member.verdict() for member in self._members.values()]
        self._sequence += 1
        return self._table.exchange(EngineVerdicts(engines=verdicts, sequence=self._sequence))


def _is_silent(engine_id: str, listed: Iterable[EngineEntry]) -> bool:
    return any(entry.engine_id == engine_id and entry.state == "silent" for entry in listed)


_START_ONE = "start one with `treadle engine --join HUB`; the hub's /v1/engines says why others are out"
