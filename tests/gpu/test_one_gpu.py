"""Engine and trainer on one GPU: two processes, one copy of the weights. Never run in CI: pytest -m gpu tests/gpu."""

from __future__ import annotations

import importlib.util

import httpx
import pytest
import torch

from tests.e2e.processes import free_port, running, wait_until_healthy
from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.sync.modes import LoraSwapSync
from treadle.sync.shared_vllm import SingleCopySync
from treadle.train.optimizers import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import build_policy
from treadle.wire.groups import ScoredGroup

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPT = [20, 21, 22, 23]
CASES = [
    ("transformers", "float32", 1e-4),
    ("transformers", "bfloat16", 0.1),
    pytest.param("vllm", "bfloat16", 0.3, marks=needs_vllm),
]


@pytest.mark.parametrize(("engine", "dtype", "limit"), CASES)
def test_published_weights_are_the_engines_own_and_logprobs_agree(engine, dtype, limit, tmp_path):
    folder = write_tiny_model(tmp_path / "model", hidden_size=256)
    port, log = free_port(), tmp_path / "engine.log"
    flags = ("--engine", engine, "--model", str(folder), "--port", str(port), "--dtype", dtype, "--device", "cuda",
             "--max-model-len", "256", "--weights-file", str(tmp_path / "weights"))  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with running("engine", *flags, log=log) as process:
        wait_until_healthy(f"{url}/health", process, log, timeout_s=240)
        config = TrainConfig(device="cuda", engine_url=url, micro_tokens=10_000, single_copy=True)
        sync = SingleCopySync(config)
        attached = sync.attach()
        assert attached.layout.storages
        square = torch.ones(64, 64, device="cuda", dtype=getattr(torch, dtype))
        square @ square  # cuBLAS takes its workspace
        before = torch.cuda.memory_allocated()
        policy = build_policy(attached, config)
        assert torch.cuda.memory_allocated() - before < 100_000  # buffers: no second copy of the weights
        optimizer = build_optimizer(policy, config)
        sync.publish(policy, version=0)
        for version in (1, 2):
            with torch.no_grad():
                for master in optimizer.masters.values():
                    master.add_(torch.randn_like(master) * 0.02)
            receipt = sync.publish(policy, version=version)
            answer = ask(url)
            assert answer["policy_version"] == version
            (micro,) = pack([as_group(answer)], config).micros
            logprobs, _ = policy.score(micro)
            difference = (logprobs.detach().cpu() - micro.loss_tokens.rollout_logprobs_L).abs()
            print(
                f"{engine} {dtype}: |trainer - engine| mean {difference.mean():.2e}, max {difference.max():.2e}; "
                f"pause {receipt.wait_s * 1e3:.1f} ms, write {receipt.write_s * 1e3:.1f} ms, {receipt.verified}"
            )
            assert difference.max() < limit
            logprobs.sum().backward()
            assert all(torch.isfinite(g).all() for g in optimizer.gradients.values())


SHARED, NF4 = "the engine's own", "in 4 bits"


@pytest.mark.parametrize("base", [SHARED, NF4])
@pytest.mark.parametrize(("engine", "dtype", "limit"), CASES)
def test_adapters_are_trained_on_a_base(engine, dtype, limit, base, tmp_path):
    if base == NF4:
        pytest.importorskip("bitsandbytes")
    folder = write_tiny_model(tmp_path / "model", hidden_size=256)
    port, log = free_port(), tmp_path / "engine.log"
    shared = ("--weights-file", str(tmp_path / "weights"))
    flags = ("--engine", engine, "--model", str(folder), "--port", str(port), "--dtype", dtype, "--device", "cuda",
             "--max-model-len", "256", "--enable-lora", "--adapter-root", str(tmp_path), "--enforce-eager",
             "--max-lora-rank", "16", "--gpu-memory-utilization", "0.1",
             *(shared if base == SHARED else ("--quantization", "nf4")))  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with running("engine", *flags, log=log) as process:
        wait_until_healthy(f"{url}/health", process, log, timeout_s=240)
        config = TrainConfig(
            device="cuda", engine_url=url, micro_tokens=10_000, weight_bridge_mode="lora_only",
            single_copy=base == SHARED, quantization="none" if base == SHARED else "nf4",
            lora_target_modules=("q_proj", "up_proj"), save_path=tmp_path / "saved",
        )  # fmt: skip
        sync = LoraSwapSync(config)
        attached = sync.attach()
        square = torch.ones(64, 64, device="cuda", dtype=getattr(torch, dtype))
        square @ square  # cuBLAS takes its workspace
        before = torch.cuda.memory_allocated()
        policy = build_policy(attached, config)
        adapters = sum(p.numel() * p.element_size() for p in policy.live.values())
        used = torch.cuda.memory_allocated() - before
        print(f"{engine} {dtype}, base {base}: {used} bytes, adapters {adapters}")
        assert base != SHARED or used < adapters + 200_000  # buffers: no second copy of the base
        optimizer = build_optimizer(policy, config)
        for version in (1, 2):
            with torch.no_grad():
                for master in optimizer.masters.values():
                    master.add_(torch.randn_like(master) * 0.02)
            sync.publish(policy, version=version)
            sync.settle()
            answer = ask(url)
            assert answer["policy_version"] == version
            (micro,) = pack([as_group(answer)], config).micros
            logprobs, _ = policy.score(micro)
            difference = (logprobs.detach().cpu() - micro.loss_tokens.rollout_logprobs_L).abs()
            print(f"{engine} {dtype}: |trainer - engine| mean {difference.mean():.2e}, max {difference.max():.2e}")
            assert difference.max() < limit


def ask(url: str) -> dict:
    body = {"prompt": {"prompt_token_ids": PROMPT}, "n": 4, "max_tokens": 30, "logprobs": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/generate", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def as_group(answer: dict) -> ScoredGroup:
    chosen = [
        [position[0][str(token)] for token, position in zip(ids, positions, strict=True)]
        for ids, positions in zip(answer["token_ids"], answer["logprobs"], strict=True)
    ]
    return ScoredGroup(
        tokens=[PROMPT + ids for ids in answer["token_ids"]],
        masks=[[-100] * len(PROMPT) + ids for ids in answer["token_ids"]],
        scores=[0.0, 1.0, 2.0, 3.0],
        inference_logprobs=[[1.0] * len(PROMPT) + values for values in chosen],
    )
