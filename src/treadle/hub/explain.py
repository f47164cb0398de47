"""Why there is no batch now, in words."""

from __future__ import annotations

from treadle.hub.state import HubState
from treadle.watch.telling import tell_process, tell_work
from treadle.watch.watchdog import About, report_of
from treadle.wire.hub import ProcessStanding


def explain(hub: HubState) -> str:
    """All that is known: why there is no batch, and what the processes that should make one wait for."""
    # The trainer's own wait is this very question.
    others = [standing for standing in hub.board.standings() if standing.report.kind != "trainer"]
    own = ProcessStanding(report=report_of("hub", "hub", About(), hub.store.waits), heard_s=0.0)
    return "; ".join([why_no_batch(hub), *(line for standing in [own, *others] for line in tell_process(standing))])


def why_no_batch(hub: HubState) -> str:
    """The same for as long as nothing happens."""
    store = hub.store
    trainer = store.run_state().trainer
    if trainer is None:
        return "no trainer has registered, so the size of a batch is not known"
    plan = store.plan(trainer.batch_size, hub.terms)
    if plan.ids is not None:
        return "a batch can be formed: it waits for the trainer to ask"
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
    works = [standing.report.work for standing in hub.board.standings() if standing.report.work is not None]
    reason = "; ".join([reason, *map(tell_work, works)])
    return f"{reason}; not heard of for a while: {', '.join(silent)}" if silent else reason
