"""Start real vLLM servers: on a CPU in CI, on a GPU if there is one. Run by `.venv-vllm/bin/pytest tests/vllm`
(scripts/setup-vllm.sh makes that environment).

A server takes half a minute to start, so most tests share one (`served`) and restore its state. Those that stop it
(test_restart.py) run last. `-n 2 --dist loadgroup` runs two servers in parallel. On a CPU nothing is compiled, unless a
test asks for it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import uvicorn
from tokenizers import Tokenizer, decoders
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig
from treadle.sync.shared_memory import map_weights

# Four heads of a size that vLLM has CPU kernels for, and completions long enough to do something while they run.
SIZES = {"hidden_size": 256, "num_layers": 8}
START_S = 900.0  # timeout of a start, while another server starts too and both compile
HERE = Path(__file__).parent
RUNS_LAST = HERE / "test_restart.py"
# Fixtures that start a server for several tests -> xdist group of these tests.
SHARED = {"served": "served", "adapting": "served", "engine": "engine"}
HAS_GPU = torch.cuda.is_available()
ADAPTERS_KEPT = 4  # --max-cpu-loras of the shared server: few, so that tests soon exceed it
# Mean difference of logprobs to a plain forward in float32 on a CPU: with the same weights, with others, and with the
# same adapters. On a GPU vLLM's attention multiplies in TF32, and it computes adapters in half precision only.
SAME, OTHER, SAME_ADAPTER = (5e-3, 0.03, 0.02) if HAS_GPU else (1e-4, 1e-3, 1e-4)


@pytest.hookimpl(tryfirst=True)  # before the groups are read
def pytest_collection_modifyitems(items):
    """Mark all tests here; skip them where vLLM is not installed, but never in CI."""
    missing = importlib.util.find_spec("vllm") is None and not os.environ.get("CI")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            for group in {SHARED[name] for name in SHARED.keys() & set(item.fixturenames)}:
                item.add_marker(pytest.mark.xdist_group(group))
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: scripts/setup-vllm.sh"))
    items.sort(key=lambda item: item.path == RUNS_LAST)


def pytest_collection_finish(session):
    """Check that xdist keeps groups together. Otherwise each worker would start every server, and tests that depend on
    their order would be split."""
    is_grouping = os.environ.get("PYTEST_XDIST_WORKER") and session.config.getoption("loadgroup", False)
    for item in session.items if is_grouping else ():
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError(f"pytest-xdist does not group tests with pytest {pytest.__version__}")


class Served:
    """An engine with its HTTP API on an event loop in a thread: `served(engine.generate(...))` from a test."""

    def __init__(self, config: EngineConfig) -> None:
        from treadle.engines.api import create_app, engine_access
        from treadle.engines.vllm import start_vllm
        from treadle.net.address import take_port

        config = with_little_memory(config)
        self.folder = Path(config.model)
        self.engine = start_vllm(config, self.folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        listener = take_port("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(self.engine, config, engine_access(config, {}))
        self._http = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        self._serving = self.begin(self._http.serve(sockets=[listener]))

    def __call__(self, coroutine, timeout_s=120.0):
        return self.begin(coroutine).result(timeout_s)

    def begin(self, coroutine):
        """Start a coroutine; returns a concurrent.futures.Future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def processes(self):
        """Processes of the current vLLM server."""
        if self.engine._server.exit_reason() is not None:
            return []
        return psutil.Process(self.engine._server._process.pid).children(recursive=True)

    def close(self):
        own = self.processes()
        self._http.should_exit = True
        self._serving.result(30)
        self(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()
        assert not [words for process in own if (words := words_of(process))]


def with_little_memory(config):
    """Fix the KV cache size, so that several servers fit on one GPU whatever the others allocate or free."""
    if not HAS_GPU:
        return config
    flags = f"{config.vllm_args} --kv-cache-memory-bytes=1G"
    return config.model_copy(update={"gpu_memory_utilization": 0.1, "vllm_args": flags})


def vllm_processes():
    """vLLM processes that this test process started."""
    ours = psutil.Process().children(recursive=True)
    return [p for p in ours if "vllm" in " ".join(words_of(p)).lower()]


def words_of(process):
    """Name and command line; empty if the process has ended."""
    try:
        return [process.name(), *process.cmdline()] if process.is_running() else []
    except psutil.Error:
        return []


def wait_until(condition, deadline_s=START_S):
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


def serve(folder, weights_file, **changes):
    """A server with all options: shared weights, adapters, vLLM in another Python."""
    few = f"--max-loras={ADAPTERS_KEPT} --max-cpu-loras={ADAPTERS_KEPT}"
    adapters = {"enable_lora": True, "max_lora_rank": 16, "vllm_args": few}
    # --threads also stops vLLM from binding its threads to a core: two servers would bind theirs to the same one.
    settings = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 32, "threads": 1, **adapters}
    settings |= {"adapter_root": folder.parents[1]}  # the parent of all temporary folders
    settings |= {"vllm_python": sys.executable, **changes}
    return Served(EngineConfig(engine="vllm", model=str(folder), weights_file=weights_file, **settings))


@pytest.fixture(scope="session")
def served(tiny_model, tmp_path_factory):
    """The shared server; on a GPU without adapters."""
    served = serve(tiny_model, tmp_path_factory.mktemp("shared") / "weights", enable_lora=not HAS_GPU)
    yield served
    served.close()


@pytest.fixture
def weights(served):
    """The served weights, writable; restored after the test, also if it fails."""
    weights = map_weights(served(served.engine.layout()))
    saved = {name: weight.clone() for name, weight in weights.items()}
    yield weights
    if all(torch.equal(weight, saved[name]) for name, weight in weights.items()):
        return
    served(served.engine.hold("keep", 60))
    for name, weight in weights.items():
        weight.copy_(saved[name])
    served(served.engine.release(served.engine.policy_version + 1))


@pytest.fixture(scope="session")
def adapting(request, tmp_path_factory):
    """The server for adapters: the shared one, or on a GPU another one in half precision."""
    if not HAS_GPU:
        yield request.getfixturevalue("served")
        return
    folder = _write_model(tmp_path_factory.mktemp("half") / "model", **SIZES, dtype=torch.float16)
    adapting = serve(folder, tmp_path_factory.mktemp("shared") / "weights", dtype="float16")
    yield adapting
    adapting.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return _write_model(tmp_path_factory.mktemp("tiny") / "model", **SIZES)


SMALL_SIZES = {
    "vocab_size": 82, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 1,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="session")
def qwen2_model(tmp_path_factory):
    """With biases and an untied output layer."""
    config = Qwen2Config(**SMALL_SIZES, tie_word_embeddings=False)
    return _write_model_of(config, tmp_path_factory.mktemp("qwen2") / "model")


@pytest.fixture(scope="session")
def qwen3_model(tmp_path_factory):
    """With query and key norms and RoPE scaling."""
    config = Qwen3Config(**SMALL_SIZES, head_dim=64, tie_word_embeddings=True, rope_parameters=ROPE)
    return _write_model_of(config, tmp_path_factory.mktemp("qwen3") / "model")


def _write_model_of(config, folder):
    _write_model(folder, hidden_size=32, num_layers=1)  # writes the tokenizer
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # zeros and ones would hide a mistake
    model.save_pretrained(folder)
    return folder


def _write_model(folder, **sizes):
    """vLLM decodes a completion after its prompt. With Fuse, as in real tokenizers, a token's text does not depend on
    the one before, so that decoding the completion alone gives the same."""
    write_tiny_model(folder, **sizes)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
