"""How the ranks of a trainer find each other, and which device each of them takes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from treadle.config import TrainConfig
from treadle.errors import ConfigError, ProcessDied
from treadle.log import get_logger
from treadle.sync.process_group import first_sentence
from treadle.train.ranks import ALONE, Ranks, Together

log = get_logger("ranks")

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
# Variables that set up Atropos' broadcast of weights. torchrun sets MASTER_* too, together with WORLD_SIZE.
_OF_THE_BROADCAST = ("NUM_INFERENCE_NODES", "MASTER_ADDR", "MASTER_PORT")
_START_TOGETHER = "start the trainer with torchrun --nproc-per-node N -m treadle train ..."


def join_ranks(config: TrainConfig) -> Ranks:
    """Find the other ranks, as torchrun or --trainer-rank and --world-size say; `ALONE` when there are none."""
    rank, size, local_rank = _who_am_i(config)
    if rank == 0 and (note := unused_variables(os.environ, size)):
        log.warning("variables_without_effect", note=note)
    if size == 1:
        return ALONE
    if not 0 <= rank < size:
        raise ConfigError(f"there is no rank {rank} among {size}", fix=f"number the ranks from 0 to {size - 1}")
    device = choose_rank_device(config.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a timeout is then an error here, not an abort
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            init_method=config.init_method,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=config.ranks_timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise ProcessDied(
            f"rank {rank} of {size} did not find the others: {first_sentence(error)}", fix=_START_TOGETHER
        ) from error
    if rank > 0:
        logging.getLogger("treadle").setLevel(logging.ERROR)  # rank 0 says it for all
    ranks = Together(rank, size, config.ranks_timeout_s)
    _refuse_other_settings(config, ranks)
    log.info("ranks", size=size, backend=backend, timeout_s=config.ranks_timeout_s)
    return ranks


def choose_rank_device(wanted: str, local_rank: int) -> torch.device:
    """Each rank of a machine takes the GPU of its number."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if wanted not in ("auto", "cuda"):
        raise ConfigError(f"several ranks cannot all use {wanted}", fix="--device cuda, or CUDA_VISIBLE_DEVICES")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}",
            fix=f"torchrun --nproc-per-node {max(1, torch.cuda.device_count())}",
        )
    return torch.device("cuda", local_rank)


def _refuse_other_settings(config: TrainConfig, ranks: Ranks) -> None:
    """Ranks that cut the same batch differently would train on nonsense without noticing."""
    own = config.model_dump(mode="json", exclude={"trainer_rank"})
    leaders = msgspec.json.decode(ranks.tell("comparing the settings", msgspec.json.encode(own)))
    different = sorted(name for name in own if own[name] != leaders[name])
    if different:
        raise ConfigError(
            f"rank {ranks.rank} has another {', '.join(different)} than rank 0", fix="give all ranks the same flags"
        )


def unused_variables(environment: Mapping[str, str], num_ranks: int) -> str:
    """Variables of Atropos' broadcast that decide nothing here, in a sentence; "" where none is set.

    >>> unused_variables({"NUM_INFERENCE_NODES": "0", "MASTER_PORT": "29500"}, 2)
    'NUM_INFERENCE_NODES has no effect: the trainer finds the engine by --engine-url'
    """
    of_ranks = num_ranks > 1 or "WORLD_SIZE" in environment
    names = [name for name in _OF_THE_BROADCAST if name in environment and not (of_ranks and name.startswith("MASTER"))]
    verb = "has" if len(names) == 1 else "have"
    return f"{', '.join(names)} {verb} no effect: the trainer finds the engine by --engine-url" if names else ""


def _who_am_i(config: TrainConfig) -> tuple[int, int, int]:
    """(rank, number of ranks, rank on this machine)"""
    if config.world_size > 1:
        return config.trainer_rank, config.world_size, int(os.environ.get("LOCAL_RANK", config.trainer_rank))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1, 0
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing:
        raise ConfigError(f"WORLD_SIZE is set and {', '.join(missing)} is not", fix=_START_TOGETHER)
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
