"""The trainer of a supervised run: the loop, policy, optimizers and checkpoints of treadle.train, fed with rows.

The batch of a step depends only on the seed and the step, so a resumed run goes on with the same batches. Each epoch
has every row once, in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from treadle.config import TrainConfig
from treadle.config.schema import RunConfig
from treadle.config.sft import SftConfig
from treadle.sft.data import HELD_OUT_ROWS, ROWS_FOLDER, TRAIN_ROWS, ExampleFile, num_steps, rows_of_step
from treadle.sync.protocol import AttachedModel
from treadle.track import Tracker
from treadle.track.catalogue import SUPERVISED
from treadle.train.feed import Aside
from treadle.train.loop import StepMetrics
from treadle.train.pack import PackedBatch, pack
from treadle.train.policy import Policy
from treadle.train.process import run_trainer
from treadle.train.ranks import Ranks
from treadle.watch.waits import Waits
from treadle.wire.groups import LeasedBatch
from treadle.wire.hub import RegisterTrainer

# How often the held-out loss is measured, without `steps_per_eval`: at most so many times, in this share of the time.
NUM_EVALS, SHARE_OF_TIME, SHARE_OF_FORWARD = 10, 0.1, 1 / 3
LOGGED = frozenset(entry.name for entry in SUPERVISED) | {
    "loss", "grad_norm", "learning_rate", "skipped_steps", "skipped_in_a_row", "time_s", "num_tokens",
    "batch/samples_per_step", "batch/microbatches_per_step", "batch/tokens_per_step",
    "batch/forwarded_tokens_per_step", "batch/trained_tokens_per_step", "batch/row_imbalance",
    "batch/rejected_rollouts", "perf/step_s", "perf/fwd_bwd_s", "perf/optimizer_s", "perf/mfu_fwd_bwd",
    "perf/mfu_wall_clock", "perf/forwarded_tok_s_fwd_bwd", "perf/forwarded_tok_s_wall_clock",
    "perf/trained_tok_s_wall_clock", "perf/max_memory_allocated_gb", "perf/cpu_memory_used_gb",
}  # fmt: skip


def train_on_rows(run: RunConfig, run_folder: Path) -> None:
    """Train to the last step, or until SIGTERM, which saves a checkpoint first."""
    run_trainer(run.train, lambda config: Supervised(config, run.sft, run_folder / ROWS_FOLDER))


class RowFeed:
    """Batches of rows. Every rank reads the same ones from the same files."""

    def __init__(self, rows: ExampleFile, config: TrainConfig, epochs: int, check_stop: Callable[[], None]) -> None:
        self._rows = rows
        self._seed = config.seed
        self._batch_size = config.sequences_per_step
        self._check_stop = check_stop
        ends_with_epoch = config.steps == num_steps(len(rows), self._batch_size, epochs)
        self._end = len(rows) * epochs if ends_with_epoch else config.steps * self._batch_size

    def lease(self, step: int) -> LeasedBatch:
        self._check_stop()
        places = rows_of_step(step, len(self._rows), self._batch_size, end=self._end, seed=self._seed)
        return LeasedBatch(step=step, token="", lease_s=0.0, groups=[self._rows.group(place) for place in places])

    def lease_ahead(self, step: int) -> None:
        """They are on disk."""

    def look_ahead(self, step: int) -> None:
        """They are on disk."""

    def ack(self, batch: LeasedBatch) -> None:
        """They stay on disk."""

    def register(self, registration: RegisterTrainer) -> None:
        """Nobody waits for this trainer."""

    def give_back(self, reason: str, *, counts: bool) -> None:
        """A resumed run reads them again."""


class Supervised:
    """Train on the rows in `folder`, and measure the loss of those that are held out."""

    keeps_tokens = False

    def __init__(self, config: TrainConfig, sft: SftConfig, folder: Path) -> None:
        self._config = config
        self._epochs = sft.epochs
        self._rows = ExampleFile.open(folder / TRAIN_ROWS)
        self._held_out = ExampleFile.open(folder / HELD_OUT_ROWS)
        self._interval = sft.steps_per_eval or self._affordable_interval()

    def _affordable_interval(self) -> int:
        """A forward pass takes a third of the time of a training step on the same tokens."""
        tokens_per_step = self._rows.num_tokens / len(self._rows) * self._config.sequences_per_step
        in_steps = self._held_out.num_tokens * SHARE_OF_FORWARD / tokens_per_step
        return max(1, self._config.steps // NUM_EVALS, round(in_steps / SHARE_OF_TIME))

    def connect(self, engine: AttachedModel, ranks: Ranks, waits: Waits) -> None:
        """The rows are on disk."""

    def open_feed(self, _ranks: Ranks, check_stop: Callable[[], None], _waits: Waits, _aside: Aside) -> RowFeed:
        return RowFeed(self._rows, self._config, self._epochs, check_stop)

    def begin(self, policy: Policy, tracker: Tracker | None, step: int) -> StepMetrics:
        """Also measure the loss of the model before the first step."""
        config = self._config
        held_out: PackedBatch | None = None
        if len(self._held_out):
            groups = [self._held_out.group(place) for place in range(len(self._held_out))]
            held_out = pack(groups, config, token_cost=policy.token_cost, vocab_size=policy.vocab_size)
        if held_out is not None and step == 0:
            loss = held_out_loss(policy, held_out, config)
            if tracker is not None:
                tracker.truncate_after(-1)  # a trainer that crashed before its first checkpoint has logged it too
                tracker.log(0, {"eval_loss": loss})

        def measure(step: int, metrics: dict[str, float]) -> dict[str, float]:
            kept = {name: value for name, value in metrics.items() if name in LOGGED}
            kept["epoch"] = step * config.sequences_per_step / len(self._rows)
            if held_out is not None and (step % self._interval == 0 or step == config.steps):
                kept["eval_loss"] = held_out_loss(policy, held_out, config)
            return kept

        return measure


def held_out_loss(policy: Policy, batch: PackedBatch, config: TrainConfig) -> float:
    """The loss of held-out rows, weighted as in training; all ranks compute together, each its share of the micros."""
    costs = [micro.cost for micro in batch.micros]
    total = 0.0
    for own in policy.ranks.turns(costs, config.context_parallel):
        micro = batch.micros[costs.index(min(costs)) if own is None else own]
        logprobs_L = policy.score_held_out(micro)
        if own is not None and policy.counts_micros:
            total -= float((logprobs_L * micro.loss_tokens.weights_L.to(policy.device)).sum())
    return policy.ranks.reduce(total, "sum", "measuring the held-out loss")
