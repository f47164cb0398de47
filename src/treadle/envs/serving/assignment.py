"""Decide what an environment must deliver, in which pace, and how many groups to begin now. Pure.

    not trained yet    waiting at the hub or in a batch (the hub counts)  +  scored, on their way (spool)  +  in flight
    may be at most     (1 + max_age) steps' worth of this environment's share

So the engine has work while the trainer trains, and a group is trained on at most `max_age` policy versions after it
was begun.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from treadle.config.env import EnvConfig
from treadle.envs.base import Environment
from treadle.errors import ConfigError, HubError
from treadle.wire.hub import BatchInfo, EnvStanding, RegisteredEnv

Pace = Literal["waves", "stream"]

ALMOST_ALL = 0.999  # of a batch; shares are floats
FIRST_LIMIT = 8  # groups in flight, before anything is known of the engine
STARVING_FACTOR = 2  # how much more may wait when a trainer finds no batch in what there is


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


def choose_pace(config: EnvConfig, environment: Environment) -> Pace:
    """Waves need to know beforehand how many groups a prompt gives, and of which size."""
    against = (
        "several turns" if environment.has_turns
        else "--env.ensure-scores-are-not-same" if config.ensure_scores_are_not_same
        else "--env.sampling difficulty" if config.sampling == "difficulty"
        else ""
    )  # fmt: skip
    if config.pace == "waves" and against:
        raise ConfigError(f"--env.pace waves does not go with {against}", fix="--env.pace stream")
    return "stream" if config.pace == "stream" or against else "waves"


def room(
    standing: EnvStanding, *, max_age: int, group_sequences: float, num_spooled: int, num_in_flight: int, limit: int
) -> int:
    """How many groups to begin; `group_sequences` is what a group has come to on average.

    >>> standing = EnvStanding(
    ...     step=4, num_steps=100, batch_size=64, untrained_sequences=64, trainer_waits=False, share=1.0
    ... )
    >>> room(standing, max_age=1, group_sequences=8.0, num_spooled=1, num_in_flight=3, limit=64)
    4
    """
    per_step = standing.batch_size * standing.share
    needed = (standing.num_steps - standing.step) * per_step
    num_coming = num_spooled + num_in_flight
    outstanding = standing.untrained_sequences + num_coming * group_sequences
    wanted = math.ceil((min((1 + max_age) * per_step, needed) - outstanding) / group_sequences)
    if needed > 0 and wanted < 1 and num_coming == 0 and _is_starving(standing, max_age):
        wanted = 1
    return max(0, min(wanted, limit - num_in_flight))


def _is_starving(standing: EnvStanding, max_age: int) -> bool:
    """A trainer that waits although as much is there as should: what waits does not fit into a batch.

    Groups of several sizes do that, and environments that died and left their share open. One more group at a time is
    begun then, up to a bound.
    """
    return (
        standing.trainer_waits and standing.untrained_sequences < STARVING_FACTOR * (1 + max_age) * standing.batch_size
    )


@dataclass
class FlightLimit:
    """Groups in flight at most: grows while the engine takes all there are at once, shrinks when they pile up there."""

    at_most: int  # 0 or less: no bound but the engine's
    value: int = FIRST_LIMIT

    def __post_init__(self) -> None:
        self.value = self._bounded(self.value)

    def learn(self, *, num_running: int, num_waiting: int, num_in_flight: int) -> None:
        """From the engine's own counts, asked for now and then."""
        if num_waiting > num_running:
            self.value = self._bounded(int(self.value * 0.8))
        elif num_waiting == 0 and num_in_flight >= self.value:
            self.value = self._bounded(self.value + max(1, self.value // 2))

    def _bounded(self, value: int) -> int:
        return max(1, min(value, self.at_most) if self.at_most > 0 else value)
