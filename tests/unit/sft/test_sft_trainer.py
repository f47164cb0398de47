"""The training loop on rows: cross entropy on the masked tokens, whatever the packing; resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.config.sft import SftConfig
from treadle.sft.data import HELD_OUT_ROWS, TRAIN_ROWS, Example, ExampleFile, save_examples
from treadle.sft.trainer import Supervised, held_out_loss
from treadle.sync.modes import OfflineSync
from treadle.track.catalogue import METRICS
from treadle.train.checkpoint import Checkpoints
from treadle.train.loop import accumulate_gradients, train
from treadle.train.optimizers import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import load_policy
from treadle.train.publishing import Welcome
from treadle.train.ranks import ALONE
from treadle.train.stop import StopRequested
from treadle.watch.waits import Waits

SETTINGS = {
    "weight_bridge_mode": "offline", "surrogate": "cispo", "share_prompts": "off", "hub_url": "", "lr": 3e-3,
    "warmup_steps": 1, "dtype": "float32", "device": "cpu", "batch_size": 4, "checkpoint_interval": 100,
}  # fmt: skip

DEFAULTS = SftConfig()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=64, num_layers=2)


def make_examples(count: int, seed: int = 0) -> list[Example]:
    """Prompts of four to nine tokens that begin alike; the completion counts on from the last of them, twice."""
    random = np.random.default_rng(seed)
    examples = []
    for _ in range(count):
        prompt = [50, 51, 52, *random.integers(3, 40, random.integers(1, 7))]
        tokens = [*prompt, prompt[-1] + 1, prompt[-1] + 2, 1]
        examples.append(Example(np.array(tokens, np.int32), np.arange(len(tokens)) >= len(prompt)))
    return examples


@pytest.fixture
def rows(tmp_path) -> Path:
    save_examples(make_examples(20), tmp_path / "rows" / TRAIN_ROWS)
    save_examples(make_examples(5, seed=1), tmp_path / "rows" / HELD_OUT_ROWS)
    return tmp_path / "rows"


class ListTracker:
    def __init__(self):
        self.rows = []

    def log(self, step, metrics):
        self.rows.append({"step": step, **metrics})

    def truncate_after(self, step):
        self.rows = [row for row in self.rows if row["step"] <= step]

    def close(self):
        pass


def train_rows(folder, rows, save_path, *, tracker=None, stop_at=0, sft=DEFAULTS, **settings):
    """Train until the last step, or until a stop before the batch of `stop_at`; returns policy and tracker."""
    config = TrainConfig(**SETTINGS | {"steps": 6} | settings)
    policy = load_policy(folder, config)
    optimizer = build_optimizer(policy, config)
    checkpoints = Checkpoints(save_path, folder, 2)
    restored = checkpoints.restore(policy, optimizer)
    tracker = tracker or ListTracker()
    stage = Supervised(config, sft, rows)
    num_leased = restored.step

    def check_stop():
        nonlocal num_leased
        num_leased += 1
        if num_leased == stop_at:
            raise StopRequested

    mode = OfflineSync(config)
    feed = stage.open_feed(ALONE, check_stop, Waits(), Welcome(mode, policy))
    mode.publish(policy, restored.step)
    measure = stage.begin(policy, tracker, restored.step)
    try:
        train(
            config, policy, optimizer, feed, OfflineSync(config).publish, checkpoints, tracker, restored=restored,
            measure=measure,
        )  # fmt: skip
    except StopRequested:
        assert stop_at
    return policy, tracker


def mean_loss_of_rows(folder, examples, weights=None) -> tuple[float, dict[str, torch.Tensor]]:
    """Each row by itself through transformers: the mean over all trained tokens, and its gradient."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if weights is not None:
        model.load_state_dict(weights, strict=False)
    num_trained = sum(int(example.is_trained.sum()) for example in examples)
    total = 0.0
    for example in examples:
        ids = torch.tensor(example.tokens, dtype=torch.long)[None]
        labels = ids[0].where(torch.tensor(example.is_trained), -100)
        loss = cross_entropy(model(ids).logits[0, :-1], labels[1:], reduction="sum") / num_trained
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("micro_tokens", [24, 1000])
@pytest.mark.parametrize("share_prompts", ["off", "on"])
def test_packed_loss_and_gradient_equal_those_of_single_rows(folder, rows, micro_tokens, share_prompts):
    config = TrainConfig(**SETTINGS | {"share_prompts": share_prompts}, micro_tokens=micro_tokens)
    policy = load_policy(folder, config)
    optimizer = build_optimizer(policy, config)
    saved = ExampleFile.open(rows / TRAIN_ROWS)
    batch = pack([saved.group(place) for place in range(len(saved))], config, vocab_size=policy.vocab_size)
    assert (len(batch.micros) == 1) == (micro_tokens == 1000)
    assert (batch.num_forwarded_tokens < sum(len(one.tokens) - 1 for one in make_examples(20))) == (
        share_prompts == "on"
    )
    stats = accumulate_gradients(policy, batch, config)
    expected, gradients = mean_loss_of_rows(folder, make_examples(20))
    assert stats.metrics()["loss"] == pytest.approx(expected, rel=1e-5)
    assert held_out_loss(policy, batch, config) == pytest.approx(expected, rel=1e-5)
    for name, gradient in optimizer.gradients.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6)


def test_losses_fall_and_held_out_rows_are_measured_at_both_ends(folder, rows, tmp_path):
    policy, tracker = train_rows(folder, rows, tmp_path / "checkpoints", steps=30, sft=SftConfig(steps_per_eval=20))
    losses = {row["step"]: row["loss"] for row in tracker.rows if "loss" in row}
    held_out = {row["step"]: row["eval_loss"] for row in tracker.rows if "eval_loss" in row}
    assert list(losses) == list(range(1, 31))
    assert list(held_out) == [0, 20, 30]
    assert losses[30] < losses[1] / 2
    assert held_out[30] < held_out[0] * 0.75
    weights = {name: p.detach() for name, p in policy.weights.items()}
    expected, _ = mean_loss_of_rows(folder, make_examples(5, seed=1), weights)
    assert held_out[30] == pytest.approx(expected, rel=1e-4)
    logged = {name for row in tracker.rows for name in row} - {"step"}
    assert logged <= set(METRICS)
    assert not {"reward", "policy_loss", "mean_ratio", "entropy"} & logged
    assert tracker.rows[-1]["epoch"] == 6.0
    assert (tmp_path / "checkpoints" / "final_model" / "model.safetensors").is_file()


def figures(tracker: ListTracker) -> list[tuple]:
    return [(row["step"], row.get("loss"), row.get("eval_loss")) for row in tracker.rows]


def test_a_stopped_run_goes_on_bit_for_bit(folder, rows, tmp_path):
    whole, expected = train_rows(folder, rows, tmp_path / "whole")
    _, tracker = train_rows(folder, rows, tmp_path / "parts", stop_at=4)
    assert tracker.rows[-1]["step"] == 3
    resumed, tracker = train_rows(folder, rows, tmp_path / "parts", tracker=tracker)
    for name, weight in whole.weights.items():
        assert torch.equal(weight, resumed.weights[name]), name
    assert figures(expected) == figures(tracker)


def test_the_last_batch_of_the_epochs_has_the_rest(folder, rows, tmp_path):
    _, tracker = train_rows(folder, rows, tmp_path / "checkpoints", steps=3, batch_size=16, sft=SftConfig(epochs=2))
    assert [row["batch/samples_per_step"] for row in tracker.rows[1:]] == [16, 16, 8]
    _, tracker = train_rows(folder, rows, tmp_path / "others", steps=2, batch_size=16, sft=SftConfig(epochs=2))
    assert [row["batch/samples_per_step"] for row in tracker.rows[1:]] == [16, 16]


def test_without_held_out_rows_nothing_is_measured(folder, rows, tmp_path):
    save_examples([], rows / HELD_OUT_ROWS)
    _, tracker = train_rows(folder, rows, tmp_path / "checkpoints", steps=2)
    assert [row["step"] for row in tracker.rows] == [1, 2]
    assert not any("eval_loss" in row for row in tracker.rows)
