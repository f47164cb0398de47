"""Why there is no batch now, in words."""

from __future__ import annotations

from treadle.hub.state import HubState


def why_no_batch(hub: HubState) -> str:
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
    told = f"{plan.reason}{held}; {len(envs)} environment{'' if len(envs) == 1 else 's'} registered"
    return f"{told}; not heard of for a while: {', '.join(silent)}" if silent else told
