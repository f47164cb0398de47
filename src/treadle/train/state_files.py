"""The trainer's state in a checkpoint: the optimizer's tensors and the random generators, in files of a few hundred MB.

    state-000.tensors ...     of a trainer that runs alone
    state-1-000.tensors ...   of rank 1 of several: the parameters it owns, its counters and its generators

They are safetensors files under another name: programs that load a model folder take every *.safetensors for weights.

What belongs to a parameter is found by the parameter's name, so any number of ranks can go on from any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from treadle.train.chance import random_state, restore_random_state
from treadle.train.durable import seal, shards, write_tensors
from treadle.train.ranks import Ranks

PREFIX = "state-"


def write_state(folder: Path, state: Mapping[str, Tensor], ranks: Ranks) -> dict[str, str]:
    """Write this rank's `state` (the optimizer's) and random generators; the sha256 of every file by its name."""
    prefix = PREFIX if ranks.size == 1 else f"{PREFIX}{ranks.rank}-"
    seals: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(1) as sealer:  # files are synced and hashed while the next is written
        for number, shard in enumerate(shards({**state, **random_state()})):
            file = folder / f"{prefix}{number:03d}.tensors"
            write_tensors(shard, file)
            seals[file.name] = sealer.submit(seal, file)
    return {name: future.result() for name, future in seals.items()}


def read_state(
    folder: Path, names: list[str], live: Mapping[str, Tensor], ranks: Ranks, *, num_ranks_then: int
) -> dict[str, Tensor]:
    """What this rank takes over from the files `names`, which so many ranks wrote; its random generators are set.

    A rank more than there were takes the counters of rank 0, and keeps the generators it has.
    """
    owned = ranks.owned(live)
    is_new = ranks.rank >= num_ranks_then

    def is_wanted(key: str, writer: int) -> bool:
        part, _, name = key.partition(".")
        if name in live:
            return name in owned
        return writer == 0 and part == "counter" if is_new else writer == ranks.rank

    tensors: dict[str, Tensor] = {}
    for file in names:
        writer = 0 if num_ranks_then == 1 else int(file.removeprefix(PREFIX).partition("-")[0])
        with safe_open(folder / file, framework="pt") as opened:
            tensors |= {key: opened.get_tensor(key) for key in opened.keys() if is_wanted(key, writer)}  # noqa: SIM118
    restore_random_state(tensors)
    return tensors
