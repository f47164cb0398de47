"""Two copies kept alike by NCCL. Never run in CI: pytest -m gpu tests/gpu.

NCCL refuses two ranks on one GPU of one host. Two names of hosts, and sockets between them, get around that, so one
card is enough; what it measures then is the sockets.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.processes import free_port, running, wait_until_healthy
from tests.gpu.test_one_gpu import as_group, ask
from tests.tiny_model import write_tiny_model
from tests.unit.sync.group_peer import Weights
from treadle.config import TrainConfig
from treadle.errors import SyncError
from treadle.sync.broadcaster import Receiver, WeightBroadcaster
from treadle.sync.protocol import EngineLink
from treadle.sync.shared_vllm import BroadcastSync
from treadle.train.optimizers import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import build_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

AS_TWO_HOSTS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
TIMEOUT_S = 60.0
SOON_S = 30.0


@dataclass(frozen=True)
class Running:
    url: str
    folder: Path
    process: subprocess.Popen


VLLM = pytest.param("vllm", marks=pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"))


@pytest.fixture
def engine(request, tmp_path, monkeypatch):
    """This process is the other host."""
    kind = getattr(request, "param", "transformers")
    for name, value in (AS_TWO_HOSTS | {"NCCL_HOSTID": "engine"}).items():
        monkeypatch.setenv(name, value)  # before either process uses NCCL
    folder = write_tiny_model(tmp_path / "model", hidden_size=256)
    port, log = free_port(), tmp_path / "engine.log"
    flags = ("--engine", kind, "--model", str(folder), "--port", str(port), "--dtype", "bfloat16",
             "--device", "cuda", "--max-model-len", "256", "--gpu-memory-utilization", "0.2",
             "--vllm-args=--kv-cache-memory-bytes=1G")  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with running("engine", *flags, log=log) as process:
        wait_until_healthy(f"{url}/health", process, log, timeout_s=240)
        monkeypatch.setenv("NCCL_HOSTID", "trainer")
        yield Running(url, folder, process)


def attached(url, way):
    config = TrainConfig(
        device="cuda", engine_url=url, micro_tokens=10_000, use_shared_memory=True, verify_publish="always",
        publish_timeout_s=TIMEOUT_S, broadcast_by=way,
    )  # fmt: skip
    sync = BroadcastSync(config)
    policy = build_policy(sync.attach(), config)
    return config, sync, policy, build_optimizer(policy, config)


def change(optimizer):
    with torch.no_grad():
        for master in optimizer.masters.values():
            master.add_(torch.randn_like(master) * 0.02)


@pytest.mark.parametrize("way", ["auto", "gloo"])
@pytest.mark.parametrize("engine", ["transformers", VLLM], indirect=True)
def test_broadcast_weights_are_the_trainers_and_logprobs_agree(engine, way):
    """auto takes NCCL: both are on GPUs, and the engine shares no memory."""
    config, sync, policy, optimizer = attached(engine.url, way)
    sync.publish(policy, version=0)
    for version in (1, 2):
        change(optimizer)
        receipt = sync.publish(policy, version=version)
        assert receipt.num_bytes == sum(weight.nbytes for _, weight in policy.served_weights())
        answer = ask(engine.url)
        assert answer["policy_version"] == version
        (micro,) = pack([as_group(answer)], config).micros
        logprobs, _ = policy.score(micro)
        difference = (logprobs.detach().cpu() - micro.loss_tokens.rollout_logprobs_L).abs()
        print(
            f"{'nccl' if way == 'auto' else way}: |trainer - engine| mean {difference.mean():.2e}, max "
            f"{difference.max():.2e}; pause {receipt.wait_s:.4f} s, broadcast of {receipt.num_bytes / 1e6:.1f} MB "
            f"{receipt.write_s:.4f} s, {receipt.verified}"
        )
        assert difference.max() < 0.1


def joined(engine, timeout_s):
    """(A link to it, the weights that it serves, on the GPU.)"""
    tensors = load_file(engine.folder / "model.safetensors")
    weights = Weights({name: tensor.to("cuda", torch.bfloat16) for name, tensor in tensors.items()})
    link = WeightBroadcaster([Receiver(EngineLink(engine.url, timeout_s))], "nccl", timeout_s=timeout_s)
    link.join(weights)
    return link, weights


def test_an_engine_that_hangs_ends_a_broadcast_at_the_deadline(engine):
    link, weights = joined(engine, timeout_s=10.0)
    os.kill(engine.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        with pytest.raises(SyncError, match=f"the engine at {engine.url}") as error:
            link.send(weights)
    finally:
        os.kill(engine.process.pid, signal.SIGCONT)
    print(f"a silent engine, after {time.monotonic() - started:.1f} s: {error.value.message}")
    assert time.monotonic() - started < SOON_S


def test_an_engine_that_dies_in_the_middle_ends_a_broadcast_in_an_error(engine):
    link, weights = joined(engine, timeout_s=TIMEOUT_S)
    os.kill(engine.process.pid, signal.SIGSTOP)
    threading.Timer(2.0, engine.process.kill).start()
    started = time.monotonic()
    with pytest.raises(SyncError, match=f"the engine at {engine.url}") as error:
        link.send(weights)
    print(f"a dead engine, after {time.monotonic() - started:.1f} s: {error.value.message}")
    assert time.monotonic() - started < SOON_S
