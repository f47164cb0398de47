"""vLLM engine: runs vLLM's stock server as a child process on loopback, and uses its public extension points only.

command.py           the installed version and its limits; settings -> command line and environment of the server
server_process.py    starts and stops the child process; child_guard.py ends it when this process dies
client.py            HTTP calls to the server
completions.py       messages of POST /treadle/generate
request_flow.py      requests that wait while weights change; counters; changes one at a time
adapters.py          LoRA adapters
engine.py            the engine interface (engines/interface.py)
middleware.py        runs inside vLLM's API process: blocks unused routes, adds Treadle's
worker.py            runs inside vLLM's worker: loads weights, shares them with a trainer; cpu_lora.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.support import VLLM

if TYPE_CHECKING:
    from treadle.config import EngineConfig
    from treadle.engines.interface import InferenceEngine


def start_vllm(
    config: EngineConfig, folder: Path, on_progress: Callable[[str, int, int], None] = lambda *_: None
) -> InferenceEngine:
    """Find vLLM and start its server for the model in `folder`; returns an engine that is ready to generate."""
    # Imported here, because vLLM's own processes import this package for middleware.py and worker.py.
    from treadle.engines.tokenizer import ModelTokenizer
    from treadle.engines.vllm.command import find_vllm
    from treadle.engines.vllm.engine import VllmEngine
    from treadle.engines.vllm.server_process import START_TIMEOUT_S, begin_server, log, prepare_server
    from treadle.sync.gate import gate_beside

    vllm = find_vllm(config.vllm_python)
    if vllm.version not in VLLM:
        log.warning("vllm_version_untested", version=vllm.version, tested=str(VLLM))
    server, facts = begin_server(config, vllm, folder, on_progress)
    server.wait_until_ready(START_TIMEOUT_S)
    return VllmEngine(
        server,
        facts,
        ModelTokenizer.load(facts.folder),
        partial(prepare_server, config, vllm),
        gate=None if config.weights_file is None else gate_beside(config.weights_file.resolve()),
    )
