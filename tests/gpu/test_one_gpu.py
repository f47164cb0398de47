"""Engine and trainer on one GPU. Never run in CI: pytest -m gpu tests/gpu on a machine that has one."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig, TrainConfig
from treadle.engines.sampling import SamplingParams
from treadle.engines.transformers_engine import Request, TransformersEngine
from treadle.train.optim import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import share_policy
from treadle.wire.groups import ScoredGroup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPT = [20, 21, 22, 23]


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_published_weights_are_adopted_and_logprobs_agree(dtype, limit, tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    config = EngineConfig(device="cuda", dtype=dtype, weights_file=tmp_path / "weights")
    engine = TransformersEngine(config, folder)
    training = TrainConfig(device="cuda", logprob_chunk=64, micro_tokens=10_000)
    policy = share_policy(engine.layout, training)
    optimizer = build_optimizer(policy, training)
    assert policy.device.type == engine.device.type == "cuda"
    for seed in (1, 2):
        with torch.no_grad():
            for master in optimizer.masters.values():
                master.add_(torch.randn_like(master) * 0.02)
        policy.write_live_weights()
        engine.adopt()
        sequences = engine.admit([Request(PROMPT, 4, 30, SamplingParams(), seed, [], set())])[0]
        while any(s.finish_reason is None for s in sequences):
            engine.step()
        group = ScoredGroup(
            tokens=[PROMPT + s.token_ids for s in sequences],
            masks=[[-100] * len(PROMPT) + s.token_ids for s in sequences],
            scores=[0.0, 1.0, 2.0, 3.0],
            inference_logprobs=[[1.0] * len(PROMPT) + s.logprobs for s in sequences],
        )
        (micro,) = pack([group], training).micros
        logprobs, _ = policy.score(micro)
        difference = (logprobs.detach().cpu() - micro.loss_tokens.rollout_logprobs_L).abs().max().item()
        print(f"{dtype}: max |trainer - engine| = {difference:.2e}")
        assert difference < limit
        logprobs.sum().backward()
        assert all(torch.isfinite(g).all() for g in optimizer.gradients.values())
