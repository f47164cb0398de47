"""A model of the queue in a few dictionaries; the store must agree with it after every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

LEASE_S = 60.0
MAX_DELIVERIES = 3


@dataclass
class Group:
    size: int
    env: int | None
    version: int | None
    payload: bytes
    state: str = "queued"
    pruned: bool = False


@dataclass
class Record:
    step: int
    ids: list[int]
    state: str = "open"
    deliveries: int = 0
    token: str | None = None
    holder: str | None = None
    until_s: float = 0.0


@dataclass
class Model:
    groups: dict[int, Group] = field(default_factory=dict)
    live: dict[int, Record] = field(default_factory=dict)  # by step
    superseded: list[Record] = field(default_factory=list)
    keys: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    envs: list[str] = field(default_factory=list)
    accepted_of_env: dict[int, int] = field(default_factory=dict)
    batch_size: int | None = None
    save_interval: int = 0
    step: int = 0
    next_id: int = 1

    def ids(self, state: str) -> list[int]:
        return [group_id for group_id, group in self.groups.items() if group.state == state]

    def move(self, ids: list[int], state: str) -> None:
        for group_id in ids:
            self.groups[group_id].state = state

    def post(self, groups: list[Group]) -> None:
        for group in groups:
            self.groups[self.next_id] = group
            self.next_id += 1
            if group.env is not None:
                self.accepted_of_env[group.env] = self.accepted_of_env.get(group.env, 0) + 1

    def can_form(self) -> bool:
        """Whether some of what waits sums to exactly a batch."""
        sums = {0}
        for group_id in self.ids("queued"):
            sums |= {total + self.groups[group_id].size for total in sums if total <= (self.batch_size or 0)}
        return bool(self.batch_size) and self.batch_size in sums

    def drop_stale(self, oldest_version: int) -> None:
        versions = {group_id: self.groups[group_id].version for group_id in self.ids("queued")}
        self.move([key for key, version in versions.items() if version is not None and version < oldest_version],
                  "dropped")  # fmt: skip

    def form(self, step: int, ids: list[int]) -> Record:
        """The choice itself is the store's; here it must be exact, of what waits, and the oldest of their kind."""
        assert len(set(ids)) == len(ids)
        assert sum(self.groups[group_id].size for group_id in ids) == self.batch_size
        for group_id in ids:
            assert self.groups[group_id].state == "queued"
            kind = (self.groups[group_id].env, self.groups[group_id].size)
            for other in self.ids("queued"):
                if other < group_id and other not in ids:
                    assert (self.groups[other].env, self.groups[other].size) != kind, "overtaken by its equal"
        self.move(ids, "leased")
        self.live[step] = Record(step, ids)
        return self.live[step]

    def dissolve(self, record: Record) -> None:
        self.move(record.ids, "queued")
        del self.live[record.step]

    def bury(self, record: Record) -> None:
        self.move(record.ids, "dead")
        del self.live[record.step]

    def release(self, record: Record) -> None:
        record.token = record.holder = None

    def finish(self, record: Record, keep_bytes: int) -> None:
        record.holder = None
        if record.state == "open":
            record.state = "trained"
        self.move(record.ids, "trained")
        self.step = max(self.step, record.step)
        if sum(len(g.payload) for g in self.groups.values() if g.state == "trained" and not g.pruned) <= keep_bytes:
            return
        replaced, self.superseded = self.superseded[:2], self.superseded[2:]
        done = sorted(step for step, each in self.live.items() if each.state == "trained")
        done = [step for step in done if step <= record.step - 2 * self.save_interval][:2]
        for old in replaced or [self.live[step] for step in done if self.save_interval > 0]:
            old.state = "pruned"
            for group_id in old.ids:
                self.groups[group_id].pruned = True

    def register(
        self, batch_size: int, step: int, save_interval: int, holder: str | None, is_held: Callable[[Record], bool]
    ) -> None:
        self.batch_size, self.step, self.save_interval = batch_size, step, save_interval
        for record in [each for each in self.live.values() if each.state == "open" and each.step <= step]:
            self.finish(record, keep_bytes=2**62)  # it is in the trainer's checkpoint
        for record in [each for each in self.live.values() if each.state == "open"]:
            if sum(self.groups[group_id].size for group_id in record.ids) != batch_size:
                self.dissolve(record)
        self.move([key for key in self.ids("queued") if self.groups[key].size > batch_size], "dropped")
        if holder is None:
            for record in [each for each in self.live.values() if each.state == "open"]:
                if record.holder == "/batch" or not is_held(record):
                    self.dissolve(record)
            return
        held = [each for each in self.live.values() if each.holder == holder]
        at_work = min((each.step for each in held if each.state == "open"), default=0)
        for record in held:
            if record.state == "open" and record.step > at_work:
                record.deliveries -= 1
            self.release(record)
