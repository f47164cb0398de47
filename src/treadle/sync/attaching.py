"""What every mode asks when it meets the engine: is it the model and the number format that are to be trained?"""

from __future__ import annotations

from pathlib import Path

from treadle.config import TrainConfig
from treadle.errors import ConfigError
from treadle.sync.engine_link import EngineLink
from treadle.sync.live_folder import LiveFolder
from treadle.sync.model_identity import is_same_model, local_folder
from treadle.sync.receipt import Attached
from treadle.wire.bridge import BridgeInfo


def attach_own_weights(config: TrainConfig, engine: EngineLink) -> Attached:
    """For modes in which the trainer has weights of its own: the engine says what it serves, and in which format."""
    info = engine.wait_for("/bridge/info", BridgeInfo)
    refuse_other_dtype(config, info.dtype)
    refuse_other_quantization(config, info)
    return Attached(folder=choose_folder(config, Path(info.model_name)), dtype=info.dtype)


def attach_from_afar(config: TrainConfig, info: BridgeInfo) -> Attached:
    """The same where the engine may be on another machine, whose paths say nothing here: names, shapes and number
    format of the weights are compared when it joins a group with the trainer."""
    refuse_other_dtype(config, info.dtype)
    refuse_other_quantization(config, info)
    served = Path(info.model_name)
    folder = local_folder(config.model) if "model" in config.model_fields_set else None
    if folder is None:
        _refuse_other_model(config, served)
        folder = served
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {served} here, which the engine serves", fix="give --model a folder")
    return Attached(folder=folder, dtype=info.dtype)


def attach_adapters(config: TrainConfig, engine: EngineLink) -> Attached:
    """The same for modes that publish adapters."""
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
    """The model that training begins with: the one that the engine serves.

    After an earlier run with this save_path restarted the engine, it serves what that run trained.
    """
    if LiveFolder(config).holds(served):
        wished = local_folder(config.model)
        if wished is None:
            raise ConfigError(
                f"the engine serves {served}, which is trained already",
                fix="give --model the folder that training began with",
            )
        return wished
    _refuse_other_model(config, served)
    if not served.is_dir():
        raise ConfigError(f"there is no folder {served}, which the engine serves", fix="give --model a folder")
    return served


def _refuse_other_model(config: TrainConfig, served: Path) -> None:
    """A trainer that was given no model takes the engine's."""
    if "model" in config.model_fields_set and not is_same_model(config.model, served):
        raise ConfigError(
            f"the engine serves the model {served}, and the trainer is to train {config.model}",
            fix="give both the same --model, or leave the trainer's out",
        )


def refuse_other_quantization(config: TrainConfig, info: BridgeInfo) -> None:
    """Numbers of 4 bits are others than those of 16: trainer and engine would be two policies."""
    if info.quantization != config.base_quantization:
        raise ConfigError(
            f"the engine's weights have the quantization {info.quantization}, and base_quantization is "
            f"{config.base_quantization}",
            fix=f"start the engine with --quantization {config.base_quantization}, or give the trainer "
            f"--base-quantization {info.quantization}",
        )


def refuse_other_dtype(config: TrainConfig, served: str) -> None:
    if config.dtype not in ("auto", served):
        raise ConfigError(f"the engine's weights are {served}, not {config.dtype}", fix="set --dtype at the engine")
