"""Check at attach time that the engine serves the model, number format and quantization that are to be trained."""

from __future__ import annotations

from pathlib import Path

from treadle.config import TrainConfig
from treadle.errors import ConfigError
from treadle.sync.engine_link import EngineLink
from treadle.sync.model_folders import LiveFolder, is_same_model, local_folder
from treadle.sync.protocol import Attached
from treadle.wire.bridge import BridgeInfo


def attach_own_weights(config: TrainConfig, engine: EngineLink) -> Attached:
    """For modes in which the trainer has its own copy of the weights."""
    info = engine.wait_for("/bridge/info", BridgeInfo)
    check_same_dtype(config, info.dtype)
    check_same_quantization(config, info)
    return Attached(folder=choose_folder(config, Path(info.model_name)), dtype=info.dtype)


def attach_remote(config: TrainConfig, info: BridgeInfo) -> Attached:
    """For an engine that may be on another machine, where its paths mean nothing. Names, shapes and number format of
    the weights are compared when it joins the process group."""
    check_same_dtype(config, info.dtype)
    check_same_quantization(config, info)
    served = Path(info.model_name)
    folder = local_folder(config.model) if "model" in config.model_fields_set else None
    if folder is None:
        _check_same_model(config, served)
        folder = served
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {served} here, which the engine serves", fix="give --model a folder")
    return Attached(folder=folder, dtype=info.dtype)


def attach_adapters(config: TrainConfig, engine: EngineLink) -> Attached:
    """For modes that publish adapters."""
    attached = attach_own_weights(config, engine)
    info = engine.get("/bridge/info", BridgeInfo)
    if not info.has_lora:
        raise ConfigError(
            f"the engine at {engine.url} takes no adapters, which --weight-bridge-mode {config.weight_bridge_mode} "
            "publishes",
            fix="start it with --enable-lora, or choose --weight-bridge-mode reload",
        )
    if info.max_lora_rank is not None and config.lora_r > info.max_lora_rank:
        raise ConfigError(
            f"adapters of rank {config.lora_r} are over the engine's largest, {info.max_lora_rank}",
            fix=f"start the engine with --max-lora-rank {config.lora_r}, or set --lora-r {info.max_lora_rank}",
        )
    return attached


def choose_folder(config: TrainConfig, served: Path) -> Path:
    """The folder of the model that training starts from: the one that the engine serves.

    If an earlier run with this save_path restarted the engine, it serves trained weights, and --model is used instead.
    """
    if LiveFolder(config).holds(served):
        requested = local_folder(config.model)
        if requested is None:
            raise ConfigError(
                f"the engine serves {served}, which is trained already",
                fix="give --model the folder that training began with",
            )
        return requested
    _check_same_model(config, served)
    if not served.is_dir():
        raise ConfigError(f"there is no folder {served}, which the engine serves", fix="give --model a folder")
    return served


def _check_same_model(config: TrainConfig, served: Path) -> None:
    """Without --model the trainer takes the engine's model."""
    if "model" in config.model_fields_set and not is_same_model(config.model, served):
        raise ConfigError(
            f"the engine serves the model {served}, and the trainer is to train {config.model}",
            fix="give both the same --model, or leave the trainer's out",
        )


def check_same_quantization(config: TrainConfig, info: BridgeInfo) -> None:
    """Weights of 4 and of 16 bits are different policies."""
    if info.quantization != config.base_quantization:
        raise ConfigError(
            f"the engine's weights have the quantization {info.quantization}, and base_quantization is "
            f"{config.base_quantization}",
            fix=f"start the engine with --quantization {config.base_quantization}, or give the trainer "
            f"--base-quantization {info.quantization}",
        )


def check_same_dtype(config: TrainConfig, served: str) -> None:
    if config.dtype not in ("auto", served):
        raise ConfigError(f"the engine's weights are {served}, not {config.dtype}", fix="set --dtype at the engine")
