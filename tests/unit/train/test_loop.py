"""The loop itself, with a feed that is a list and no engine."""

from __future__ import annotations

import math

import pytest
import torch

from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.errors import TrainingError
from treadle.sync.offline import OfflineSync
from treadle.train.checkpoint import Checkpoints
from treadle.train.loop import accumulate_gradients, train
from treadle.train.optim import Optimizer
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
        return LeasedBatch(step=step, token=str(step), lease_s=1.0, groups=self.batches[step - 1])

    def lease_ahead(self, step):
        self.ahead.append(step)

    def ack(self, batch):
        self.acknowledged.append(batch.step)


class ListTracker:
    def __init__(self):
        self.rows = []

    def log(self, step, metrics):
        self.rows.append({"step": step, **metrics})


class Scene:
    def __init__(self, folder, tmp_path, batches, **settings):
        self.config = TrainConfig(steps=len(batches), lr=1e-3, warmup_steps=0, **settings)
        self.policy = load_policy(folder, dtype="float32", device="cpu", logprob_chunk=64)
        self.optimizer = Optimizer(self.policy, self.config)
        self.feed, self.tracker = ListFeed(batches), ListTracker()
        self.checkpoints = Checkpoints(tmp_path / "checkpoints", folder)

    def run(self, first_step=0, check_stop=lambda: None):
        train(
            self.config, self.policy, self.optimizer, self.feed, OfflineSync(), self.checkpoints, self.tracker,
            first_step=first_step, check_stop=check_stop,
        )  # fmt: skip

    def weights(self):
        return {n: p.detach().clone() for n, p in self.policy.live.items()}


def test_every_step_is_logged_and_acknowledged_in_order(folder, tmp_path):
    scene = Scene(folder, tmp_path, [[group([1.0, 0.0])] for _ in range(4)], max_age=1, checkpoint_interval=2)
    before = scene.weights()
    scene.run()
    assert [row["step"] for row in scene.tracker.rows] == scene.feed.acknowledged == [1, 2, 3, 4]
    assert scene.feed.ahead == [2, 3, 4, 4]  # never beyond the last step
    assert [row["age/mean"] for row in scene.tracker.rows] == [0, 1, 2, 3]
    assert any(not torch.equal(before[n], p) for n, p in scene.weights().items())
    assert (tmp_path / "checkpoints" / "final_model" / "model.safetensors").is_file()
    assert scene.checkpoints.restore(scene.policy, scene.optimizer) == 4


def test_the_rewarded_completion_becomes_likelier(folder, tmp_path):
    good = group([1.0, 0.0], logprob=-4.4)
    scene = Scene(folder, tmp_path, [[good]] * 10)

    def logprobs():
        (micro,) = pack([good], normalize_std=True, micro_tokens=100).micros
        with torch.no_grad():
            return scene.policy.score(micro)[0]

    before = logprobs()
    scene.run()
    after = logprobs()
    assert after[:3].sum() > before[:3].sum() + 0.1
    assert after[3:].sum() < before[3:].sum()


def test_a_stop_in_the_middle_of_a_step_leaves_the_step_before(folder, tmp_path):
    batches = [[group([1.0, 0.0])] for _ in range(5)]
    whole = Scene(folder, tmp_path / "whole", batches)
    whole.run()
    stopped = Scene(folder, tmp_path / "stopped", batches)
    calls = iter(range(100))

    def stop_in_step_three():
        if next(calls) == 2:
            raise StopRequested

    with pytest.raises(StopRequested):
        stopped.run(check_stop=stop_in_step_three)
    assert stopped.feed.acknowledged == [1, 2]
    resumed = Scene(folder, tmp_path / "stopped", batches)
    step = resumed.checkpoints.restore(resumed.policy, resumed.optimizer)
    assert step == 2
    resumed.run(first_step=step)
    for name, parameter in whole.weights().items():
        assert torch.equal(parameter, resumed.weights()[name])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing_and_five_end_the_training(folder, tmp_path, bad):
    scene = Scene(folder, tmp_path, [[group([1.0, 0.0])]] * 10)
    good = group([1.0, 0.0])
    poisoned = group([1.0, 0.0])
    poisoned.advantages = [[0.0, 0.0, bad, 0.0, 0.0]] * 2
    scene.feed.batches = [[poisoned], [good], *[[poisoned]] * 8]
    before = scene.weights()
    snapshots = []
    log = scene.tracker.log
    scene.tracker.log = lambda step, metrics: (log(step, metrics), snapshots.append(scene.weights()))
    with pytest.raises(TrainingError, match="5 steps in a row"):
        scene.run()
    assert [row["optim/skipped_in_a_row"] for row in scene.tracker.rows] == [1, 0, 1, 2, 3, 4]
    assert all(torch.equal(before[n], p) for n, p in snapshots[0].items())
    assert any(not torch.equal(before[n], p) for n, p in snapshots[1].items())
    assert all(torch.equal(snapshots[1][n], p) for n, p in scene.weights().items())
    assert all(torch.isfinite(p).all() for p in scene.weights().values())


def test_a_kl_term_reaches_groups_without_spread(folder):
    same = group([1.0, 1.0], logprob=-2.0)
    without, with_kl = TrainConfig(), TrainConfig(kl_coef=0.1)
    for config, moves in ((without, False), (with_kl, True)):
        policy = load_policy(folder, dtype="float32", device="cpu", logprob_chunk=64)
        batch = pack([same], normalize_std=True, micro_tokens=100, all_tokens=config.kl_coef > 0)
        accumulate_gradients(policy, batch, config)
        assert any(g.any() for g in policy.gradients()) == moves
