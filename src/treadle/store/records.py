"""What goes into the store and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from treadle.wire.hub import RegisterTrainer


class Waiting(NamedTuple):
    """A queued group, as the choice of a batch sees it."""

    id: int
    size: int


# (waiting groups, oldest first; sequences wanted) -> ids of the chosen, or None when no choice is exact
Choose = Callable[[Sequence[Waiting], int], list[int] | None]


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    lease_s: float
    max_deliveries: int
    choose: Choose


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A checked group on its way in. `payload` is JSON with just Atropos' keys, so it leaves unparsed."""

    payload: bytes
    size: int
    num_tokens: int
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
    payload: bytes
    policy_version: int | None
    item: int | None
    metrics: bytes | None


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


@dataclass(frozen=True, slots=True)
class EnvRecord:
    env_id: int
    name: str  # unique: the desired name and a number
    desired_name: str
    weight: float
    group_size: int
    max_token_length: int
    min_batch_allocation: float | None
    connected: bool
    groups_accepted: int


@dataclass(frozen=True, slots=True)
class Tally:
    groups: int = 0
    sequences: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """How many groups there are in each state; their sum is the number ever accepted."""

    queued: Tally = Tally()
    leased: Tally = Tally()
    trained: Tally = Tally()
    dead: Tally = Tally()

    @property
    def accepted_groups(self) -> int:
        return self.queued.groups + self.leased.groups + self.trained.groups + self.dead.groups


@dataclass(frozen=True, slots=True)
class EnvLoad:
    """Who has how much in the queue: sequences by env id (None: posted without one), largest groups."""

    sequences: dict[int | None, int] = field(default_factory=dict)
    largest_group: int = 0
    largest_own_group: int = 0


@dataclass(frozen=True, slots=True)
class DeadGroup:
    id: int
    env_id: int | None
    size: int
    item: int | None
    policy_version: int | None
    step: int
    reason: str
