"""The token record is the same however the batch was split, and its errors do not stop the training."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.sync.modes import OfflineSync
from treadle.track.files import RolloutTokens, TokenFiles
from treadle.train.checkpoint import Checkpoints
from treadle.train.loop import FrozenLogprobs, RecentTokenRecord, accumulate_gradients, train
from treadle.train.optimizers import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import load_policy
from treadle.wire.groups import IGNORED, NO_LOGPROB, LeasedBatch, ScoredGroup, fingerprint, pack_group, unpack_group

PROMPT = [5, 6]
# Two turns: what stands between them was read, not said.
FIRST, READ, SECOND = [10, 20], [30, 31], [11]
SETTINGS = {"dtype": "float32", "device": "cpu", "normalize_std": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def policy(folder):
    return load_policy(folder, TrainConfig(**SETTINGS))


def group(scores, *, offset=0, **more) -> ScoredGroup:
    rows = range(len(scores))
    logprobs = [NO_LOGPROB, NO_LOGPROB, -4.0, -4.0, NO_LOGPROB, NO_LOGPROB, -3.0]
    return ScoredGroup(
        tokens=[[*PROMPT, *FIRST, *READ, SECOND[0] + offset + row] for row in rows],
        masks=[[IGNORED, IGNORED, *FIRST, IGNORED, IGNORED, SECOND[0] + offset + row] for row in rows],
        scores=list(scores),
        inference_logprobs=[logprobs for _ in rows],
        **more,
    )


def kept(policy, folder, groups, **settings) -> TokenFiles:
    config = TrainConfig(**(SETTINGS | settings))
    batch, frozen = pack(groups, config), FrozenLogprobs()
    accumulate_gradients(policy, batch, config, frozen)
    RecentTokenRecord(folder, num_steps=10).keep(7, batch, frozen)
    return TokenFiles(folder)


def own_logprobs(policy, tokens) -> torch.Tensor:
    """Of each token but the first, scored on its own."""
    alone = ScoredGroup(tokens=[tokens] * 2, masks=[tokens] * 2, scores=[1.0, 0.0])
    micro = pack([alone], TrainConfig(**SETTINGS, share_prompts="off")).micros[0]
    with torch.no_grad():
        return policy.score(micro)[0][: len(tokens) - 1]


@pytest.mark.parametrize("split", [{}, {"micro_tokens": 8}, {"share_prompts": "off"}, {"share_prompts": "on"}])
def test_each_token_has_its_logprob_difference_and_advantage(policy, tmp_path, split):
    groups = [group([1.0, 0.0]), group([0.0, 3.0, 0.0], offset=10)]
    files = kept(policy, tmp_path, groups, **split)
    for one, advantages in zip(groups, ([0.5, -0.5], [-1.0, 2.0, -1.0]), strict=True):
        found = files.of_group(7, fingerprint(one))
        assert sorted(found) == list(range(one.size))
        for row, advantage in enumerate(advantages):
            trained = own_logprobs(policy, one.tokens[row])
            places, differences, given = zip(*found[row].figures(), strict=True)
            assert places == (2, 3, 6)  # what was read between the turns is left out
            wanted = [trained[place - 1].item() - one.inference_logprobs[row][place] for place in places]
            assert differences == pytest.approx(wanted, abs=5e-3)
            assert given == (advantage,) * 3


def test_a_group_without_advantages_is_not_recorded(policy, tmp_path):
    even = group([1.0, 1.0], offset=20)
    files = kept(policy, tmp_path, [group([1.0, 0.0]), even])
    assert files.of_group(7, fingerprint(even)) == {}
    assert files.of_group(8, fingerprint(even)) is None


def test_a_token_without_engine_logprob_keeps_its_advantage(policy, tmp_path):
    odd = group([1.0, 0.0], advantages=[[0.0, 0.0, 0.25, 0.5, 0.0, 0.0, 1e9], [0.0] * 7])
    odd.inference_logprobs = None
    found = kept(policy, tmp_path, [odd]).of_group(7, fingerprint(odd))
    places, differences, advantages = zip(*found[0].figures(), strict=True)
    assert places == (2, 3, 6)
    assert all(math.isnan(one) for one in differences)
    assert advantages == (0.25, 0.5, 65504.0)  # the largest that 16 bits can say


def test_a_group_has_one_name_however_it_was_sent():
    one = group([1.0, 0.25])
    as_json = msgspec.json.decode(msgspec.json.encode(one), type=ScoredGroup)
    assert fingerprint(unpack_group(pack_group(one))) == fingerprint(as_json) == fingerprint(one)
    assert fingerprint(one) != fingerprint(group([0.25, 1.0]))
    assert fingerprint(one) != fingerprint(group([1.0, 0.25], offset=1))


class OneFeed:
    """Returns the same batch each time, and notes at each acknowledgement which steps are readable."""

    def __init__(self, folder, groups):
        self.folder, self.groups, self.seen = folder, groups, []

    def lease(self, step):
        return LeasedBatch(step=step, token=str(step), lease_s=1.0, groups=self.groups)

    def lease_ahead(self, step): ...

    def look_ahead(self, step): ...

    def ack(self, batch):
        self.seen.append(sorted(path.name for path in self.folder.iterdir()))


def run(folder, tmp_path, tokens, steps=4):
    config = TrainConfig(steps=steps, **SETTINGS)
    policy = load_policy(folder, config)
    (tmp_path / "tokens").mkdir(exist_ok=True)
    feed = OneFeed(tmp_path / "tokens", [group([1.0, 0.0])])
    checkpoints = Checkpoints(tmp_path / "checkpoints", folder, 2)
    optimizer = build_optimizer(policy, config)
    train(config, policy, optimizer, feed, OfflineSync(config).publish, checkpoints, None, tokens=tokens)
    return feed.seen


def test_newest_steps_are_written_before_their_batch_is_acknowledged(folder, tmp_path):
    seen = run(folder, tmp_path, RecentTokenRecord(tmp_path / "tokens", num_steps=2))
    names = [f"step-{step:06d}.rank-0" for step in (1, 2, 3, 4)]
    assert seen == [names[:1], names[:2], names[1:3], names[2:4]]


def test_a_disk_that_refuses_them_does_not_stop_the_training(folder, tmp_path):
    (tmp_path / "a file").write_text("")
    assert run(folder, tmp_path, RecentTokenRecord(tmp_path / "a file" / "tokens", num_steps=2)) == [[]] * 4


def test_the_shares_of_several_ranks_are_found_together(tmp_path):
    files = TokenFiles(tmp_path)
    parts = [
        RolloutTokens(group=7, rollout=rank, runs=[2, 1], differences=b"\0\0", advantages=b"\0\0") for rank in (0, 1)
    ]
    for rank, part in enumerate(parts):
        files.write(3, rank, [part])
    assert files.of_group(3, 7) == {0: parts[0], 1: parts[1]}


def test_a_truncated_file_counts_as_missing(policy, tmp_path):
    one = group([1.0, 0.0])
    files = kept(policy, tmp_path, [one])
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    assert files.of_group(7, fingerprint(one)) is None
