"""Compute what /status-env answers, and explain why there is no batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.hub.state import HubState
from treadle.store import EnvLoad, EnvRecord, RunState
from treadle.watch.describe import describe_problems, describe_work
from treadle.watch.watchdog import ProcessFacts, report_of
from treadle.wire.hub import ProcessStanding

# ---- figures for environments

MIN_ENV_WEIGHT = 0.01


def env_status(env: EnvRecord, envs: Sequence[EnvRecord], load: EnvLoad, run: RunState) -> dict[str, int | float]:
    """Atropos' figures, from which its environments decide whether to generate more.

    `queue_size` is in groups of the asking environment: its own sequences, and those of the others as far as
    they exceed the share of a batch that is set aside for them.
    """
    batch_size = max(0, run.trainer.batch_size) if run.trainer else 0
    group_size = max(1, env.group_size, load.largest_own_group)
    largest = max(1, load.largest_group)
    minimum = {e.env_id: min(1.0, max(0.0, e.min_batch_allocation or 0.0)) for e in envs if e.connected}
    own = load.sequences.get(env.env_id, 0)
    others = 0
    for env_id, sequences in load.sequences.items():
        if env_id != env.env_id:
            reserved = int(batch_size * minimum.get(env_id, 0.0)) if env_id is not None else 0
            others += max(0, math.ceil(sequences / largest) * largest - reserved)
    return {
        "current_step": run.current_step,
        "queue_size": (own + others) // group_size,
        "unallocated_fraction": 1.0 - min(1.0, sum(minimum.values())),
        "self_queue_size": own // group_size,
        "max_group_size": largest,
        "env_weight": _share(env, envs),
    }


def _share(env: EnvRecord, envs: Sequence[EnvRecord]) -> float:
    total = sum(other.max_token_length * max(0.0, other.weight) for other in envs if other.connected)
    if total <= 0 or not math.isfinite(total):
        return MIN_ENV_WEIGHT
    share = env.max_token_length * env.weight / total
    return max(MIN_ENV_WEIGHT, share) if math.isfinite(share) else MIN_ENV_WEIGHT


def batch_share(env: EnvRecord, present: Sequence[EnvRecord]) -> float:
    """The share of a batch that is to come from an environment: its minimum, and of the rest what its weight gives.

    The shares of all that are present are 1 together.
    """
    minimums = {e.env_id: min(1.0, max(0.0, e.min_batch_allocation or 0.0)) for e in present}
    reserved = sum(minimums.values())
    weights = {e.env_id: max(0.0, e.weight) if math.isfinite(e.weight) else 0.0 for e in present}
    total = sum(weights.values())
    by_weight = weights[env.env_id] / total if total > 0 else 1 / len(present)
    return minimums[env.env_id] / max(1.0, reserved) + max(0.0, 1.0 - reserved) * by_weight


# ---- explanations


def explain(hub: HubState) -> str:
    """All that is known: why there is no batch, and what the processes that should make one wait for."""
    # The trainer's own wait is this very question.
    others = [standing for standing in hub.process_reports.standings() if standing.report.kind != "trainer"]
    own = ProcessStanding(report=report_of("hub", "hub", ProcessFacts(), hub.store.waits), heard_s=0.0)
    return "; ".join(
        [why_no_batch(hub), *(line for standing in [own, *others] for line in describe_problems(standing))]
    )


def why_no_batch(hub: HubState) -> str:
    """The same for as long as nothing happens."""
    store = hub.store
    trainer = store.run_state().trainer
    if trainer is None:
        return "no trainer has registered, so the size of a batch is not known"
    plan = store.plan(trainer.batch_size, hub.terms)
    if plan.ids is not None:
        return "a batch is ready and waits for the trainer"
    leased = store.counts().leased.groups
    held = f"; {leased} more are in batches that were given out" if leased else ""
    envs = [env for env in store.envs() if env.connected]
    silent = [env.name for env in envs if not hub.presence.is_alive(env.env_id)]
    reason = f"{plan.reason}{held}; {len(envs)} environment{'' if len(envs) == 1 else 's'} registered"
    reason += "".join(
        f"; the groups of {env.name} ({env.group_size}) never fit into a batch of {trainer.batch_size}: lower "
        "--env.group-size, or raise the trainer's --batch-size"
        for env in envs
        if env.group_size > trainer.batch_size
    )
    works = [standing.report.work for standing in hub.process_reports.standings() if standing.report.work is not None]
    reason = "; ".join([reason, *map(describe_work, works)])
    return f"{reason}; silent for a while: {', '.join(silent)}" if silent else reason
