"""Find vLLM, start its server for a model, and put the engine's port in front of it."""

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
from treadle.engines.default_model import cache_folder
from treadle.engines.interface import Engine, EngineFacts
from treadle.engines.model_folder import ModelFacts, check_model_folder, read_model_facts
from treadle.engines.tokenizer import Text
from treadle.engines.vllm.command import Place, dtype_of, max_model_len, refuse_impossible, server_command
from treadle.engines.vllm.engine import BeginServer, VllmEngine
from treadle.engines.vllm.installation import NEWEST_TESTED, OLDEST_TESTED, Installation, find_vllm, lora_rank
from treadle.engines.vllm.server_process import ServerProcess, Tell, tell_nobody
from treadle.log import get_logger
from treadle.sync.gate import gate_beside

log = get_logger("engine")


def start_vllm(config: EngineConfig, folder: Path, tell: Tell = tell_nobody) -> Engine:
    """An engine that serves the model in `folder`; returns when it is ready to generate, and tells how far it is."""
    vllm = find_vllm(config.vllm_python)
    if not vllm.is_tested:
        tested = "{}.{} to {}.{}".format(*OLDEST_TESTED, *NEWEST_TESTED)
        log.warning("vllm_version_untested", version=vllm.version, tested=tested)

    server, facts = begin_server(config, vllm, folder, tell)
    server.wait_until_it_generates(config.start_timeout_s)
    return VllmEngine(
        server,
        facts,
        Text.load(facts.folder),
        partial(prepare_server, config, vllm),
        start_timeout_s=config.start_timeout_s,
        drain_timeout_s=config.pause_timeout_s,
        gate=None if config.weights_file is None else gate_beside(config.weights_file.resolve()),
    )


def prepare_server(config: EngineConfig, vllm: Installation, folder: Path) -> BeginServer:
    """What can be refused is refused here, while an earlier server still serves."""
    check_model_folder(folder)
    refuse_impossible(config, read_model_facts(folder), vllm)
    return partial(begin_server, config, vllm, folder)


def begin_server(
    config: EngineConfig, vllm: Installation, folder: Path, tell: Tell = tell_nobody
) -> tuple[ServerProcess, EngineFacts]:
    """A server that loads now, and what it will serve."""
    model = read_model_facts(folder)
    place = _take_place(config)
    try:
        server = ServerProcess(server_command(config, model, vllm, place, os.environ), place, tell)
    except BaseException:
        shutil.rmtree(place.scratch, ignore_errors=True)  # else it goes with the server
        raise
    return server, _facts(config, vllm, model)


def _facts(config: EngineConfig, vllm: Installation, model: ModelFacts) -> EngineFacts:
    return EngineFacts(
        kind="vllm",
        version=vllm.version,
        folder=model.folder,
        device="cpu" if vllm.is_cpu else "cuda" if config.device == "auto" else config.device,
        dtype=dtype_of(config, model, vllm),
        max_model_len=max_model_len(config, model),
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
        logprobs_mode=config.logprobs_mode,
        max_num_seqs=config.max_num_seqs,
        has_lora=config.enable_lora,
        max_lora_rank=lora_rank(config.max_lora_rank) if config.enable_lora else None,
        quantization=config.quantization,
    )


def _take_place(config: EngineConfig) -> Place:
    scratch = Path(tempfile.mkdtemp(prefix="treadle-vllm-"))  # short: a socket's path has room for 107 characters
    if config.vllm_python:
        (scratch / "path").mkdir()
        (scratch / "path" / "treadle").symlink_to(Path(treadle.__file__).parent)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Place(port=port, api_key=secrets.token_urlsafe(32), scratch=scratch, cache=cache_folder() / "vllm")
