"""Read and write the trainer's files in a checkpoint: the manifest, optimizer state and RNG state.

    trainer.json              the manifest: step, settings, sha256 of every other file, checksum of itself
    state-000.tensors ...     optimizer tensors and RNG state of a single trainer process, in files of a few hundred MB
    state-1-000.tensors ...   of rank 1: the parameters it owns, its counters and RNG state

State files are safetensors under another extension: programs that load a model folder read every *.safetensors as
weights. Optimizer tensors are found by the parameter's name, so a run can resume with a different number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from treadle.sync.model_folders import ModelOrigin
from treadle.train.model_files import hash_all, shards, sync_and_hash, write_tensors
from treadle.train.ranks import Ranks

FORMAT = 1
MANIFEST = "trainer.json"
STATE_PREFIX = "state-"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    sha256: dict[str, str]  # of every other file, by name
    origin: ModelOrigin
    optimizer: str
    num_ranks: int  # number of ranks that wrote state files
    elapsed_s: float = 0.0
    num_tokens: int = 0
    format: int = FORMAT


class CheckpointDamaged(Exception):
    """What is wrong with a checkpoint, in a few words."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write trainer.json, with its checksum.

    >>> hashes, origin = {"config.json": "9f86..."}, origin_of(folder)  # doctest: +SKIP
    >>> manifest = Manifest(step=25, sha256=hashes, origin=origin, optimizer="adamw", num_ranks=1)  # doctest: +SKIP
    >>> write_manifest(Path("step_25"), manifest)  # doctest: +SKIP
    """
    values = msgspec.to_builtins(manifest)
    values["checksum"] = _checksum(values)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(values)) + b"\n")


def verify(folder: Path, step: int) -> Manifest:
    """Read the manifest and check every file that it names; raises CheckpointDamaged."""
    manifest = read_manifest(folder, step)
    missing = [name for name in manifest.sha256 if not (folder / name).is_file()]
    if missing:
        raise CheckpointDamaged(f"{missing[0]} is missing")
    try:
        hashes = hash_all([folder / name for name in manifest.sha256])
    except OSError as error:
        raise CheckpointDamaged(f"{error.filename} cannot be read: {error.strerror}") from None
    for (name, expected), found in zip(manifest.sha256.items(), hashes, strict=True):
        if found != expected:
            raise CheckpointDamaged(f"the sha256 of {name} is wrong")
    return manifest


def read_manifest(folder: Path, step: int) -> Manifest:
    """Read the manifest and check its step and checksum; raises CheckpointDamaged."""
    try:
        values = msgspec.json.decode((folder / MANIFEST).read_bytes())
        manifest = msgspec.convert(values, Manifest)
        checksum = _checksum(values)
    except FileNotFoundError:
        raise CheckpointDamaged(f"{MANIFEST} is missing") from None
    # Invalid UTF-8, JSON or fields are ValueErrors; the others are huge numbers and deep nesting.
    except (ValueError, OverflowError, RecursionError, OSError) as error:
        raise CheckpointDamaged(f"{MANIFEST} cannot be read: {error}") from None
    if manifest.format != FORMAT:
        raise CheckpointDamaged(f"{MANIFEST} has format {manifest.format}, this release reads {FORMAT}")
    if manifest.step != step:
        raise CheckpointDamaged(f"{MANIFEST} is of step {manifest.step}")
    if values.get("checksum") != checksum:
        raise CheckpointDamaged(f"the checksum of {MANIFEST} is wrong")
    return manifest


def _checksum(values: dict[str, Any]) -> str:
    """Checksum of the values as read, not of a Manifest: a later release may add fields with defaults."""
    others = {key: value for key, value in values.items() if key != "checksum"}
    return hashlib.sha256(msgspec.json.encode(others, order="sorted")).hexdigest()


def random_state() -> dict[str, Tensor]:
    states = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"random.cuda.{n}": state for n, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_state(tensors: Mapping[str, Tensor]) -> None:
    if "random.cpu" in tensors:  # absent for a rank that did not exist when it was saved
        torch.set_rng_state(tensors["random.cpu"].clone())
    for device in range(torch.cuda.device_count()):
        if f"random.cuda.{device}" in tensors:
            torch.cuda.set_rng_state(tensors[f"random.cuda.{device}"].clone(), device)


def write_state(folder: Path, state: Mapping[str, Tensor], ranks: Ranks) -> dict[str, str]:
    """Write this rank's optimizer state and RNG state; returns the sha256 of each file by name."""
    prefix = STATE_PREFIX if ranks.size == 1 else f"{STATE_PREFIX}{ranks.rank}-"
    seals: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(1) as sealer:  # a file is synced and hashed while the next one is written
        for number, shard in enumerate(shards({**state, **random_state()})):
            file = folder / f"{prefix}{number:03d}.tensors"
            write_tensors(shard, file)
            seals[file.name] = sealer.submit(sync_and_hash, file)
    return {name: future.result() for name, future in seals.items()}


def read_state(
    folder: Path, names: list[str], live: Mapping[str, Tensor], ranks: Ranks, *, num_ranks_then: int
) -> dict[str, Tensor]:
    """Read this rank's part of the state files `names`, written by `num_ranks_then` ranks, and restore its RNG state.

    A rank that did not exist then takes the counters of rank 0 and keeps its RNG state.
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
        writer = 0 if num_ranks_then == 1 else int(file.removeprefix(STATE_PREFIX).partition("-")[0])
        with safe_open(folder / file, framework="pt") as opened:
            tensors |= {key: opened.get_tensor(key) for key in opened.keys() if is_wanted(key, writer)}  # noqa: SIM118
    restore_random_state(tensors)
    return tensors
