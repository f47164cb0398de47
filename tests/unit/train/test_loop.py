"""The loop itself, with a feed that is a list and no engine."""

from __future__ import annotations

import math

import pytest
import torch

from tests.processors import NEEDS_BF16
from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.errors import TrainingError
from treadle.support import fast_dtype
from treadle.sync.modes import OfflineSync
from treadle.track.catalogue import METRICS
from treadle.track.files import HealthFile
from treadle.train.checkpoint import Checkpoints
from treadle.train.loop import FROM_THE_START, accumulate_gradients, train
from treadle.train.optimizers import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import load_policy
from treadle.train.stop import StopRequested
from treadle.wire.groups import LeasedBatch, ScoredGroup


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def group(scores, *, logprob=-4.0, version=0):
    completions = [[10 + i, 20 + i, 1] for i in range(len(scores))]
    return ScoredGroup(
        tokens=[[5, 6, *c] for c in completions],
        masks=[[-100, -100, *c] for c in completions],
        scores=list(scores),
        inference_logprobs=[[1.0, 1.0, logprob, logprob, logprob] for _ in completions],
        policy_version=version,
        metrics={"accuracy": 0.5},
    )


class ListFeed:
    """Batches from a list; remembers what was acknowledged."""

    def __init__(self, batches):
        self.batches = batches
        self.ahead = []
        self.acknowledged = []

    def lease(self, step):
        self.leased = self.batches[step - 1]
        return LeasedBatch(step=step, token=str(step), lease_s=1.0, groups=self.batches[step - 1])

    def lease_ahead(self, step):
        self.ahead.append(step)

    def look_ahead(self, step):
        pass

    def ack(self, batch):
        self.acknowledged.append(batch.step)


class ListTracker:
    def __init__(self):
        self.rows = []

    def log(self, step, metrics):
        self.rows.append({"step": step, **metrics})


class Harness:
    def __init__(self, folder, tmp_path, batches, **settings):
        plain = {"lr": 1e-3, "warmup_steps": 0, "dtype": "float32", "device": "cpu"}
        self.config = TrainConfig(steps=len(batches), **(plain | settings))
        self.policy = load_policy(folder, self.config)
        self.optimizer = build_optimizer(self.policy, self.config)
        self.reference = self.policy.reference(folder) if self.config.kl_against == "reference" else None
        self.feed, self.tracker = ListFeed(batches), ListTracker()
        self.checkpoints = Checkpoints(tmp_path / "checkpoints", folder, self.config.keep_checkpoints)
        self.health_file = HealthFile(tmp_path / "health.jsonl")

    def restore(self):
        return self.checkpoints.restore(self.policy, self.optimizer)

    def run(self, restored=FROM_THE_START, check_stop=lambda: None):
        train(
            self.config, self.policy, self.optimizer, self.feed, OfflineSync(self.config).publish, self.checkpoints,
            self.tracker, reference=self.reference, restored=restored, check_stop=check_stop,
            health_file=self.health_file,
        )  # fmt: skip

    def weights(self):
        return {n: p.detach().clone() for n, p in self.policy.live.items()}


def test_every_step_is_logged_and_acknowledged_in_order(folder, tmp_path):
    harness = Harness(folder, tmp_path, [[group([1.0, 0.0])] for _ in range(4)], max_age=1, checkpoint_interval=2)
    before = harness.weights()
    harness.run()
    assert [row["step"] for row in harness.tracker.rows] == harness.feed.acknowledged == [1, 2, 3, 4]
    assert harness.feed.ahead == [2, 3, 4, 4]  # never beyond the last step
    assert [row["sample/staleness_mean"] for row in harness.tracker.rows] == [0, 1, 2, 3]
    assert any(not torch.equal(before[n], p) for n, p in harness.weights().items())
    assert (tmp_path / "checkpoints" / "final_model" / "model.safetensors").is_file()
    assert harness.restore().step == 4
    catalogued = set(METRICS)
    emitted = {
        name for row in harness.tracker.rows for name in row if name != "step" and not name.startswith("rollout/")
    }
    assert emitted <= catalogued, emitted - catalogued


def test_health_findings_are_written_as_events_beside_the_log(folder, tmp_path):
    harness = Harness(folder, tmp_path, [[group([1.0, 0.0], logprob=-2.0)]])
    harness.run()
    events = harness.health_file.read()
    assert {event.step for event in events} == {1}
    [event] = [event for event in events if event.message.startswith("LogProb Alignment: MISMATCH!")]
    assert "(healthy below 0.05)" in event.message


def test_a_step_without_tokens_has_no_values_for_unmeasured_metrics(folder, tmp_path):
    harness = Harness(folder, tmp_path, [[group([1.0, 1.0])], [group([1.0, 0.0])]])
    harness.run()
    first, second = harness.tracker.rows
    assert first["perf/generated_tok_s_wall_clock"] > first["perf/trained_tok_s_wall_clock"] == 0
    assert second["perf/generated_tok_s_wall_clock"] >= second["perf/trained_tok_s_wall_clock"] > 0
    nothing, something = harness.tracker.rows
    gaps = {name for name, value in nothing.items() if math.isnan(value)}
    assert {"entropy", "kl", "mean_kl", "mean_ratio", "clipped_fraction", "grad_norm"} <= gaps
    assert (nothing["reward"], nothing["loss"], nothing["batch/trained_tokens_per_step"]) == (1.0, 0.0, 0)
    assert gaps.isdisjoint(name for name, value in something.items() if math.isnan(value))


def test_the_rewarded_completion_becomes_likelier(folder, tmp_path):
    good = group([1.0, 0.0], logprob=-4.4)
    harness = Harness(folder, tmp_path, [[good]] * 10)

    def logprobs():
        (micro,) = pack([good], harness.config).micros
        with torch.no_grad():
            return harness.policy.score(micro)[0]

    before = logprobs()
    harness.run()
    after = logprobs()
    assert after[:3].sum() > before[:3].sum() + 0.1
    assert after[3:].sum() < before[3:].sum()


@pytest.mark.parametrize("settings", [{}, {"lora": True, "lora_dropout": 0.2}], ids=["weights", "adapters, dropout"])
def test_a_stop_in_the_middle_of_a_step_leaves_the_step_before(folder, tmp_path, settings):
    batches = [[group([1.0, 0.0]), group([0.0, 2.0])] for _ in range(5)]
    settings = settings | {"micro_tokens": 8}  # two micros a step
    torch.manual_seed(0)
    whole = Harness(folder, tmp_path / "whole", batches, **settings)
    whole.run()
    torch.manual_seed(0)
    stopped = Harness(folder, tmp_path / "stopped", batches, **settings)
    calls = iter(range(100))

    def stop_in_step_three():
        if next(calls) == 5:  # its first micro is done
            raise StopRequested

    with pytest.raises(StopRequested):
        stopped.run(check_stop=stop_in_step_three)
    assert stopped.feed.acknowledged == [1, 2]
    resumed = Harness(folder, tmp_path / "stopped", batches, **settings)
    restored = resumed.restore()
    assert restored.step == 2
    resumed.run(restored)
    for name, parameter in whole.weights().items():
        assert torch.equal(parameter, resumed.weights()[name])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_five_are_an_error(folder, tmp_path, bad):
    harness = Harness(folder, tmp_path, [[group([1.0, 0.0])]] * 10)
    good = group([1.0, 0.0])
    poisoned = group([1.0, 0.0])
    harness.feed.batches = [[poisoned], [good], *[[poisoned]] * 8]
    plain_score = harness.policy.score

    def score(micro):  # a model that overflows on some batches, whatever the data
        logprobs, entropy = plain_score(micro)
        return logprobs * (bad if harness.feed.leased[0] is poisoned else 1.0), entropy

    harness.policy.score = score
    before = harness.weights()
    snapshots = []
    log = harness.tracker.log
    harness.tracker.log = lambda step, metrics: (log(step, metrics), snapshots.append(harness.weights()))
    with pytest.raises(TrainingError, match="5 steps in a row"):
        harness.run()
    assert [row["skipped_in_a_row"] for row in harness.tracker.rows] == [1, 0, 1, 2, 3, 4]
    assert all(torch.equal(before[n], p) for n, p in snapshots[0].items())
    assert any(not torch.equal(before[n], p) for n, p in snapshots[1].items())
    assert all(torch.equal(snapshots[1][n], p) for n, p in harness.weights().items())
    assert all(torch.isfinite(p).all() for p in harness.weights().values())


def test_a_kl_term_reaches_groups_without_spread(folder, tmp_path):
    same = group([1.0, 1.0], logprob=-2.0)
    for coefficient, moves in ((0.0, False), (0.1, True)):
        harness = Harness(folder, tmp_path / str(coefficient), [[same]], kl_coef=coefficient)
        accumulate_gradients(harness.policy, pack([same], harness.config), harness.config)
        assert any(g.any() for g in harness.optimizer.gradients.values()) == moves


ESSENCE = ("loss", "grad_norm", "entropy", "mean_ratio", "kl", "num_tokens", "skipped_steps")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "adamw_8bit", "dtype": fast_dtype("cpu")},
        {"optimizer": "adafactor"},
        pytest.param({"optimizer": "muon", "objective": "gspo"}, marks=NEEDS_BF16),
        {"optimizer": "adamw_cpu", "gradient_dtype": "bfloat16"},
        {"lora": True, "lora_dropout": 0.1, "lora_target_modules": ("q_proj", "down_proj")},
        {"epochs": 3, "mismatch": "strict"},
        {"kl_coef": 0.05, "kl_against": "reference", "gradient_checkpointing": True},
        {"lora": True, "kl_coef": 0.05, "kl_against": "reference", "kl_estimator": "k2"},
        {"train_layer_indices": (1,), "aggregation": "sequence_mean"},
    ],
    ids=lambda settings: ", ".join(f"{k}={v}" for k, v in settings.items()) or "as it is",
)
def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(folder, tmp_path, settings):
    batches = [[group([1.0, 0.0, 0.5]), group([0.0, 2.0, 1.0], logprob=-3.9)] for _ in range(5)]
    torch.manual_seed(0)
    undisturbed = Harness(folder, tmp_path / "undisturbed", batches, **settings, checkpoint_interval=3)
    undisturbed.run()
    torch.manual_seed(0)
    killed = Harness(folder, tmp_path / "killed", batches, **settings, checkpoint_interval=3)
    killed.tracker.log = _interrupt_at(4, killed.tracker.log)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    torch.manual_seed(123)  # what a new process begins with does not matter
    resumed = Harness(folder, tmp_path / "killed", batches, **settings, checkpoint_interval=3)
    restored = resumed.restore()
    assert restored.step == 3
    resumed.run(restored)
    wanted = [tuple(row[key] for key in ESSENCE) for row in undisturbed.tracker.rows]
    got = [tuple(row[key] for key in ESSENCE) for row in (*killed.tracker.rows, *resumed.tracker.rows)]
    assert got == wanted
    assert len({row[1] for row in wanted}) == 5  # five different gradients
    for name, parameter in undisturbed.weights().items():
        assert torch.equal(parameter, resumed.weights()[name])
    assert resumed.tracker.rows[0]["time_s"] > killed.tracker.rows[2]["time_s"]


def _interrupt_at(step, log):
    def logged(number, metrics):
        if number == step:
            raise KeyboardInterrupt
        log(number, metrics)

    return logged


def test_later_epochs_keep_the_first_ones_logprobs(folder, tmp_path):
    """With one update the trainer's ratio is exactly 1; with three it has moved, and clipping sees it."""
    batch = [group([1.0, 0.0], logprob=-4.4)]
    once = Harness(folder, tmp_path / "once", [batch], old_logprobs="trainer")
    thrice = Harness(folder, tmp_path / "thrice", [batch], old_logprobs="trainer", epochs=3)
    once.run()
    thrice.run()
    assert once.tracker.rows[0]["mean_ratio"] == 1.0
    assert abs(thrice.tracker.rows[0]["mean_ratio"] - 1) > 1e-3
    same = "sampling/sampling_logp_difference/mean"  # of the policy before the first update
    assert thrice.tracker.rows[0][same] == pytest.approx(once.tracker.rows[0][same], rel=1e-6)


def test_a_group_without_logprobs_counts_as_on_policy(folder, tmp_path):
    bare, full = group([1.0, 0.0]), group([1.0, 0.0])
    bare.inference_logprobs = None
    harness = Harness(folder, tmp_path, [[bare, full]])
    before = harness.weights()
    harness.run()
    assert harness.tracker.rows[0]["batch/without_logprobs_frac"] == 0.5
    assert any(not torch.equal(before[n], p) for n, p in harness.weights().items())
