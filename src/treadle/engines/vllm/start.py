"""Find vLLM, start its server for a model, and return an engine that uses it."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from functools import partial
from pathlib import Path

import treadle
from treadle.config import EngineConfig
from treadle.engines.interface import EngineFacts, InferenceEngine
from treadle.engines.model_folder import CheckpointFacts, check_model_folder, read_checkpoint_facts
from treadle.engines.models import cache_folder
from treadle.engines.tokenizer import ModelTokenizer
from treadle.engines.vllm.command import (
    Installation,
    ServerResources,
    check_supported,
    find_vllm,
    lora_rank,
    max_model_len,
    server_command,
    serving_dtype,
)
from treadle.engines.vllm.engine import BeginServer, VllmEngine
from treadle.engines.vllm.server_process import OnProgress, ServerProcess, ignore_progress
from treadle.log import get_logger
from treadle.support import VLLM
from treadle.sync.gate import gate_beside

log = get_logger("engine")


def start_vllm(config: EngineConfig, folder: Path, on_progress: OnProgress = ignore_progress) -> InferenceEngine:
    """An engine that serves the model in `folder`; returns when it is ready to generate."""
    vllm = find_vllm(config.vllm_python)
    if not vllm.is_tested:
        log.warning("vllm_version_untested", version=vllm.version, tested=str(VLLM))

    server, facts = begin_server(config, vllm, folder, on_progress)
    server.wait_until_ready(config.start_timeout_s)
    return VllmEngine(
        server,
        facts,
        ModelTokenizer.load(facts.folder),
        partial(prepare_server, config, vllm),
        start_timeout_s=config.start_timeout_s,
        drain_timeout_s=config.pause_timeout_s,
        gate=None if config.weights_file is None else gate_beside(config.weights_file.resolve()),
    )


def prepare_server(config: EngineConfig, vllm: Installation, folder: Path) -> BeginServer:
    """Check the model and settings while an earlier server still serves; returns the function that starts a new one."""
    check_model_folder(folder)
    check_supported(config, read_checkpoint_facts(folder), vllm)
    return partial(begin_server, config, vllm, folder)


def begin_server(
    config: EngineConfig, vllm: Installation, folder: Path, on_progress: OnProgress = ignore_progress
) -> tuple[ServerProcess, EngineFacts]:
    """Start a server; returns while it loads."""
    model = read_checkpoint_facts(folder)
    resources = _allocate_resources(config)
    try:
        server = ServerProcess(server_command(config, model, vllm, resources, os.environ), resources, on_progress)
    except BaseException:
        shutil.rmtree(resources.scratch, ignore_errors=True)  # otherwise child_guard.py deletes it
        raise
    return server, _facts(config, vllm, model)


def _facts(config: EngineConfig, vllm: Installation, model: CheckpointFacts) -> EngineFacts:
    return EngineFacts(
        kind="vllm",
        version=vllm.version,
        folder=model.folder,
        device="cpu" if vllm.is_cpu else "cuda" if config.device == "auto" else config.device,
        dtype=serving_dtype(config, model, vllm),
        max_model_len=max_model_len(config, model),
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
        logprobs_mode=config.logprobs_mode,
        max_num_seqs=config.max_num_seqs,
        has_lora=config.enable_lora,
        max_lora_rank=lora_rank(config.max_lora_rank) if config.enable_lora else None,
        quantization=config.quantization,
    )


def _allocate_resources(config: EngineConfig) -> ServerResources:
    scratch = Path(tempfile.mkdtemp(prefix="treadle-vllm-"))  # short: a socket's path has at most 107 characters
    if config.vllm_python:
        (scratch / "path").mkdir()
        (scratch / "path" / "treadle").symlink_to(Path(treadle.__file__).parent)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ServerResources(port=port, api_key=secrets.token_urlsafe(32), scratch=scratch, cache=cache_folder() / "vllm")
