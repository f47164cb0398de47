"""The training loop: lease a batch, take one optimizer step, publish the weights; until the last step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from treadle.config import TrainConfig
from treadle.log import get_logger
from treadle.sync.receipt import Publishable, Receipt
from treadle.track import Tracker
from treadle.train.checkpoint import Checkpoints
from treadle.train.feed import Feed
from treadle.train.loss import LossConfig, policy_loss
from treadle.train.optim import Optimizer
from treadle.train.pack import PackedBatch, pack
from treadle.train.policy import Policy
from treadle.train.stop import StopRequested

log = get_logger("trainer")


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
    first_step: int = 0,
    check_stop: Callable[[], None] = lambda: None,
) -> None:
    """Train from `first_step` (0, or that of a restored checkpoint) to `config.steps`.

    A batch is acknowledged after its step is published, and a step that was not saved is trained again after a crash,
    on the same recorded batch: nothing is skipped and nothing is trained twice.
    """
    step = saved = first_step
    sync.publish(policy, version=step)  # a broken sync path fails here, before the first batch is spent
    started = time.monotonic()
    try:
        while step < config.steps:
            clock = _Stopwatch()
            leased = feed.lease(step + 1)
            clock.lap("wait_s")
            batch = pack(
                leased.groups,
                normalize_std=config.normalize_std,
                micro_tokens=config.micro_tokens or 768,
                all_tokens=config.kl_coef > 0,
            )
            sums = accumulate_gradients(policy, batch, config, check_stop)
            clock.lap("gradient_s")
            # A version is published only when everything that is to be sampled under an older one has been: then the
            # version of every batch follows from its step alone, and the same seed gives the same run.
            feed.lease_ahead(min(step + 1 + config.max_age, config.steps))
            clock.lap("wait_s")
            # From here to the count no stop is obeyed: masters, optimizer and step change together.
            grad_norm, rate = optimizer.step(step + 1)
            clock.lap("optimizer_s")
            receipt = sync.publish(policy, version=step + 1)
            clock.lap("publish_s")
            metrics = batch.metrics(version=step)
            step += 1
            tracker.log(
                step,
                {
                    "time_s": time.monotonic() - started,
                    **metrics,
                    **loss_metrics(sums),
                    "optim/grad_norm": grad_norm,
                    "optim/lr": rate,
                    "optim/skipped_in_a_row": optimizer.num_skipped_in_a_row,
                    **clock.metrics(),
                    **receipt.metrics(),
                    "perf/tokens_per_s": batch.num_loss_tokens / clock.total_s,
                },
            )
            log.info("step", step=step, reward=metrics["reward/mean"], grad_norm=grad_norm, seconds=clock.total_s)
            # The line comes before the checkpoint: one too many is dropped on resume, a missing one never comes back.
            if step == config.steps or (config.checkpoint_interval and step % config.checkpoint_interval == 0):
                checkpoints.save(step, policy, optimizer)
                saved = step
            feed.ack(leased)  # last: a crash before it repeats a step, it never skips one
    except StopRequested:
        if step > saved:
            checkpoints.save(step, policy, optimizer)
        raise
    checkpoints.save_final(policy)


def accumulate_gradients(
    policy: Policy, batch: PackedBatch, config: TrainConfig, check_stop: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Backward through every micro. The loss is a mean over the tokens of the whole step, however it is split."""
    objective = LossConfig(config.clip_low, config.clip_high, config.kl_coef)
    sums: dict[str, float] = defaultdict(float)
    try:
        for micro in batch.micros:
            check_stop()
            logprobs_L, entropy_L = policy.score(micro)
            loss, stats = policy_loss(
                logprobs_L,
                micro.rollout_logprobs_L.to(policy.device),
                micro.advantages_L.to(policy.device),
                objective,
            )
            (loss / batch.num_loss_tokens).backward()
            for name, value in stats.items():
                sums[name] += value
            sums["entropy"] += float(entropy_L.sum())
    except StopRequested:
        policy.zero_gradients()  # the step is taken whole or not at all
        raise
    return sums


def loss_metrics(sums: dict[str, float]) -> dict[str, float]:
    tokens = max(sums["tokens"], 1.0)
    return {
        "loss/policy": sums["policy"] / tokens,
        "loss/ratio_mean": sums["ratio"] / tokens if sums["tokens"] else 1.0,
        "loss/clipped_frac": sums["clipped"] / tokens,
        "loss/kl": sums["kl"] / tokens,
        "loss/entropy": sums["entropy"] / tokens,
        "mismatch/logprob_abs_diff_mean": sums["abs_diff"] / tokens,
    }


class _Stopwatch:
    """Laps of one step: {"perf/wait_s": .., "perf/train_s": .., "perf/step_s": ..}."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total_s(self) -> float:
        return self._last - self._start

    def metrics(self) -> dict[str, float]:
        laps = {f"perf/{name}": seconds for name, seconds in self._laps.items()}
        train_s = self._laps["gradient_s"] + self._laps["optimizer_s"]
        return {"perf/step_s": self.total_s, "perf/train_s": train_s, **laps}
