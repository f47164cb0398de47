"""Save and restore checkpoints: an ordinary model folder with the trainer's state beside the weights.

    step_25/           model.safetensors config.json tokenizer...   loads anywhere
                       state-000.tensors ...                        optimizer and RNG state, in files of about 100 MB
                       state-1-000.tensors ...                      with several ranks: what rank 1 owns
                       trainer.json                                 the manifest: step, time, sha256 of every file
    adapter_step_25/   adapter_model.safetensors and the same       if adapters are trained; loads with PEFT
    final_model/       or final_adapter/, or both (merge_final)     without the trainer's state

The newest checkpoint is complete at every moment (model_files.py). One that was damaged later is detected by its hashes
before it is used, and the previous one is restored.

State files are safetensors under another extension: programs that load a model folder read every *.safetensors as
weights. Optimizer tensors are found by the parameter's name, so a run can resume with a different number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from treadle.errors import ConfigError, TrainingError
from treadle.log import get_logger
from treadle.sync.model_folders import ModelOrigin, origin_of
from treadle.train.model_files import (
    ADAPTER,
    FULL,
    FolderKind,
    clear_leftovers,
    detect_full_disk,
    remove_folder,
    sha256,
    shards,
    staging_folder,
    sync_and_hash,
    write_adapter,
    write_folder,
    write_model,
    write_tensors,
)
from treadle.train.optimizer import Optimizer
from treadle.train.policy import Policy
from treadle.train.ranks import ALONE, Ranks

log = get_logger("checkpoint")

PREPARING = "preparing a checkpoint"
ADAPTER_CONFIG = "adapter_config.json"  # written by PEFT beside the adapter's weights
ELSEWHERE = "or choose another --train.save-path to start a fresh run"
# Settings of adapters that must be equal after a resume: PEFT's name, Treadle's flag.
ADAPTER_SETTINGS = {
    "r": "lora-r",
    "lora_alpha": "lora-alpha",
    "target_modules": "lora-target-modules",
    "layers_to_transform": "train-layer-indices",
}
FORMAT = 1
MANIFEST = "trainer.json"
STATE_PREFIX = "state-"

# ---- manifest and state files


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
        with ThreadPoolExecutor() as pool:  # hashing releases the GIL
            hashes = list(pool.map(sha256, [folder / name for name in manifest.sha256]))
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


# ---- does a checkpoint fit this run?


def check_same_model(checkpoint: Path, saved: ModelOrigin, now: ModelOrigin, *, is_frozen: bool) -> None:
    """Weights that are not trained come from the model's folder, not from the checkpoint. `is_frozen`: there are such
    weights; otherwise only the config must be equal."""
    differs = "another config.json" if saved.config != now.config else ""
    if is_frozen and saved.weights != now.weights:
        differs = "other weights"
    if differs:
        raise ConfigError(
            f"{checkpoint} was trained on a model with {differs} than the one of this run",
            fix=f"set --model to the model that training began with, {ELSEWHERE}",
        )


def check_same_adapters(checkpoint: Path, now: Any) -> None:
    """Compare the adapters' settings: with another scale the same weights are another policy. `now`: PEFT's config."""
    saved = json.loads((checkpoint / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    for key, flag in ADAPTER_SETTINGS.items():
        # PEFT keeps names as a set and writes them as a list in any order.
        values = (saved.get(key), getattr(now, key))
        before, after = (sorted(value) if isinstance(value, (set, list, tuple)) else value for value in values)
        if before != after:
            remedy = "leave --train.{0} out" if before is None else "set --train.{0} {1}"
            raise ConfigError(
                f"{checkpoint} has adapters with {flag} {_shown(before)}, this run has {_shown(after)}",
                fix=f"{remedy.format(flag, _shown(before))}, {ELSEWHERE}",
            )


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Totals that continue after a resume."""

    elapsed_s: float = 0.0  # of training
    num_tokens: int = 0  # trained on


@dataclass(frozen=True, kw_only=True)
class Restored(Totals):
    step: int = 0  # 0: there was no checkpoint


# ---- checkpoints of a run


class Checkpoints:
    """The checkpoints in `root`, of which the newest `keep` are kept; `model_folder` has the tokenizer and config
    files.

    >>> checkpoints = Checkpoints(Path("out"), Path("model"), keep=2)  # doctest: +SKIP
    >>> checkpoints.save(25, policy, optimizer, Totals(elapsed_s=310.0))  # doctest: +SKIP
    >>> checkpoints.restore(policy, optimizer)  # doctest: +SKIP
    Restored(elapsed_s=310.0, num_tokens=0, step=25)
    """

    def __init__(self, root: Path, model_folder: Path, keep: int, ranks: Ranks = ALONE) -> None:
        self._root = root
        self._model_folder = model_folder
        self._keep = keep
        self._ranks = ranks
        if ranks.leads:
            root.mkdir(parents=True, exist_ok=True)
            clear_leftovers(root)

    def save(self, step: int, policy: Policy, optimizer: Optimizer, totals: Totals) -> None:
        """Save the published weights: call this after a publish."""
        kind, name = _kind(policy), f"{_kind(policy).prefix}{step}"
        if not self._ranks.leads:
            self._ranks.barrier(PREPARING)
            with detect_full_disk(self._root / name):
                self._write_states(staging_folder(self._root, name), optimizer)
            return

        def fill(folder: Path) -> None:
            self._write_model(folder, policy)
            model_files = sorted(folder.iterdir())
            self._ranks.barrier(PREPARING)  # from here on the other ranks write into the folder
            with ThreadPoolExecutor(1) as sealer:  # hashes model files while the state is written
                seals = {file.name: sealer.submit(sync_and_hash, file) for file in model_files}
                hashes = self._write_states(folder, optimizer)
            hashes |= {name: future.result() for name, future in seals.items()}
            manifest = Manifest(
                step=step,
                sha256=hashes,
                optimizer=optimizer.name,
                elapsed_s=totals.elapsed_s,
                num_tokens=totals.num_tokens,
                origin=self._origin,
                num_ranks=self._ranks.size,
            )
            write_manifest(folder, manifest)

        saved = write_folder(self._root, name, fill)
        # Newer ones were skipped as damaged; they must not be found again.
        kept = [s for s in self._steps(kind) if s <= step][-self._keep :]
        for other in set(self._steps(kind)) - set(kept):
            remove_folder(self._root / f"{kind.prefix}{other}")
        log.info("saved", step=step, folder=str(saved))

    def save_final(self, policy: Policy, *, is_merged: bool = False) -> Path:
        """`is_merged`: save adapters also as a merged model. It is written last: the newer folder is the result of the
        run."""
        final = _kind(policy).final
        if not self._ranks.leads:
            return self._root / final
        saved = write_folder(self._root, final, lambda folder: self._write_model(folder, policy))
        if is_merged and policy.adapter is not None:
            weights = dict(policy.served_weights())
            write_folder(self._root, FULL.final, lambda folder: write_model(folder, weights, self._model_folder))
        return saved

    def restore(self, policy: Policy, optimizer: Optimizer) -> Restored:
        """Load the newest complete checkpoint; publish after it. Everything is verified before anything is loaded."""
        kind = _kind(policy)
        found = self._newest_whole(kind) if self._ranks.leads else 0
        step = int(self._ranks.broadcast("choosing a checkpoint", b"%d" % found))  # rank 0 verified it for all
        if step == 0:
            return Restored()
        folder = self._root / f"{kind.prefix}{step}"
        manifest = read_manifest(folder, step)
        if policy.adapter is not None:
            check_same_adapters(folder, policy.adapter.active_peft_config)
        is_frozen = policy.live.keys() != policy.weights.keys()
        check_same_model(folder, manifest.origin, self._origin, is_frozen=is_frozen)
        if manifest.optimizer != optimizer.name:
            raise ConfigError(
                f"{folder} was saved by the optimizer {manifest.optimizer}, whose state {optimizer.name} cannot take "
                "over",
                fix=f"set --train.optimizer {manifest.optimizer}, or choose another --train.save-path",
            )
        files = [name for name in sorted(manifest.sha256) if name.startswith(STATE_PREFIX)]
        tensors = read_state(folder, files, policy.live, self._ranks, num_ranks_then=manifest.num_ranks)
        weights = load_file(folder / kind.weights)
        optimizer.load_state(tensors | {f"live.{key}": value for key, value in weights.items() if key in policy.live})
        log.info("restored", step=step, folder=str(folder))
        return Restored(step=step, elapsed_s=manifest.elapsed_s, num_tokens=manifest.num_tokens)

    def _newest_whole(self, kind: FolderKind) -> int:
        """The step of the newest complete checkpoint; 0 if there is none."""
        self._check_same_kind(kind)
        damaged = []
        for step in reversed(self._steps(kind)):
            folder = self._root / f"{kind.prefix}{step}"
            try:
                verify(folder, step)
            except CheckpointDamaged as reason:
                log.warning("checkpoint_damaged", folder=str(folder), reason=str(reason))
                damaged.append(f"{folder.name} ({reason})")
            else:
                return step
        if damaged:
            raise TrainingError(
                f"no checkpoint in {self._root} is whole: {', '.join(damaged)}",
                fix="put back a copy of one of them, or delete them to start a fresh run",
            )
        return 0

    def _write_states(self, folder: Path, optimizer: Optimizer) -> dict[str, str]:
        """Write this rank's optimizer and RNG state; returns the sha256 of the state files of all ranks, by name."""
        prefix = STATE_PREFIX if self._ranks.size == 1 else f"{STATE_PREFIX}{self._ranks.rank}-"
        seals: dict[str, Future[str]] = {}
        with ThreadPoolExecutor(1) as sealer:  # a file is synced and hashed while the next one is written
            for number, shard in enumerate(shards({**optimizer.state(), **random_state()})):
                file = folder / f"{prefix}{number:03d}.tensors"
                write_tensors(shard, file)
                seals[file.name] = sealer.submit(sync_and_hash, file)
        own = {name: future.result() for name, future in seals.items()}
        hashes: dict[str, str] = {}
        for packed in self._ranks.gather("writing a checkpoint", msgspec.json.encode(own)):
            hashes |= msgspec.json.decode(packed, type=dict[str, str])
        return hashes

    @cached_property
    def _origin(self) -> ModelOrigin:
        return origin_of(self._model_folder)

    def _steps(self, kind: FolderKind) -> list[int]:
        found = [path.name.removeprefix(kind.prefix) for path in self._root.glob(f"{kind.prefix}*") if path.is_dir()]
        return sorted(int(number) for number in found if number.isdecimal())

    def _check_same_kind(self, kind: FolderKind) -> None:
        other = ADAPTER if kind is FULL else FULL
        if self._steps(other) and not self._steps(kind):
            newest = self._root / f"{other.prefix}{self._steps(other)[-1]}"
            trained = "adapters" if other is ADAPTER else "the model's own weights"
            raise ConfigError(
                f"{newest} is of a run that trained {trained}; this run cannot go on from it",
                fix="set --lora as it was, or choose another --train.save-path",
            )

    def _write_model(self, folder: Path, policy: Policy) -> None:
        """Write the served weights and everything needed to load them elsewhere."""
        if policy.adapter is None:
            write_model(folder, policy.weights, self._model_folder)
        else:
            write_adapter(folder, policy.adapter, policy.live, self._model_folder)


def _kind(policy: Policy) -> FolderKind:
    return FULL if policy.adapter is None else ADAPTER
