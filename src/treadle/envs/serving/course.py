"""What a process is to deliver, as the hub told it when it registered. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.config.env import EnvConfig
from treadle.errors import ConfigError, HubError
from treadle.wire.hub import BatchInfo, RegisteredEnv

ALMOST_ALL = 0.999  # of a batch; shares are floating-point numbers


@dataclass(frozen=True)
class Course:
    """What this process is to deliver, and how."""

    env_id: int
    run_id: str
    groups_accepted: int  # by the hub, in this environment's earlier lives
    num_steps: int
    batch_size: int  # in sequences
    group_size: int
    longest_sequence: int
    is_alone: bool  # no other environment fills the batches


def plan_course(config: EnvConfig, registered: RegisteredEnv, info: BatchInfo, share: float) -> Course:
    """What the hub said -> what to deliver. Pure."""
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
    return Course(
        env_id=registered.env_id,
        run_id=registered.run_id,
        groups_accepted=registered.groups_accepted,
        num_steps=num_steps if config.total_steps < 0 else min(num_steps, config.total_steps),
        batch_size=info.batch_size,
        group_size=config.group_size,
        longest_sequence=info.max_token_len,
        is_alone=share > ALMOST_ALL,
    )


def check_fills_batches(course: Course) -> None:
    """Of groups of one size; other environments may have groups that fit beside them."""
    if course.is_alone:
        check_divides(course)


def check_divides(course: Course) -> None:
    """Groups of one size that never add up to a batch would be sampled in vain."""
    if course.batch_size % course.group_size:
        raise ConfigError(
            f"the batch of {course.batch_size} sequences is no multiple of group_size {course.group_size}",
            fix="choose --env.group-size so that it divides the trainer's batch size",
        )
