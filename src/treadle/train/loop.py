"""Run the training loop: lease a batch, accumulate gradients, take one optimizer step, publish the weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from treadle.config import TrainConfig
from treadle.log import get_logger
from treadle.track import Tracker
from treadle.track.files import HealthFile, RolloutTokens, TokenFiles
from treadle.train.card_sharing import CardSharing
from treadle.train.checkpoint import Checkpoints, Restored, Totals
from treadle.train.health import HealthCheck
from treadle.train.loss import LossStats, LossTokens, distilled_advantages, policy_loss
from treadle.train.optimizer import Optimizer, derive_seed
from treadle.train.pack import Micro, PackedBatch, pack
from treadle.train.policy import Policy
from treadle.train.publishing import Publish, publish_with_ranks
from treadle.train.reference import Reference
from treadle.train.stop import StopRequested
from treadle.wire.groups import LeasedBatch, fingerprint

log = get_logger("trainer")

IDLE = -1  # index, and below it, of the micros that a rank computes only for the others
KEPT_STEPS = 100  # whose tokens are kept
LARGEST_FLOAT16 = float(np.finfo(np.float16).max)
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
            teacher_logprobs_L=_moved(tokens.teacher_logprobs_L, policy.device),
            teacher_coefs_L=_moved(tokens.teacher_coefs_L, policy.device),
        )


def _moved(values_L: Tensor | None, device: torch.device) -> Tensor | None:
    return None if values_L is None else values_L.to(device)


def accumulate_gradients(
    policy: Policy,
    batch: PackedBatch,
    config: TrainConfig,
    frozen: FrozenLogprobs | None = None,
    check_stop: Callable[[], None] = lambda: None,
    card: CardSharing | None = None,
    *,
    draw: int = 0,
) -> LossStats:
    """Run forward and backward through every micro. The loss is a mean over the whole step, so the result does not
    depend on how the batch was split. `draw`: a different number for each pass over a batch, for the seeds of dropout.

    Each rank takes its share of the micros. All ranks compute together, layer by layer: in a turn in which this rank
    has no micro, it computes one without gradient.
    """
    frozen = frozen or FrozenLogprobs()
    stats = LossStats()
    card = card or CardSharing()
    ranks = policy.ranks
    costs = [micro.cost for micro in batch.micros]
    with policy.computing(), card.computing(), ranks.during("computing the gradients"):
        for turn, own in enumerate(ranks.turns(costs, config.context_parallel)):
            ranks.check_stop(check_stop)
            index = IDLE - turn if own is None else own
            micro = batch.micros[costs.index(min(costs)) if own is None else own]
            torch.manual_seed(derive_seed("dropout", config.seed, draw, index, ranks.rank % config.context_parallel))
            tokens = frozen.add_to(index, micro, policy)
            logprobs_L, entropy_L = policy.score(micro)
            if own is None:
                logprobs_L.backward(torch.zeros_like(logprobs_L))
                continue
            loss, micro_stats = policy_loss(logprobs_L, entropy_L, tokens, config)
            loss.backward()
            frozen.own.setdefault(index, logprobs_L.detach())  # of the first epoch
            if policy.counts_micros:
                stats = stats.add(micro_stats)
    return ranks.total(stats)


StepMetrics = Callable[[int, dict[str, float]], dict[str, float]]  # (step, measured) -> what is logged


def all_metrics(_step: int, metrics: dict[str, float]) -> dict[str, float]:
    return metrics


class Feed(Protocol):
    """Where the batches come from (feed.py, or the rows of treadle.sft)."""

    def lease(self, step: int) -> LeasedBatch: ...

    def lease_ahead(self, step: int) -> None: ...

    def look_ahead(self, step: int) -> None: ...

    def ack(self, batch: LeasedBatch) -> None: ...


def train(
    config: TrainConfig,
    policy: Policy,
    optimizer: Optimizer,
    feed: Feed,
    publish: Publish,
    checkpoints: Checkpoints,
    tracker: Tracker | None,
    *,
    reference: Reference | None = None,
    restored: Restored = FROM_THE_START,
    tokens: RecentTokenRecord | None = None,
    health_file: HealthFile | None = None,
    check_stop: Callable[[], None] = lambda: None,
    card: CardSharing | None = None,
    measure: StepMetrics = all_metrics,
) -> None:
    """Train from `restored` to `config.steps`. `publish` brings a version of the weights to the engine. `measure` is
    called on all ranks with the metrics of each step, after its publish, and returns those to log.

    A batch is acknowledged after its step is published. After a crash, steps since the last checkpoint are repeated on
    the same recorded batches: no step is skipped or counted twice.
    """
    step = saved = restored.step
    throughput = ThroughputMeter(policy, restored)
    card = card or CardSharing()
    health = HealthCheck(max_age=config.max_age + config.publish_interval - 1)
    publish_with_ranks(publish, policy, step)  # a broken sync mode fails here, before the first batch is used
    try:
        while step < config.steps:
            clock = StepTimer()
            leased = feed.lease(step + 1)
            clock.lap("rollout_wait_s")
            batch = pack(leased.groups, config, token_cost=policy.token_cost, vocab_size=policy.vocab_size)
            frozen = FrozenLogprobs(reference)
            for epoch in range(config.epochs):
                if epoch > 0:
                    policy.write_step()
                # A stop is obeyed until the first update of the batch: after that, weights, optimizer and step must
                # change together.
                between_micros = partial(_between_micros, check_stop if epoch == 0 else None, feed, step + 2, config)
                draw = step * config.epochs + epoch
                stats = accumulate_gradients(policy, batch, config, frozen, between_micros, card, draw=draw)
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
            receipt = publish_with_ranks(publish, policy, step + 1)
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
            metrics = measure(step, metrics)
            card.record(clock.total_s)
            if tracker is not None:
                tracker.log(step, metrics)
            if tokens is not None and policy.counts_micros:
                tokens.keep(step, batch, frozen)
            _report(step, metrics, health.check(step, metrics), health_file)
            if step == config.steps:
                checkpoints.save_final(policy, is_merged=config.merge_final)  # before the much larger checkpoint
            # Metrics are written before the checkpoint: a surplus line is dropped on resume, a missing one is lost.
            if is_checkpoint_due(step, config):
                checkpoints.save(step, policy, optimizer, throughput.totals())
                saved = step
            feed.ack(leased)  # last: a crash before this repeats the step
    except StopRequested:
        if step > saved:
            checkpoints.save(step, policy, optimizer, throughput.totals())
        raise
    if step == restored.step:  # the last checkpoint was of the last step
        checkpoints.save_final(policy, is_merged=config.merge_final)


def _between_micros(check_stop: Callable[[], None] | None, feed: Feed, next_step: int, config: TrainConfig) -> None:
    if check_stop is not None:
        check_stop()
    if next_step <= config.steps:
        feed.look_ahead(next_step)


def is_checkpoint_due(step: int, config: TrainConfig) -> bool:
    """At every interval and after the last step; never if the interval is 0.

    >>> [step for step in range(1, 8) if is_checkpoint_due(step, TrainConfig(steps=7, checkpoint_interval=3))]
    [3, 6, 7]
    """
    interval = config.checkpoint_interval
    return interval > 0 and (step == config.steps or step % interval == 0)


def _report(step: int, metrics: Mapping[str, float], lines: Iterable[str], file: HealthFile | None) -> None:
    """Log a step, and what the health check found."""
    shown = {name: metrics[name] for name in ("reward", "loss", "grad_norm") if name in metrics}
    log.info("step", step=step, **shown, seconds=metrics["perf/step_s"])
    for line in lines:
        log.warning("health", step=step, message=line)
        if file is not None:
            file.write(step, line)


# ---- values per token


class RecentTokenRecord:
    """Writes the logprob differences and advantages of one rank's tokens, for the colours on the page, and keeps the
    newest steps. A write error is logged and does not stop the training."""

    def __init__(self, folder: Path, rank: int = 0, num_steps: int = KEPT_STEPS) -> None:
        self._files = TokenFiles(folder)
        self._num_steps = num_steps
        self._rank = rank

    def keep(self, step: int, batch: PackedBatch, frozen: FrozenLogprobs) -> None:
        """`frozen`: the logprobs of `batch` from before the update, of this rank's micros."""
        names = {id(group): fingerprint(group) for group in batch.groups}
        rollouts = [
            tokens
            for index, logprobs_L in frozen.own.items()
            for tokens in _tokens_of(batch.micros[index], logprobs_L, names)
        ]
        try:
            self._files.write(step, self._rank, rollouts)
            self._files.forget_before(step - self._num_steps + 1)
        except OSError as error:
            log.warning("tokens_not_kept", step=step, problem=str(error))


def _tokens_of(micro: Micro, logprobs_L: Tensor, names: dict[int, int]) -> Iterator[RolloutTokens]:
    tokens, own_L = micro.loss_tokens, logprobs_L.float().cpu()
    differences_L, advantages_L = (
        values_L.numpy().clip(-LARGEST_FLOAT16, LARGEST_FLOAT16).astype("<f2")
        for values_L in (own_L - tokens.rollout_logprobs_L, distilled_advantages(tokens, own_L))
    )
    positions_L = (micro.positions_T[micro.source_L] + 1).numpy()
    ends_S = np.bincount(tokens.sequences_L.numpy(), minlength=tokens.num_sequences).cumsum().tolist()
    for (group, rollout), start, end in zip(micro.origins, [0, *ends_S], ends_S, strict=False):
        advantages = advantages_L[start:end]
        are_alike = bool((advantages == advantages[:1]).all())
        yield RolloutTokens(
            group=names[id(group)],
            rollout=rollout,
            runs=_runs(positions_L[start:end]),
            differences=differences_L[start:end].tobytes(),
            advantages=(advantages[:1] if are_alike else advantages).tobytes(),
        )


def _runs(positions: np.ndarray) -> list[int]:
    """(start, length) of each run of consecutive positions, flat: `_runs([4, 5, 6, 9])` is [4, 3, 9, 1]."""
    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(positions))
    return np.stack([positions[starts], lengths], axis=1).ravel().tolist()


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

    def totals(self) -> Totals:
        elapsed_s = self._before_s + time.monotonic() - self._started
        return Totals(elapsed_s=elapsed_s, num_tokens=self._num_tokens)

    def metrics(self, batch: PackedBatch, clock: StepTimer, *, epochs: int) -> dict[str, float]:
        """`epochs`: passes over the batch."""
        forwarded = batch.num_forwarded_tokens * epochs
        compute_s = clock.laps["fwd_bwd_s"]
        self._num_tokens += batch.num_tokens
        ranks = self._policy.ranks
        values = {
            "time_s": self.totals().elapsed_s,
            "num_tokens": float(self._num_tokens),
            "perf/step_s": clock.total_s,
            **{f"perf/{name}": seconds for name, seconds in clock.laps.items()},
            "perf/forwarded_tok_s_fwd_bwd": forwarded / compute_s,
            "perf/forwarded_tok_s_wall_clock": forwarded / clock.total_s,
            "perf/trained_tok_s_wall_clock": batch.num_loss_tokens / clock.total_s,
            "perf/generated_tok_s_wall_clock": sum(batch.completion_lengths) / clock.total_s,
            "perf/cpu_memory_used_gb": ranks.reduce(psutil.Process().memory_info().rss / 1e9, "sum"),
        }
        if self._policy.device.type == "cuda":
            most_gb = torch.cuda.max_memory_allocated(self._policy.device) / 1e9
            values["perf/max_memory_allocated_gb"] = ranks.reduce(most_gb, "max")
        if self._peak is not None:
            flops = self._policy.flops_per_token * forwarded
            values["perf/mfu_fwd_bwd"] = flops / compute_s / (self._peak * ranks.size)
            values["perf/mfu_wall_clock"] = flops / clock.total_s / (self._peak * ranks.size)
        return values
