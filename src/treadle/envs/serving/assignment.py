"""Decide what an environment must deliver, in which pace, and how many groups the stream may start now. Pure.

    untrained sequences    waiting at the hub or in a batch (counted by the hub)  +  spooled  +  in flight
    their maximum          (1 + max_age) steps of this environment's share

So the engine has work while the trainer trains, and a group is trained on at most `max_age` policy versions after it
was started. Groups in flight count by the share of groups that is kept, because groups with equal scores may be
dropped. Within this maximum, InFlightLimit allows as many groups in flight as fill the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from treadle.config.env import EnvConfig
from treadle.envs.base import Environment
from treadle.errors import ConfigError, HubError
from treadle.wire.generate import EngineHealth
from treadle.wire.hub import BatchInfo, EnvState, RegisteredEnv

Pace = Literal["waves", "stream"]

ALMOST_ALL = 0.999  # of a batch; shares are floats
FIRST_LIMIT = 8  # groups in flight, before the engine's first report
QUEUED_SHARE = 0.05  # sequences started beyond the engine's max_num_seqs, so that a free slot is filled at once
MIN_KEPT_SHARE = 0.1  # lower estimates are not planned with: they would start too many groups
FULL_KV_CACHE = 0.9  # usage from which more sequences would be preempted and computed again
SPEED_WINDOW_S = 5.0  # tokens/s are an average of at least this time: tokens are counted when a completion ends
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
        else f"--env.items {config.items}" if config.items
        else ""
    )  # fmt: skip
    if config.pace == "waves" and against:
        raise ConfigError(f"--env.pace waves does not go with {against}", fix="--env.pace stream")
    return "stream" if config.pace == "stream" or against else "waves"


class GroupsToStart(NamedTuple):
    """How many groups may be started, and what limits it: "max_age 1"."""

    num_groups: int
    limited_by: str


def room(
    standing: EnvState,
    *,
    max_age: int,
    group_sequences: float,
    num_spooled: int,
    num_in_flight: int,
    limit: InFlightLimit,
    kept_share: float = 1.0,
) -> GroupsToStart:
    """`group_sequences`: average sequences of a group; `kept_share`: share of groups that is not dropped.

    >>> standing = EnvState(
    ...     step=4, num_steps=100, batch_size=64, untrained_sequences=64, trainer_waits=False, share=1.0
    ... )
    >>> room(standing, max_age=1, group_sequences=8.0, num_spooled=1, num_in_flight=3, limit=InFlightLimit(64))
    GroupsToStart(num_groups=4, limited_by='max_age 1')
    """
    per_step = standing.batch_size * standing.share
    needed = (standing.num_steps - standing.step) * per_step
    allowed = (1 + max_age) * per_step
    missing = (min(allowed, needed) - standing.untrained_sequences) / group_sequences - num_spooled
    # With max_age 0, a group more than needed would be trained on after the next version: expect no drops there.
    wanted = _groups_to_sample(missing, kept_share if max_age else 1.0) - num_in_flight
    if needed > 0 and wanted < 1 and num_spooled + num_in_flight == 0 and _is_starving(standing, max_age):
        wanted = 1
    if wanted > limit.value - num_in_flight:
        return GroupsToStart(max(0, limit.value - num_in_flight), limit.reason)
    return GroupsToStart(max(0, wanted), f"max_age {max_age}" if allowed <= needed else "the end of the run")


def _groups_to_sample(missing: float, kept_share: float) -> int:
    """How many groups to have in flight, so that `missing` are kept and rarely (two standard deviations) more.

    >>> _groups_to_sample(32, 1.0), _groups_to_sample(32, 0.5), _groups_to_sample(-1.5, 0.5)
    (32, 49, -1)
    """
    if missing <= 0 or kept_share >= 1:
        return math.ceil(missing)
    kept = max(kept_share, MIN_KEPT_SHARE)
    spread = math.sqrt(kept * (1 - kept))
    # n * kept + 2 * sqrt(n) * spread = missing, solved for the root of n
    root = (math.sqrt(spread**2 + kept * missing) - spread) / kept
    return max(math.ceil(missing), math.floor(root**2))


def _is_starving(standing: EnvState, max_age: int) -> bool:
    """A trainer that waits although as much is there as should: what waits does not fit into a batch.

    Groups of several sizes do that, and environments that died and left their share open. One more group at a time is
    begun then, up to a bound.
    """
    return (
        standing.trainer_waits and standing.untrained_sequences < STARVING_FACTOR * (1 + max_age) * standing.batch_size
    )


@dataclass
class InFlightLimit:
    """Maximum of groups in flight: as many as fill the engine, from its health reports.

    An engine that reports max_num_seqs is filled at the first report. If requests wait because its KV cache is full,
    the limit falls to the share that runs. If none wait and it could run more (some completions of a group have
    finished, or groups are being scored), the limit grows. For other engines it grows until requests wait.
    """

    at_most: int  # 0 or less: no other maximum than the engine's
    value: int = FIRST_LIMIT
    reason: str = "the first report of the engine"  # what limits the groups in flight
    busy_share: float | None = None  # running sequences / max_num_seqs; None: unknown
    tokens_per_s: float = 0.0
    _filling: int = 0  # groups with max_num_seqs sequences and QUEUED_SHARE more
    _counted: tuple[int, float] = (0, 0.0)  # the engine's tokens and seconds at the last measurement

    def __post_init__(self) -> None:
        self._set(self.value, self.reason)

    def update(self, health: EngineHealth, *, group_size: int, num_in_flight: int) -> None:
        """Ignores reports of an engine that is held: nothing runs while its weights change."""
        if health.status != "ok":
            return
        self._measure_speed(health)
        is_used_up = num_in_flight >= self.value
        if health.max_num_seqs:
            self._update_filling(health, group_size)
            self._update_known(health, group_size, num_in_flight, is_used_up=is_used_up)
        elif health.num_waiting > health.num_running:
            self._set(int(self.value * 0.8), "the engine's queue")
        elif health.num_waiting == 0 and is_used_up:
            self._set(self.value + max(1, self.value // 2), self.reason)

    def _update_filling(self, health: EngineHealth, group_size: int) -> None:
        self.busy_share = min(1.0, health.num_running / health.max_num_seqs)
        filling = math.ceil(health.max_num_seqs * (1 + QUEUED_SHARE) / group_size)
        if filling != self._filling:  # the first report, or a changed number of engines
            self._filling = filling
            self._set(filling, _engine_size(health))

    def _update_known(self, health: EngineHealth, group_size: int, num_in_flight: int, *, is_used_up: bool) -> None:
        num_free = health.max_num_seqs - health.num_running
        is_cache_full = health.kv_cache_usage >= FULL_KV_CACHE
        may_wait = max(group_size, QUEUED_SHARE * health.num_running)
        if is_cache_full and num_free > group_size and health.num_waiting > may_wait:
            running_share = health.num_running / (health.num_running + health.num_waiting)
            self._set(min(self.value, math.ceil(num_in_flight * running_share) + 1), "the engine's KV cache")
        elif is_used_up and not is_cache_full and num_free > 0 and health.num_waiting == 0:
            larger = self.value + max(1, self.value // 4)
            self._set(larger, self.reason if larger < self._filling else _engine_size(health))

    def _measure_speed(self, health: EngineHealth) -> None:
        tokens, seconds = health.generated_tokens - self._counted[0], health.generating_s - self._counted[1]
        was_restarted = tokens < 0 or seconds < 0
        if seconds < SPEED_WINDOW_S and not was_restarted:
            return
        self._counted = health.generated_tokens, health.generating_s
        if not was_restarted:
            self.tokens_per_s = tokens / seconds

    def _set(self, value: int, reason: str) -> None:
        if 0 < self.at_most < value:
            value, reason = self.at_most, f"--env.max-num-workers {self.at_most}"
        self.value, self.reason = max(1, value), reason


def _engine_size(health: EngineHealth) -> str:
    return f"the engine's maximum of {health.max_num_seqs} sequences"


def describe_pace(limit: InFlightLimit, num_in_flight: int, limited_by: str) -> str:
    """
    >>> describe_pace(InFlightLimit(0, busy_share=0.384, tokens_per_s=14200), 8, "max_age 1")
    'engine 38 % busy (14.2k tokens/s): 8 groups in flight, limited by max_age 1'
    """
    busy = "" if limit.busy_share is None else f" {limit.busy_share:.0%} busy".replace("%", " %")
    speed = f" ({limit.tokens_per_s / 1000:.1f}k tokens/s)" if limit.tokens_per_s else ""
    groups = f"{num_in_flight} group{'' if num_in_flight == 1 else 's'} in flight, limited by {limited_by}"
    return f"engine{busy}{speed}: {groups}" if busy or speed else groups
