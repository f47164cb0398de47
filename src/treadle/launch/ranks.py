"""Choose the GPUs of engine and trainer ranks for a plan, and the variables by which ranks find each other.

Pure, except for looking whether this machine has a loopback interface of a known name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.budget.placement import (
    UNKNOWN_DEMAND,
    EngineDemand,
    GpuWishes,
    Placement,
    as_ranges,
    choose_placement,
    idle_note,
    name_gpus,
    settings_on_own_gpus,
)
from treadle.budget.shapes import ModelShape
from treadle.config.schema import EngineConfig, RunConfig, has_vllm
from treadle.config.values import concurrent_sequences, longest_sequence
from treadle.errors import ConfigError
from treadle.launch.machine import MachineFacts

_LOOPBACK = Path("/sys/class/net/lo")
# Settings that follow from the GPUs of this machine; a resumed run chooses them again.
_UNPLACED: Mapping[str, Any] = {
    "engine.gpus": None,
    "engine.tensor_parallel_size": 1,
    "engine.gpu_memory_utilization": EngineConfig.model_fields["gpu_memory_utilization"].default,
    "train.gpus": None,
    "train.ranks": 1,
    "train.use_shared_memory": False,
}


@dataclass(frozen=True)
class GpuLayout:
    """Settings that follow from the choice of GPUs, and notes about it; `placement` None: nothing was chosen."""

    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    placement: Placement | None = None


def choose_layout(
    config: RunConfig, facts: MachineFacts, explicit: frozenset[str], shape: ModelShape | None = None
) -> GpuLayout:
    """GPUs for the engine and the trainer ranks; `shape`: of the model, None if it is not known."""
    wishes = _wishes(config, explicit)
    _check_there(facts, wishes)
    starts_engine = not config.engine_url and config.engines > 0
    unplaced = {} if not starts_engine else {key: value for key, value in _UNPLACED.items() if key not in explicit}
    devices = (config.engine.device, config.train.device)
    if not facts.gpus or not starts_engine or any(device not in ("auto", "cuda") for device in devices):
        return _trainer_alone(config, facts, wishes, unplaced)
    sizes = [gpu.num_bytes for gpu in facts.gpus]
    demand = UNKNOWN_DEMAND
    if shape is not None and min(sizes) > 0:
        demand = EngineDemand.of(
            shape,
            max_num_seqs=concurrent_sequences(config, explicit),
            max_model_len=longest_sequence(config, explicit),
        )
    placement = choose_placement(range(len(sizes)), min(sizes), demand, wishes)
    if len(sizes) == 1 and placement.is_shared and wishes.engine_gpus is None and wishes.train_gpus is None:
        return GpuLayout(unplaced)  # the only GPU, shared
    settings = unplaced | {
        "engine.gpus": placement.engine_gpus,
        "engine.tensor_parallel_size": placement.tensor_parallel,
        "train.gpus": placement.train_gpus,
        "train.ranks": placement.ranks,
    }
    if not placement.is_shared:
        settings |= settings_on_own_gpus(config, explicit)
    idle = idle_note(placement, len(sizes), wishes)
    return GpuLayout(settings, (str(placement), *([idle] if idle else [])), placement)


def _wishes(config: RunConfig, explicit: frozenset[str]) -> GpuWishes:
    engine, train = config.engine, config.train
    ranks = train.ranks if "train.ranks" in explicit else None
    if train.quantization != "none" and "train.gpus" not in explicit:
        ranks = ranks or 1  # several were tested on a CPU only
    keeps_one_copy = "train.use_shared_memory" in explicit and not train.use_shared_memory
    return GpuWishes(
        engine_gpus=engine.gpus if "engine.gpus" in explicit and not config.engine_url else None,
        train_gpus=train.gpus if "train.gpus" in explicit else None,
        tensor_parallel=engine.tensor_parallel_size if "engine.tensor_parallel_size" in explicit else None,
        ranks=ranks,
        ranks_multiple=train.ranks_multiple,
        num_engines=max(1, config.engines),
        is_one_copy=train.single_copy or (train.mode.in_memory and keeps_one_copy),
        can_split=has_vllm(engine),
    )


def _trainer_alone(config: RunConfig, facts: MachineFacts, wishes: GpuWishes, unplaced: dict[str, Any]) -> GpuLayout:
    """Without an engine to place: its device is given, it runs already, or there are no GPUs that could be listed."""
    if wishes.train_gpus is not None:
        if wishes.ranks not in (None, len(wishes.train_gpus)):
            raise ConfigError(
                f"train.gpus names {len(wishes.train_gpus)} GPUs, and train.ranks is {wishes.ranks}",
                fix="leave --train.ranks out: each GPU gets a rank",
            )
        ranks = len(wishes.train_gpus)
        return GpuLayout(unplaced | {"train.gpus": wishes.train_gpus, "train.ranks": ranks})
    ranks, num_gpus = wishes.ranks or 1, len(facts.gpus)
    if ranks == 1 or not num_gpus or config.train.device not in ("auto", "cuda"):
        return GpuLayout(unplaced, (f"trainer: {ranks} ranks",) if ranks > 1 else ())
    if ranks > num_gpus:
        raise ConfigError(
            f"{ranks} trainer ranks need a GPU each, and this run can use {name_gpus(range(num_gpus))}",
            fix=f"--train.ranks {num_gpus}",
        )
    gpus = tuple(range(num_gpus - ranks, num_gpus))  # an engine that runs already is most likely on the first
    return GpuLayout(unplaced | {"train.gpus": gpus}, (f"trainer on {name_gpus(gpus)} ({ranks} ranks)",))


def _check_there(facts: MachineFacts, wishes: GpuWishes) -> None:
    """Refuse GPUs that this machine does not have."""
    for flag, gpus in (("--engine.gpus", wishes.engine_gpus), ("--train.gpus", wishes.train_gpus)):
        if gpus is None:
            continue
        if not facts.has_gpu:
            raise ConfigError(
                f"{flag} {as_ranges(gpus)} names GPUs, and this machine has none that a process can use",
                fix=f"leave {flag} out; --train.ranks N starts several trainer processes on a CPU",
            )
        missing = [gpu for gpu in gpus if facts.gpus and gpu >= len(facts.gpus)]
        if missing:
            raise ConfigError(
                f"there is no {name_gpus(missing)}: this run can use {name_gpus(range(len(facts.gpus)))}",
                fix=f"correct {flag}",
            )


# ---- ranks


def name_of_rank(rank: int) -> str:
    """The process of a rank: "trainer", "trainer-1"."""
    return f"trainer-{rank}" if rank else "trainer"


def rank_variables(rank: int, size: int) -> dict[str, str]:
    """The variables of torchrun for one rank of this machine, without the port; {} for a single process."""
    if size == 1:
        return {}
    # Gloo would use the address of this machine's name, which other machines can reach.
    loopback = {"GLOO_SOCKET_IFNAME": _LOOPBACK.name} if _LOOPBACK.exists() else {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {**{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": "127.0.0.1", **loopback}
