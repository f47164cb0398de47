"""Derive what an environment process must deliver from its registration at the hub. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.config.env import EnvConfig
from treadle.errors import ConfigError, HubError
from treadle.wire.hub import BatchInfo, RegisteredEnv

ALMOST_ALL = 0.999  # of a batch; shares are floats


@dataclass(frozen=True)
class RunAssignment:
    """What this process must deliver to the current run."""

    env_id: int
    run_id: str
    groups_accepted: int  # by the hub, before this process started
    num_steps: int
    batch_size: int  # in sequences
    group_size: int
    longest_sequence: int
    is_alone: bool  # no other environment fills the batches


def make_assignment(config: EnvConfig, registered: RegisteredEnv, info: BatchInfo, share: float) -> RunAssignment:
    """Combine the registration, the batch settings and this environment's share into an assignment."""
    if registered.env_id is None or registered.num_steps is None or info.batch_size < 1:
        raise HubError(
            "the hub registered this environment but knows of no trainer",
            fix="start the trainer, then this again",
        )
    if config.group_size > info.batch_size:
        raise ConfigError(
            f"the trainer's batch of {info.batch_size} sequence is too small: a group of one teaches nothing",
            fix=f"treadle train --batch-size {config.group_size}, or --gradient-accumulation-steps {config.group_size}",
        )
    num_steps = registered.num_steps
    return RunAssignment(
        env_id=registered.env_id,
        run_id=registered.run_id,
        groups_accepted=registered.groups_accepted,
        num_steps=num_steps if config.total_steps < 0 else min(num_steps, config.total_steps),
        batch_size=info.batch_size,
        group_size=config.group_size,
        longest_sequence=info.max_token_len,
        is_alone=share > ALMOST_ALL,
    )


def check_can_fill_batches(assignment: RunAssignment) -> None:
    """Check divisibility unless other environments can fill the rest of a batch."""
    if assignment.is_alone:
        check_batch_divisible(assignment)


def check_batch_divisible(assignment: RunAssignment) -> None:
    """Raise ConfigError if groups of this size never add up to a full batch."""
    if assignment.batch_size % assignment.group_size:
        raise ConfigError(
            f"the batch of {assignment.batch_size} sequences is no multiple of group_size {assignment.group_size}",
            fix="choose --env.group-size so that it divides the trainer's batch size",
        )
