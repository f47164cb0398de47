"""Requests and answers of the hub: Atropos' routes, and ours under /v1."""

from __future__ import annotations

import msgspec

from treadle.wire.groups import LeasedBatch


class RegisterTrainer(msgspec.Struct, kw_only=True):
    wandb_group: str
    wandb_project: str
    batch_size: int  # sequences, not groups
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


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

    step: int
    holder: str
    wait_s: float = 0.0  # answer at once, or hold the call until a batch can be formed


class LeaseAnswer(msgspec.Struct, kw_only=True):
    batch: LeasedBatch | None
    reason: str = ""  # why there is no batch, in words


class LeaseUpdate(msgspec.Struct, kw_only=True):
    """Body of renew, ack and nack."""

    token: str
    reason: str = ""


class EnvStatus(msgspec.Struct, kw_only=True):
    env_id: int
    name: str
    connected: bool
    group_size: int
    weight: float
    groups_accepted: int
    idle_s: float  # seconds since it was last heard of


class HubStatus(msgspec.Struct, kw_only=True):
    """GET /v1/status. `accepted_groups` is the sum of the four counts of groups."""

    step: int  # the last one acknowledged
    started: bool
    batch_size: int | None  # None until a trainer registers
    queued_groups: int
    queued_sequences: int
    leased_groups: int
    trained_groups: int
    dead_groups: int
    accepted_groups: int
    envs: list[EnvStatus]
