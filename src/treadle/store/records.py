"""Records that the store takes and returns, and the refusals it raises.

A refusal is an answer to the caller, not a fault of the store:

HubError
└── StoreRefusal
    ├── StaleToken      the lease was given to another trainer, or ended
    ├── HeldByAnother   a live holder has this step
    ├── KeyReused       an idempotency key came back with another body
    ├── BatchPruned     the data of this trained step was pruned
    ├── QueueFull       the queue has reached its limit
    └── StorageFailed   the database could not be written (a full disk is errors.DiskFull)
        ├── OutcomeUnknown  the database server was lost during the commit
        ├── ReadFailed      the database could not be read
        └── DamagedGroups   groups differ from what was written; they were set aside, and a retry helps
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from treadle.errors import HubError
from treadle.wire.groups import StoredForm
from treadle.wire.hub import RegisterTrainer

# ---- refusals


class StoreRefusal(HubError):
    pass


class StaleToken(StoreRefusal):
    pass


class HeldByAnother(StoreRefusal):
    pass


class KeyReused(StoreRefusal):
    pass


class BatchPruned(StoreRefusal):
    pass


class QueueFull(StoreRefusal):
    pass


class StorageFailed(StoreRefusal):
    pass


class OutcomeUnknown(StorageFailed):
    pass


class ReadFailed(StorageFailed):
    pass


class DamagedGroups(StorageFailed):
    pass


# ---- records

Format = Literal["json", "binary"]


class Waiting(NamedTuple):
    """A queued group, as the choice of a batch sees it."""

    id: int
    size: int


@dataclass(frozen=True, slots=True)
class EnvQueue:
    """The queue of one environment. It holds, of each size, as many of the oldest groups as a batch can use."""

    env_id: int | None  # None: groups that were posted without an environment
    waiting: Sequence[Waiting]  # oldest first
    sizes: Mapping[int, int] = field(default_factory=dict)  # how many of each size there are in all: {8: 300}
    name: str = ""
    weight: float = 1.0
    tag: float = 0.0  # how far it has come in the weighted order
    minimum: float = 0.0  # the share of a batch that is set aside for it
    is_alive: bool = True
    group_size: int = 0  # as registered; 0: unknown


@dataclass(frozen=True, slots=True)
class Plan:
    """The groups of the next batch, or in words why there is none."""

    ids: list[int] | None
    reason: str
    tags: Mapping[int | None, float] = field(default_factory=dict)  # of the env_queues, once this batch is taken
    waived: Mapping[str, str] = field(default_factory=dict)  # minimums that were not waited for: name -> why
    misfits: Sequence[int] = ()  # groups that no batch of this size can ever hold


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How batches are made and held. `plan` and `is_alive` must have no side effects: a call may be repeated."""

    lease_s: float
    max_deliveries: int
    plan: Callable[[Sequence[EnvQueue], int], Plan]
    is_alive: Callable[[int], bool]
    drop_older_than: int | None = None  # groups sampled more versions ago than this are dropped as stale


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may wait."""

    groups: int
    bytes: int = 2**62


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A checked group on its way in. The content leaves as it came: it is never parsed again here."""

    payload: bytes  # JSON with just Atropos' keys, or our binary form
    size: int
    num_tokens: int
    format: Format = "json"
    env_id: int | None = None
    policy_version: int | None = None
    item: int | None = None
    metrics: bytes | None = None  # JSON object


@dataclass(frozen=True, slots=True)
class Post:
    """The groups of one request: all are stored, or none."""

    groups: Sequence[NewGroup]
    key: str | None = None
    body_hash: bytes = b""


@dataclass(frozen=True, slots=True)
class Appended:
    num_groups: int
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class StoredGroup:
    id: int
    format: Format
    payload: bytes
    policy_version: int | None
    item: int | None
    metrics: bytes | None
    received_at: float

    def content(self, weight: float = 1.0) -> StoredForm:
        """`from_stored(stored.content())` is the group as it was posted."""
        is_json = self.format == "json"
        return StoredForm(
            json=self.payload if is_json else None,
            binary=None if is_json else self.payload,
            policy_version=self.policy_version,
            item=self.item,
            metrics=self.metrics,
            weight=weight,
        )


@dataclass(frozen=True, slots=True)
class Lease:
    """Who may train which groups, without the groups themselves: those are read outside of the writer's turn."""

    step: int
    token: str
    deliveries: int
    group_ids: str  # JSON array, in the order of delivery


@dataclass(frozen=True, slots=True)
class Batch:
    step: int
    token: str
    deliveries: int
    groups: Sequence[StoredGroup]


@dataclass(frozen=True, slots=True)
class RunState:
    """`trainer` is None until one registers; `started` once it has asked for its first batch."""

    trainer: RegisterTrainer | None
    current_step: int
    started: bool
    run_id: str = ""  # of this queue, until it is reset


@dataclass(frozen=True, slots=True)
class EnvRecord:
    env_id: int
    name: str  # unique: the desired name and a number
    desired_name: str
    weight: float
    group_size: int
    max_token_length: int
    min_batch_allocation: float | None
    groups_accepted: int
    connected: bool


@dataclass(frozen=True, slots=True)
class Tally:
    groups: int = 0
    sequences: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """How many groups there are in each state; their sum is the number ever accepted."""

    queued: Tally = Tally()
    leased: Tally = Tally()
    trained: Tally = Tally()
    dropped: Tally = Tally()
    dead: Tally = Tally()

    @property
    def accepted_groups(self) -> int:
        return sum(tally.groups for tally in (self.queued, self.leased, self.trained, self.dropped, self.dead))


@dataclass(frozen=True, slots=True)
class EnvLoad:
    """Who has how much in the queue: sequences by env id (None: posted without one), largest groups."""

    sequences: dict[int | None, int] = field(default_factory=dict)
    largest_group: int = 0
    largest_own_group: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    id: int
    at: float
    kind: str
    data: str  # JSON object


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of the metrics page, all as of one moment."""

    run: RunState
    envs: list[EnvRecord]
    groups: Mapping[tuple[str, int | None], Tally]  # by state and environment
    dropped: Mapping[tuple[int | None, str], int]  # groups, by environment and reason
    oldest_waiting_at: float | None
    waived: Mapping[str, int]  # minimums that were not waited for since the event that was asked for, by env's name
    newest_event: int
