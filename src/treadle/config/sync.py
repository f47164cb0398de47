"""Define the settings of the weight sync from trainer to engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from treadle.config.section import Count, PositiveInt, Seconds, Section, option
from treadle.errors import ConfigError
from treadle.support import CANARY_BOUNDS_TEXT, WEIGHT_MODES, WeightMode, WeightModeName

FIND_BRIDGE_FILE = Path("auto")
Quantization = Literal["none", "nf4"]  # of a frozen base model


_BROADCAST_FIX = "--train.use-shared-memory true, without --train.single-copy: the trainer broadcasts to all of them"


def refuse_split_engine(num_gpus: int, *, shares_memory: bool, fix: str = _BROADCAST_FIX) -> None:
    """Refuse to share the memory of an engine of several GPUs; called by plan, launcher, engine and trainer."""
    if num_gpus > 1 and shares_memory:
        raise ConfigError(
            f"an engine that is split over {num_gpus} GPUs (tensor parallel) cannot share its weights with a trainer: "
            "each of its processes has a part of every matrix, and a parameter of the trainer would have to be a view "
            "of the memory of several processes",
            fix=f"{fix}; or use an engine on one GPU",
        )


def with_fleet_mode(train: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a trainer of several engines: without a weight mode, files, or the broadcast that is asked for.

    >>> with_fleet_mode({"use_shared_memory": "true"})["weight_bridge_mode"]
    'shared_vllm'
    """
    broadcasts = str(train.get("use_shared_memory", "")).lower() in ("true", "1", "t", "on", "yes", "y")
    return {"weight_bridge_mode": "shared_vllm" if broadcasts else "reload", **train}


class SyncOptions(Section):
    """How new weights reach the engine, and how each publish is verified."""

    weight_bridge_mode: WeightModeName = option(
        "shared_vllm",
        "memory that engine and trainer share; adapters, loaded while it serves; a restart with an adapter "
        "(lora_restart) or with all weights (none); from disk all weights (reload) or the changed ones (delta); "
        "no engine (offline)",
    )
    single_copy: bool = option(
        False,
        "shared_vllm: one copy of the weights for both, or an error; without it a second copy is made where it is "
        "needed. lora_only: one copy of the base model; the trainer reads the engine's",
    )
    use_shared_memory: bool = option(
        False, "shared_vllm: two copies: the trainer keeps its own and hands over new weights"
    )
    broadcast_by: Literal["auto", "memory", "nccl", "gloo"] = option(
        "auto",
        "use_shared_memory: how the weights travel; auto: through memory where trainer and engine can share it, else "
        "NCCL between GPUs, else Gloo",
    )
    broadcast_host: str = option(
        "",
        "use_shared_memory: address at which engines reach this machine; empty: MASTER_ADDR if it is set, else the one "
        "on the engine's network",
    )
    vllm_restart_interval: PositiveInt | None = option(
        None,
        "steps between two publishes (the last step is always published); empty: 3 where the engine restarts, else 1 "
        "(shared_vllm: always 1)",
    )
    vllm_config_path: Path | None = option(
        None,
        "shared_vllm: the engine's vllm_bridge_config.json, which must name the weights that it serves; auto: look for "
        "one in $VLLM_BRIDGE_CONFIG_PATH, $LOGDIR and this folder; empty: only ask the engine",
    )
    live_path: Path | None = option(
        None, "folder of weights on their way to the engine (a memory disk is fastest); empty: live in save_path"
    )
    publish_timeout_s: Seconds | None = option(
        None,
        "seconds for one publish; a slower engine ends the run with an error, and one of several is taken out until it "
        "is verified; empty: 180, and 900 where it restarts",
    )
    min_engines: Count = option(
        0,
        "several engines: how many must have joined before training starts; 0: NUM_INFERENCE_NODES where that is set, "
        "else 1",
    )
    verify_publish: Literal["auto", "always", "off"] = option(
        "auto",
        "verify every publish by fingerprints of the weights, and at times by logprobs of a canary prompt; always: the "
        "canary at every publish too; off: neither",
    )
    canary_tolerance: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = option(
        None,
        "nats that trainer and engine may be apart on the canary in the mean, and ten times that on one token; "
        f"empty: {CANARY_BOUNDS_TEXT}",
    )

    @model_validator(mode="before")
    @classmethod
    def _adapters_of_mode(cls, values: Any) -> Any:
        """A mode that publishes adapters trains them."""
        mode = WEIGHT_MODES.get(str(values.get("weight_bridge_mode"))) if isinstance(values, dict) else None
        return {"lora": True} | values if mode is not None and mode.adapters else values

    @model_validator(mode="after")
    def _one_way(self) -> SyncOptions:
        given = [flag for flag in ("single_copy", "use_shared_memory") if getattr(self, flag)]
        if len(given) > 1:
            raise ValueError(
                "single_copy is one copy of the weights for engine and trainer, use_shared_memory is two: give one of "
                "the two"
            )
        needed = "single_copy" if self.single_copy else "in_memory"
        modes = [name for name, mode in WEIGHT_MODES.items() if getattr(mode, needed)]
        if given and self.weight_bridge_mode not in modes:
            raise ValueError(
                f"{given[0]} is a way of weight_bridge_mode {' and '.join(modes)}, and the mode is "
                f"{self.weight_bridge_mode}: leave one of them out"
            )
        broadcast = {"broadcast_by": self.broadcast_by != "auto", "broadcast_host": bool(self.broadcast_host)}
        if any(broadcast.values()) and not self.use_shared_memory:
            named = next(name for name, is_given in broadcast.items() if is_given)
            raise ValueError(
                f"{named} is for use_shared_memory, which is off: set use_shared_memory too, or leave it out"
            )
        return self

    @property
    def mode(self) -> WeightMode:
        """What the mode needs and allows."""
        return WEIGHT_MODES[self.weight_bridge_mode]

    @property
    def can_have_fleet(self) -> bool:
        """Whether the weights can go to several engines, which come and go."""
        return self.mode.fleet or (self.use_shared_memory and self.broadcast_by != "memory")

    @property
    def shares_memory(self) -> bool:
        """Whether the trainer maps the memory that the engine computes from."""
        if self.use_shared_memory:
            return self.broadcast_by == "memory"
        return self.single_copy or self.mode.in_memory

    def check_engine_workers(self, num_workers: int) -> None:
        """Refuse an engine that is split over several processes, if this needs its memory."""
        fix = _BROADCAST_FIX
        if self.use_shared_memory:
            fix = "leave --train.broadcast-by out: NCCL between GPUs, else Gloo"
        elif not self.mode.in_memory:
            fix = "leave --train.single-copy out"
        refuse_split_engine(num_workers, shares_memory=self.shares_memory, fix=fix)

    @property
    def publish_interval(self) -> int:
        """Steps from one publish to the next."""
        return 1 if self.mode.every_step else self.vllm_restart_interval or self.mode.interval

    @property
    def publish_deadline_s(self) -> float:
        return self.publish_timeout_s or self.mode.deadline_s
