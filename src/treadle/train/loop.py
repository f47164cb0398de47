"""Run the training loop: lease a batch, accumulate gradients, take one optimizer step, publish the weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from treadle.config import TrainConfig
from treadle.log import get_logger
from treadle.sync.protocol import Publishable, Receipt
from treadle.track import Tracker
from treadle.track.jsonl import HealthFile
from treadle.train.checkpoint import Checkpoints, Restored, Totals
from treadle.train.checkpoint_files import random_state, restore_random_state
from treadle.train.feed import Feed
from treadle.train.health import HealthCheck
from treadle.train.loss import LossStats, LossTokens, policy_loss
from treadle.train.optim import Optimizer
from treadle.train.pack import Micro, PackedBatch, pack
from treadle.train.policy import Policy
from treadle.train.reference import Reference
from treadle.train.stop import StopRequested

log = get_logger("trainer")

FROM_THE_START = Restored()
# bf16 matrix products per second according to a GPU's data sheet, dense, in 1e12.
PEAK_TFLOPS = {
    "H200": 989, "H100 PCIe": 756, "H100": 989, "GH200": 989, "B200": 2250, "B300": 2250, "A100": 312, "L40S": 362,
    "L40": 181, "L4": 121, "A10G": 70, "A40": 150, "RTX 5090": 210, "RTX 4090": 165, "RTX 3090": 71, "RTX A6000": 155,
}  # fmt: skip


class FrozenLogprobs:
    """Logprobs that stay fixed while a batch is trained on: the reference's, and the policy's from before the first
    update. Stored by micro, because later epochs use the same micros."""

    def __init__(self, reference: Reference | None = None) -> None:
        self._reference = reference
        self._of_reference: dict[int, Tensor] = {}
        self.own: dict[int, Tensor] = {}  # of this rank's micros, by their index in the batch

    def add_to(self, index: int, micro: Micro, policy: Policy) -> LossTokens:
        if self._reference is not None and index not in self._of_reference:
            self._of_reference[index] = self._reference(micro)
        tokens = micro.loss_tokens
        return replace(
            tokens,
            rollout_logprobs_L=tokens.rollout_logprobs_L.to(policy.device),
            old_logprobs_L=self.own.get(index),
            reference_logprobs_L=self._of_reference.get(index),
            advantages_L=tokens.advantages_L.to(policy.device),
            weights_L=tokens.weights_L.to(policy.device),
            sequences_L=tokens.sequences_L.to(policy.device),
        )

    def keep(self, index: int, logprobs_L: Tensor) -> None:
        """Keep the logprobs of the first epoch."""
        self.own.setdefault(index, logprobs_L.detach())


def accumulate_gradients(
    policy: Policy,
    batch: PackedBatch,
    config: TrainConfig,
    frozen: FrozenLogprobs | None = None,
    check_stop: Callable[[], None] = lambda: None,
) -> LossStats:
    """Run forward and backward through every micro. The loss is a mean over the whole step, so the result does not
    depend on how the batch was split.

    Each rank takes its share of the micros; gradients are summed over ranks in the optimizer's step.
    """
    frozen = frozen or FrozenLogprobs()
    stats = LossStats()
    with _restore_rng_on_stop(), policy.ranks.agreeing(check_stop), policy.computing():
        for index in policy.ranks.own([micro.cost for micro in batch.micros]):
            check_stop()
            micro = batch.micros[index]
            tokens = frozen.add_to(index, micro, policy)
            logprobs_L, entropy_L = policy.score(micro)
            loss, micro_stats = policy_loss(logprobs_L, entropy_L, tokens, config)
            loss.backward()
            frozen.keep(index, logprobs_L)
            stats = stats.add(micro_stats)
    return policy.ranks.total(stats)


@contextmanager
def _restore_rng_on_stop() -> Iterator[None]:
    """Undo the random draws (dropout) of an interrupted step, so that it can be repeated."""
    before = random_state()
    try:
        yield
    except StopRequested:
        restore_random_state(before)
        raise


class TokenRecord(Protocol):
    """Records per-token values of a step (token_record.py)."""

    def keep(self, step: int, batch: PackedBatch, frozen: FrozenLogprobs) -> None: ...


class NoTokenRecord:
    def keep(self, step: int, batch: PackedBatch, frozen: FrozenLogprobs) -> None: ...


NO_TOKENS = NoTokenRecord()


def _never_stop() -> None:
    pass


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
    health_file: HealthFile | None = None,
    check_stop: Callable[[], None] = _never_stop,
) -> None:
    """Train from `restored` to `config.steps`.

    A batch is acknowledged after its step is published. After a crash, steps since the last checkpoint are repeated on
    the same recorded batches: no step is skipped or counted twice.
    """
    step = saved = restored.step
    throughput = ThroughputMeter(policy, restored)
    health = HealthCheck(max_age=config.max_age + config.publish_interval - 1)
    sync.publish(policy, version=step)  # a broken sync mode fails here, before the first batch is used
    try:
        while step < config.steps:
            clock = StepTimer()
            leased = feed.lease(step + 1)
            clock.lap("rollout_wait_s")
            batch = pack(leased.groups, config, token_cost=policy.token_cost, vocab_size=policy.vocab_size)
            frozen = FrozenLogprobs(reference)
            for epoch in range(config.epochs):
                if epoch > 0:
                    policy.update_live_weights()
                # A stop is obeyed until the first update of the batch: after that, weights, optimizer and step must
                # change together.
                stats = accumulate_gradients(policy, batch, config, frozen, check_stop if epoch == 0 else _never_stop)
                losses = stats.metrics()
                clock.lap("fwd_bwd_s")
                if epoch == 0:
                    # A version is published only after everything that is sampled under an older one has arrived: the
                    # version of every batch depends on its step alone, and the same seed gives the same run.
                    feed.lease_ahead(min(step + 1 + config.max_age, config.steps))
                    clock.lap("rollout_wait_s")
                outcome = optimizer.step(step + 1, loss_is_finite=math.isfinite(losses["loss"]))
                clock.lap("optimizer_s")
                if outcome.skipped:
                    break  # nothing changed: another epoch would be skipped too
            receipt = sync.publish(policy, version=step + 1)
            clock.lap("weight_sync_s")
            metrics = {
                "policy_version": step + 1,
                **batch.metrics(version=step),
                **losses,
                **outcome.metrics(),
                **({} if batch.micros else {"grad_norm": math.nan}),  # nothing was forwarded
                **receipt.metrics(),
                **throughput.metrics(batch, clock, epochs=epoch + 1),
            }
            step += 1
            tracker.log(step, metrics)
            tokens.keep(step, batch, frozen)
            log.info("step", step=step, reward=metrics["reward"], grad_norm=outcome.grad_norm, seconds=clock.total_s)
            for line in health.check(step, metrics):
                log.warning("health", step=step, message=line)
                if health_file is not None:
                    health_file.write(step, line)
            # Metrics are written before the checkpoint: a surplus line is dropped on resume, a missing one is lost.
            if step == config.steps or (config.checkpoint_interval and step % config.checkpoint_interval == 0):
                checkpoints.save(step, policy, optimizer, throughput.totals())
                saved = step
            feed.ack(leased)  # last: a crash before this repeats the step
    except StopRequested:
        if step > saved:
            checkpoints.save(step, policy, optimizer, throughput.totals())
        raise
    checkpoints.save_final(policy, is_merged=config.merge_final)


# ---- time and throughput


def peak_flops(device: torch.device) -> float | None:
    """bf16 operations per second of this GPU; None if its data sheet is not known, and on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for card, tflops in PEAK_TFLOPS.items() if card in name), None)


class StepTimer:
    """Times of one step by part; a repeated name adds up."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total_s(self) -> float:
        return self._last - self._start


class ThroughputMeter:
    """Rates of a run, and totals that continue after a resume."""

    def __init__(self, policy: Policy, restored: Restored) -> None:
        self._policy = policy
        self._peak = peak_flops(policy.device)  # of one rank
        self._before_s = restored.elapsed_s
        self._started = time.monotonic()
        self._num_tokens = restored.num_tokens

    @property
    def elapsed_s(self) -> float:
        return self._before_s + time.monotonic() - self._started

    def totals(self) -> Totals:
        return Totals(elapsed_s=self.elapsed_s, num_tokens=self._num_tokens)

    def metrics(self, batch: PackedBatch, clock: StepTimer, *, epochs: int) -> dict[str, float]:
        """`epochs`: passes over the batch."""
        forwarded = batch.num_forwarded_tokens * epochs
        compute_s = clock.laps["fwd_bwd_s"]
        self._num_tokens += batch.num_tokens
        ranks = self._policy.ranks
        values = {
            "time_s": self.elapsed_s,
            "num_tokens": float(self._num_tokens),
            "perf/step_s": clock.total_s,
            **{f"perf/{name}": seconds for name, seconds in clock.laps.items()},
            "perf/forwarded_tok_s_fwd_bwd": forwarded / compute_s,
            "perf/forwarded_tok_s_wall_clock": forwarded / clock.total_s,
            "perf/trained_tok_s_wall_clock": batch.num_loss_tokens / clock.total_s,
            "perf/generated_tok_s_wall_clock": sum(batch.completion_lengths) / clock.total_s,
            "perf/cpu_memory_used_gb": ranks.total_number(psutil.Process().memory_info().rss / 1e9),
        }
        if self._policy.device.type == "cuda":
            values["perf/max_memory_allocated_gb"] = ranks.largest_number(
                torch.cuda.max_memory_allocated(self._policy.device) / 1e9
            )
        if self._peak is not None:
            flops = self._policy.flops_per_token * forwarded
            values["perf/mfu_fwd_bwd"] = flops / compute_s / (self._peak * ranks.size)
            values["perf/mfu_wall_clock"] = flops / clock.total_s / (self._peak * ranks.size)
        return values
