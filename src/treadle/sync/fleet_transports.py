"""How the engines of a fleet receive a version: as files, each at its own pace, or all by one broadcast.

    FileFleetSync        saved once; each engine loads it in its thread, whenever it joins   (modes reload, lora_only)
    BroadcastFleetSync   from the trainer's memory to all at once   (--use-shared-memory)
                         join group ─> pause ─> one broadcast ─> resume under v ─> proofs, in threads

An engine that fails in a broadcast breaks it for all: it is taken out, and the others, which stay paused meanwhile, get
the whole broadcast again. One that joins later gets the version when the trainer waits for a batch (`welcome`), or the
next one with the others: a broadcast needs the trainer's thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import TypeVar

from treadle.background import awake_s, in_background
from treadle.config import TrainConfig
from treadle.errors import SyncError, TreadleError
from treadle.log import get_logger
from treadle.sync.broadcaster import Backend, BroadcastFailed, Receiver, WeightBroadcaster
from treadle.sync.fleet import POLL_S, FleetSync
from treadle.sync.fleet_members import FleetMember, HubTable, PublishedVersion
from treadle.sync.model_folders import LiveFolder
from treadle.sync.protocol import Publishable
from treadle.sync.shared_vllm import choose_transport
from treadle.sync.variables import group_place
from treadle.sync.version_files import AdapterFiles, HandedOver, VersionFiles, WeightFiles
from treadle.wire.bridge import BridgeState, Pause, Resume

T = TypeVar("T")
log = get_logger("sync")
_SHARE_OF_DEADLINE = 0.8  # for a broadcast; the rest is for engines to say that it failed


class FileFleetSync(FleetSync):
    def __init__(self, config: TrainConfig, table: HubTable | None = None) -> None:
        super().__init__(config, table)
        self._files: VersionFiles = AdapterFiles() if self._compares == "adapter" else WeightFiles()
        self._live = LiveFolder(config)

    def _save(self, policy: Publishable, version: int) -> Path:
        return self._files.save(policy, self._live.prepare(), version)

    def _distribute(self, policy: Publishable, published: PublishedVersion, members: Sequence[FleetMember]) -> None:
        with self._lock:
            for member in members:
                self._begin(member, published)

    def _hand_over(self, member: FleetMember, published: PublishedVersion) -> HandedOver:
        return self._files.hand_over(member.link, _folder_of(published), published.version)

    def _clean_up(self, member: FleetMember, handed: HandedOver) -> None:
        self._files.clean_up(member.link, handed)

    def _num_bytes(self, published: PublishedVersion, handed: Sequence[HandedOver]) -> int:
        with self._lock:
            received = [member.receiving for member in self._members.values()]
        in_use = [_folder_of(version) for version in received if version is not None]
        size = self._live.keep_newest(_folder_of(published), in_use)
        return sum(one.num_bytes(size) for one in handed)


def _folder_of(published: PublishedVersion) -> Path:
    assert published.folder is not None  # noqa: S101 - saved before it is handed over
    return published.folder


class BroadcastFleetSync(FleetSync):
    def __init__(self, config: TrainConfig, table: HubTable | None = None) -> None:
        super().__init__(config, table)
        place = group_place(config, os.environ)
        if place.note:
            log.warning("variable_without_effect", note=place.note)
        self._broadcaster = WeightBroadcaster(
            (), "gloo", host=place.host, port=place.port, timeout_s=_SHARE_OF_DEADLINE * config.publish_deadline_s
        )
        self._received: dict[str, tuple[PublishedVersion, HandedOver]] = {}  # by engine_id, until it is proved

    def _save(self, policy: Publishable, version: int) -> None:
        return None

    def _distribute(self, policy: Publishable, published: PublishedVersion, members: Sequence[FleetMember]) -> None:
        self._broadcast(policy, published, members)

    def _hand_over(self, member: FleetMember, published: PublishedVersion) -> HandedOver:
        received, handed = self._received.pop(member.engine_id, (None, None))
        if handed is None or received is not published:
            raise SyncError(f"it has not received version {published.version}", fix="it is sent the next one")
        return handed

    def _clean_up(self, member: FleetMember, handed: HandedOver) -> None:
        """The new weights have replaced the old ones."""

    def _num_bytes(self, published: PublishedVersion, handed: Sequence[HandedOver]) -> int:
        return sum(one.num_bytes(0) for one in handed)

    def _receive_later(self, member: FleetMember, published: PublishedVersion) -> None:
        """It waits for the trainer's thread."""

    def welcome(self) -> Callable[[Publishable], None] | None:
        published = self._published
        if published is None or not self._who_waits():
            return None

        def give(policy: Publishable) -> None:
            with self._lock:
                waiting = self._who_waits()
                for member in waiting:
                    member.pending = published
            self._broadcast(policy, published, waiting)

        return give

    def _who_waits(self) -> list[FleetMember]:
        with self._lock:
            found = list(self._members.values())
        return [member for member in found if member.state == "joining" and not (member.pending or member.is_busy)]

    def _end_proofs(self) -> None:
        """The weights must not change during a proof."""
        began, deadline_s = awake_s(), self._config.publish_deadline_s
        while busy := [member for member in self._list_members() if member.is_busy]:
            if awake_s() - began > deadline_s:
                for member in busy:
                    self._drop(member, f"it was not verified within {deadline_s:.0f} s of the next version")
            time.sleep(POLL_S)

    def _broadcast(self, policy: Publishable, published: PublishedVersion, members: Sequence[FleetMember]) -> None:
        """Send to these members, and again to the others when some fail; then begin their proofs."""
        there, num_bytes = [member for member in members if member.state != "out"], 0
        while there := self._joined(policy, there):
            held = self._each(there, lambda member: member.link.post("/bridge/pause", Pause(mode="keep"), BridgeState))
            if len(held) < len(there):  # the group has a member that cannot take part
                there = list(held)
                continue
            try:
                num_bytes = self._broadcaster.send(policy)
                break
            except BroadcastFailed as error:
                there = self._without_lost(there, error)
        resume = Resume(policy_version=published.version)
        resumed = self._each(there, lambda member: member.link.post("/bridge/resume", resume, BridgeState))
        with self._lock:
            for member, state in resumed.items():
                handed = HandedOver(state.policy_version, held_s=state.held_s, sent_bytes=num_bytes)
                self._received[member.engine_id] = published, handed
                self._begin(member, published)

    def _joined(self, policy: Publishable, members: Sequence[FleetMember]) -> list[FleetMember]:
        """Those of `members` that fit, in one group with the trainer."""
        there = list(members)
        while there:
            found = self._each(there, partial(self._check_receiver, policy))
            there, group = list(found), self._broadcaster
            in_group = [receiver.engine for receiver in group.receivers] if group.is_joined else []
            if in_group == [member.link for member in there]:
                break
            group.receivers = tuple(receiver for receiver, _ in found.values())
            group.backend = "nccl" if all(backend == "nccl" for _, backend in found.values()) else "gloo"
            try:
                group.join(policy)
                break
            except BroadcastFailed as error:
                there = self._without_lost(there, error)
        return there

    def _check_receiver(self, policy: Publishable, member: FleetMember) -> tuple[Receiver, Backend]:
        info = self._check_fits(member)
        backend = choose_transport(
            self._config.broadcast_by,
            member.url,
            is_here=False,
            layout=None,
            engine_device=info.device,
            own_device=policy.device.type,
            own_gpu=None,
        )
        return Receiver(member.link, info.num_workers), "nccl" if backend == "nccl" else "gloo"

    def _each(self, members: Iterable[FleetMember], ask: Callable[[FleetMember], T]) -> dict[FleetMember, T]:
        """Ask all at the same time; one that fails is out, and not in the answer."""
        asked = {member: in_background("ask-engine", partial(ask, member)) for member in members}
        wait(asked.values())  # each call has a deadline
        answers = {}
        for member, answer in asked.items():
            try:
                answers[member] = answer.result()
            except TreadleError as error:
                self._drop(member, error.message)
        return answers

    def _without_lost(self, members: Sequence[FleetMember], error: BroadcastFailed) -> list[FleetMember]:
        for member in members:
            if member.link in error.lost:
                self._drop(member, error.message)
        return [member for member in members if member.link not in error.lost]

    def _drop(self, member: FleetMember, reason: str) -> None:
        """Take it out before its proof began: nothing is pending for it any more."""
        with self._lock:
            member.pending = None
            member.proved_since = member.proved_version = None  # its weights may be a mixture
        self._take_out(member, reason)


def choose_fleet_sync(config: TrainConfig) -> FleetSync:
    return BroadcastFleetSync(config) if config.use_shared_memory else FileFleetSync(config)
