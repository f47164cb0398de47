"""Requests and answers of the hub: Atropos' routes, and ours under /v1."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from treadle.wire.engines import ServedEngine
from treadle.wire.groups import ScoredGroup


class Trackers(msgspec.Struct, frozen=True, kw_only=True):
    """Where the trainer logs to, for environments that log to the same places."""

    sinks: tuple[str, ...] = ()  # wandb, tensorboard, trackio
    project: str = ""
    group: str = ""


class RegisterTrainer(msgspec.Struct, kw_only=True):
    wandb_group: str
    wandb_project: str
    batch_size: int  # sequences, not groups
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int
    vocab_size: int | None = None  # ours: token ids in posted groups must be below it
    publish_interval: int = 1  # ours: steps from one publish of the weights to the next
    trackers: Trackers = Trackers()  # ours


class RegisterEnv(msgspec.Struct, kw_only=True):
    max_token_length: int
    desired_name: str | None
    weight: float | None
    group_size: int
    min_batch_allocation: float | None = None


class RegisteredEnv(msgspec.Struct, kw_only=True):
    """`status` is "success", or "wait for trainer to start" with nothing else filled in."""

    status: str
    env_id: int | None = None
    wandb_name: str | None = None
    checkpoint_dir: str | None = None
    starting_step: int | None = None
    checkpoint_interval: int | None = None
    num_steps: int | None = None
    groups_accepted: int = 0  # ours: how many groups this name has already delivered; the cursor after a restart
    run_id: str = ""  # ours: another one means another run, or that the hub was reset
    publish_interval: int = 1  # ours: of the trainer, as it registered
    trackers: Trackers = Trackers()  # ours: likewise


class BatchInfo(msgspec.Struct, kw_only=True):
    """The answer of GET /info."""

    batch_size: int  # sequences per optimizer step; -1 while no trainer is registered
    max_token_len: int  # longest sequence the trainer takes; 0 or less: no limit


class Progress(msgspec.Struct, kw_only=True):
    """The answer of GET /status."""

    current_step: int  # optimizer steps taken
    queue_size: int = 0


class LeaseRequest(msgspec.Struct, kw_only=True):
    """Ask for the batch of one optimizer step: the recorded one when the step was begun before, else a new one."""

    step: Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0})]
    holder: Annotated[str, msgspec.Meta(extra_json_schema={"minLength": 1})]
    wait_s: float = 0.0  # answer at once, or hold the call until a batch can be formed


class LeaseUpdate(msgspec.Struct, kw_only=True):
    """Body of renew, ack and nack."""

    token: str
    reason: str = ""
    counts: bool = True  # nack: whether this was a delivery that failed; not when the trainer was merely stopped


class EnvStatus(msgspec.Struct, kw_only=True):
    env_id: int
    name: str
    connected: bool
    group_size: int
    weight: float
    groups_accepted: int
    idle_s: float  # seconds since it was last heard of


class EnvState(msgspec.Struct, kw_only=True):
    """GET /v1/envs/{env_id}: what an environment decides by whether to sample more."""

    step: int  # optimizer steps taken
    num_steps: int  # that the trainer wants to take
    batch_size: int  # in sequences; 0 while no trainer is registered
    untrained_sequences: int  # its own: those that wait, and those in batches that were given out
    trainer_waits: bool  # it asked for a batch, and there is none
    share: float  # of a batch that is to come from it
    num_present: int = 1  # environments that are registered and alive, this one included


class HubStatus(msgspec.Struct, kw_only=True):
    """GET /v1/status. `accepted_groups` is the sum of the five counts of groups."""

    step: int  # the last one acknowledged
    started: bool
    batch_size: int | None  # None until a trainer registers
    queued_groups: int
    queued_sequences: int
    queued_bytes: int
    leased_groups: int
    trained_groups: int
    dropped_groups: int
    dead_groups: int
    accepted_groups: int
    envs: list[EnvStatus]


Kind = Literal["hub", "engine", "env", "trainer"]


class WaitReport(msgspec.Struct, frozen=True, kw_only=True):
    """One wait of a process."""

    what: str
    seconds: float
    of: str = ""  # the process that must act next: "hub", "engine", "env", "trainer"
    holding: str = ""  # what stands still meanwhile
    problem: str = ""
    fix: str = ""
    is_late: bool = False  # past its deadline
    deadline_s: float | None = None  # None: it has no deadline, or the sender does not report it


class WorkReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far a long piece of work has come: an evaluation, the loading of a model."""

    what: str
    done: int
    total: int


GENERATED_TOKENS = "generated_tokens"  # of the `counts` of an engine: sampled since it was started


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/reports: how a process stands, every two seconds."""

    kind: Kind
    name: str
    machine: str
    pid: int
    state: str = ""  # "training step 17"; "ended" is its last word
    policy_version: int | None = None
    memory_bytes: int = 0
    problem: str = ""  # what is wrong with its work, in words
    fix: str = ""
    counts: dict[str, float] = {}
    env_id: int | None = None  # of an environment, once it is registered
    work: WorkReport | None = None
    waits: list[WaitReport] = []  # the longest first
    serves: ServedEngine | None = None  # of an engine that takes part in this run's fleet


class ReportTaken(msgspec.Struct, frozen=True, kw_only=True):
    """`dump`: somebody waits too long for this process: why it should write its stacks to its log."""

    dump: str = ""


class LastReport(msgspec.Struct, frozen=True, kw_only=True):
    report: ProcessReport
    heard_s: float  # seconds since it was last heard of


class Processes(msgspec.Struct, kw_only=True):
    """GET /v1/processes"""

    processes: list[LastReport]


# What the other routes answer. A field of type UnsetType is left out where it does not apply.

Uint128 = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0, "maximum": 2**128 - 1})]
Left = msgspec.UnsetType
LEFT_OUT = msgspec.UNSET


class Service(msgspec.Struct, kw_only=True):
    """GET /"""

    message: str


class RegisteredTrainer(msgspec.Struct, kw_only=True):
    """POST /register"""

    uuid: Uint128


class Disconnected(msgspec.Struct, kw_only=True):
    """POST /disconnect-env. An unknown environment is reported in this answer, with status 200."""

    status: Literal["success", "failure"]
    error: str | Left = LEFT_OUT


class TrackerInfo(msgspec.Struct, kw_only=True):
    """GET /wandb_info; null until a trainer registers."""

    group: str | None
    project: str | None


class PostedGroup(msgspec.Struct, kw_only=True):
    """POST /scored_data. "buffered": stored, and of another size than its environment registered."""

    status: Literal["received", "buffered", "duplicate"]
    buffer_size: int | Left = LEFT_OUT  # sequences that wait in such groups


class PostedGroups(msgspec.Struct, kw_only=True):
    """POST /scored_data_list and POST /v1/groups."""

    status: Literal["received", "duplicate"]
    groups_processed: int
    buffered: int | Left = LEFT_OUT
    last_buffer_size: int | Left = LEFT_OUT


class TakenBatch(msgspec.Struct, kw_only=True):
    """GET /batch: null while no batch can be made."""

    batch: list[ScoredGroup] | None
    status: Literal["error"] | Left = LEFT_OUT
    message: str | Left = LEFT_OUT


class LatestExample(msgspec.Struct, kw_only=True):
    """GET /latest_example: a group, or empty lists while there is none."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None
    ref_logprobs: list[list[float]] | None
    messages: list[list[dict[str, Any]]] | None
    generation_params: dict[str, Any] | list[Any] | None
    inference_logprobs: list[list[float]] | None
    images: Any


class EnvProgress(msgspec.Struct, kw_only=True):
    """GET /status-env: the step and the queue as one environment sees them, in groups of its size."""

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float


class Renewed(msgspec.Struct, kw_only=True):
    status: Literal["renewed"]
    lease_s: float


class Acknowledged(msgspec.Struct, kw_only=True):
    status: Literal["acknowledged"]
    current_step: int


class Returned(msgspec.Struct, kw_only=True):
    status: Literal["returned", "dead-lettered"]


class DeadLetter(msgspec.Struct, kw_only=True):
    """A group whose deliveries failed. It is kept, and not given out again."""

    id: int
    env_id: int | None
    size: int
    item: int | None
    policy_version: int | None
    step: int
    reason: str


class DeadLetters(msgspec.Struct, kw_only=True):
    dead_letters: list[DeadLetter]  # the newest first


class WasReset(msgspec.Struct, kw_only=True):
    status: Literal["reset"]


class Explanation(msgspec.Struct, kw_only=True):
    reason: str


class Health(msgspec.Struct, kw_only=True):
    status: Literal["ok"]


class HubEvent(msgspec.Struct, kw_only=True):
    """The data of an event of GET /v1/events."""

    id: int
    at: float  # Unix time
    kind: str
    data: dict[str, Any]


class Problem(msgspec.Struct, kw_only=True):
    """What is wrong with which field: loc is ["body", "tokens", 0, 3]."""

    type: str
    loc: list[str | int]
    msg: str
    input: Any


class Refusal(msgspec.Struct, kw_only=True):
    """Every answer that is not 200."""

    detail: str | list[Problem]
    incident: str | Left = LEFT_OUT  # of an internal error: where to look in the hub's log
