"""Checkpoints: an ordinary model folder, with the trainer's state beside the weights.

    step_25/   model.safetensors config.json tokenizer...   loads anywhere
               state-000.safetensors ...                    fp32 masters and optimizer moments
               trainer.json                                 step, and the sha256 of each state file
    final_model/                                            the same without the trainer's state

A checkpoint is written beside, synced, and renamed: at every moment the newest complete one is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from treadle.errors import DiskFull, TrainingError
from treadle.log import get_logger
from treadle.train.optim import Optimizer
from treadle.train.policy import Policy

log = get_logger("checkpoint")

MASTER = "master."
COPIED_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "special_tokens_map.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json",
)  # fmt: skip
SHARD_BYTES = 128 << 20  # a file is copied in memory while it is written, so state is written in pieces
KEPT = 1  # older checkpoints are deleted after a newer one is durable


class Checkpoints:
    def __init__(self, root: Path, model_folder: Path) -> None:
        self._root = root
        self._model_folder = model_folder
        root.mkdir(parents=True, exist_ok=True)
        self._clear_leftovers()

    def save(self, step: int, policy: Policy, optimizer: Optimizer) -> None:
        staging = self._staging(f"step_{step}")
        self._write_model(staging, policy)
        state = {MASTER + name: m.detach() for name, m in policy.masters.items()} | optimizer.state()
        sealed: dict[str, Future[str]] = {}
        with ThreadPoolExecutor(1) as sealer:  # one file is synced and hashed while the next is written
            for number, shard in enumerate(_shards(state)):
                file = staging / f"state-{number:03d}.safetensors"
                _write(shard, file)
                sealed[file.name] = sealer.submit(_seal, file)
        hashes = {name: seal.result() for name, seal in sealed.items()}
        (staging / "trainer.json").write_text(json.dumps({"step": step, "sha256": hashes}, indent=2) + "\n")
        self._land(staging, f"step_{step}")
        for old in self._steps()[:-KEPT]:
            shutil.rmtree(self._root / f"step_{old}")
        log.info("saved", step=step, folder=str(self._root / f"step_{step}"))

    def save_final(self, policy: Policy) -> Path:
        staging = self._staging("final_model")
        self._write_model(staging, policy)
        return self._land(staging, "final_model")

    def restore(self, policy: Policy, optimizer: Optimizer) -> int:
        """Load the newest checkpoint and return its step; 0 when there is none."""
        steps = self._steps()
        if not steps:
            return 0
        folder = self._root / f"step_{steps[-1]}"
        recorded: dict[str, Any] = json.loads((folder / "trainer.json").read_text())
        moments: dict[str, Tensor] = {}
        for file, expected in recorded["sha256"].items():
            if _sha256(folder / file) != expected:
                raise TrainingError(
                    f"{folder / file} is damaged (its sha256 is wrong)", fix=f"delete {folder} to begin anew"
                )
            for name, tensor in load_file(folder / file).items():
                if name.startswith(MASTER):
                    policy.masters[name.removeprefix(MASTER)].data.copy_(tensor)
                else:
                    moments[name] = tensor
        optimizer.load_state(moments)
        log.info("restored", step=recorded["step"], folder=str(folder))
        return int(recorded["step"])

    def _clear_leftovers(self) -> None:
        """What a killed process left: half-written folders go; a replaced one stays when nothing took its place."""
        for half in self._root.glob(".*.partial"):
            shutil.rmtree(half)
        for old in self._root.glob(".*.old"):
            target = self._root / old.name.removeprefix(".").removesuffix(".old")
            if target.exists():
                shutil.rmtree(old)
            else:
                old.rename(target)

    def _steps(self) -> list[int]:
        found = [p.name.removeprefix("step_") for p in self._root.glob("step_*") if (p / "trainer.json").is_file()]
        return sorted(int(s) for s in found if s.isdigit())

    def _staging(self, name: str) -> Path:
        staging = self._root / f".{name}.partial"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        return staging

    def _write_model(self, folder: Path, policy: Policy) -> None:
        """Weights as they are served, and everything needed to load them elsewhere."""
        weights = {name: p.detach().cpu().contiguous() for name, p in policy.live.items()}
        _write(weights, folder / "model.safetensors")
        for name in COPIED_FILES:
            if (self._model_folder / name).is_file():
                shutil.copyfile(self._model_folder / name, folder / name)

    def _land(self, staging: Path, name: str) -> Path:
        for file in staging.iterdir():
            _sync(file)
        _sync(staging)
        target = self._root / name
        old = self._root / f".{name}.old"
        if target.exists():
            target.rename(old)
        staging.rename(target)
        _sync(self._root)
        shutil.rmtree(old, ignore_errors=True)
        return target


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, in dicts of about SHARD_BYTES."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def _write(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # it wraps the operating system's errors in words of its own
        if "No space left" in str(error) or "os error 28" in str(error):
            raise DiskFull(
                f"the disk is full while writing {file}; the checkpoint before it is kept",
                fix="free some space and continue with treadle run --resume",
            ) from None
        raise


def _seal(path: Path) -> str:
    _sync(path)
    return _sha256(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
