"""The training loop: lease a batch, take one optimizer step, publish the weights; until the last step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from treadle.config import TrainConfig
from treadle.log import get_logger
from treadle.sync.protocol import Publishable, Receipt
from treadle.track import Tracker
from treadle.train.checkpoint import Checkpoints, Restored
from treadle.train.feed import Feed
from treadle.train.health import HealthCheck
from treadle.train.optim import Optimizer
from treadle.train.pack import pack
from treadle.train.policy import Policy
from treadle.train.reference import Reference
from treadle.train.step import FrozenLogprobs, accumulate_gradients
from treadle.train.stop import StopRequested
from treadle.train.stopwatch import Speedometer, Stopwatch
from treadle.train.token_record import NoTokens, TokenRecord

log = get_logger("trainer")

FROM_THE_START = Restored()
NO_TOKENS = NoTokens()


def _never_stop() -> None:
    """Not now."""


class Sync(Protocol):
    def publish(self, policy: Publishable, version: int) -> Receipt: ...


def train(
    config: TrainConfig,
    policy: Policy,
    optimizer: Optimizer,
    feed: Feed,
    sync: Sync,
    checkpoints: Checkpoints,
    tracker: Tracker,
    *,
    reference: Reference | None = None,
    restored: Restored = FROM_THE_START,
    tokens: TokenRecord = NO_TOKENS,
    check_stop: Callable[[], None] = _never_stop,
) -> None:
    """Train from `restored` (nothing, or a checkpoint) to `config.steps`.

    A batch is acknowledged after its step is published, and a step that was not saved is trained again after a crash,
    on the same recorded batch: nothing is skipped and nothing is trained twice.
    """
    step = saved = restored.step
    speed = Speedometer(policy, restored)
    health = HealthCheck(max_age=config.max_age + config.publish_interval - 1)
    sync.publish(policy, version=step)  # a broken sync path fails here, before the first batch is spent
    try:
        while step < config.steps:
            clock = Stopwatch()
            leased = feed.lease(step + 1)
            clock.lap("rollout_wait_s")
            batch = pack(leased.groups, config, token_cost=policy.token_cost, vocab_size=policy.vocab_size)
            frozen = FrozenLogprobs(reference)
            for epoch in range(config.epochs):
                if epoch > 0:
                    policy.update_live_weights()
                # A stop is obeyed up to the batch's first update: from there to the count, weights, optimizer and step
                # change together.
                stats = accumulate_gradients(policy, batch, config, frozen, check_stop if epoch == 0 else _never_stop)
                losses = stats.metrics()
                clock.lap("fwd_bwd_s")
                if epoch == 0:
                    # A version is published only when everything that is to be sampled under an older one has been:
                    # then the version of every batch follows from its step alone, and the same seed gives the same run.
                    feed.lease_ahead(min(step + 1 + config.max_age, config.steps))
                    clock.lap("rollout_wait_s")
                outcome = optimizer.step(step + 1, loss_is_finite=math.isfinite(losses["loss"]))
                clock.lap("optimizer_s")
                if outcome.skipped:
                    break  # nothing moved: another epoch would be skipped too, and a batch counts once
            receipt = sync.publish(policy, version=step + 1)
            clock.lap("weight_sync_s")
            metrics = {
                "policy_version": step + 1,
                **batch.metrics(version=step),
                **losses,
                **outcome.metrics(),
                **({} if batch.micros else {"grad_norm": math.nan}),  # nothing was forwarded: there is no gradient
                **receipt.metrics(),
                **speed.metrics(batch, clock, epochs=epoch + 1),
            }
            step += 1
            tracker.log(step, metrics)
            tokens.keep(step, batch, frozen)
            log.info("step", step=step, reward=metrics["reward"], grad_norm=outcome.grad_norm, seconds=clock.total_s)
            for line in health.check(step, metrics):
                log.warning("health", step=step, message=line)
            # The line comes before the checkpoint: one too many is dropped on resume, a missing one never comes back.
            if step == config.steps or (config.checkpoint_interval and step % config.checkpoint_interval == 0):
                checkpoints.save(step, policy, optimizer, speed.carried())
                saved = step
            feed.ack(leased)  # last: a crash before it repeats a step, it never skips one
    except StopRequested:
        if step > saved:
            checkpoints.save(step, policy, optimizer, speed.carried())
        raise
    checkpoints.save_final(policy, is_merged=config.merge_final)
