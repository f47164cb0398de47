"""Real vLLM on a CPU. Run by `.venv-vllm/bin/pytest tests/vllm` (scripts/setup-vllm.sh makes that environment)."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
from pathlib import Path

import psutil
import pytest

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig

# Four heads of a size that vLLM has CPU kernels for; and completions that take long enough to do something meanwhile.
SIZES = {"hidden_size": 256, "num_layers": 16}


def pytest_collection_modifyitems(items):
    """Every test here needs vLLM. Where it is missing they are skipped, but never in CI."""
    missing = importlib.util.find_spec("vllm") is None and not os.environ.get("CI")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: scripts/setup-vllm.sh"))


class Served:
    """An engine and the event loop it lives in, called from a test: `served(engine.generate(...))`."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        from treadle.engines.vllm.start import start_vllm

        self.folder = folder
        self.engine = start_vllm(config, folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __call__(self, coroutine, timeout_s=120.0):
        return self.begin(coroutine).result(timeout_s)

    def begin(self, coroutine):
        """A concurrent.futures.Future: it runs while the test goes on."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self):
        self(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()
        assert not vllm_processes()


def vllm_processes():
    """Those that this test process started."""
    ours = psutil.Process().children(recursive=True)
    return [p for p in ours if p.is_running() and "vllm" in " ".join([p.name(), *_command_line(p)]).lower()]


def _command_line(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", **SIZES)


@pytest.fixture(scope="session")
def other_tiny_model(tmp_path_factory):
    """The same shapes with other weights."""
    return write_tiny_model(tmp_path_factory.mktemp("other") / "model", **SIZES, seed=1)
