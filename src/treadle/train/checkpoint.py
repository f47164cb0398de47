"""Save and restore checkpoints: an ordinary model folder with the trainer's state beside the weights.

    step_25/           model.safetensors config.json tokenizer...   loads anywhere
                       state-000.tensors ...                        optimizer state, in files of about 100 MB
                       trainer.json                                 the manifest: step, time, sha256 of every file
    adapter_step_25/   adapter_model.safetensors and the same       if adapters are trained; loads with PEFT
    final_model/       or final_adapter/, or both (merge_final)     without the trainer's state

The newest checkpoint is complete at every moment (model_files.py). One that was damaged later is detected by its hashes
before it is used, and the previous one is restored.

State files are safetensors under another extension: programs that load a model folder read every *.safetensors as
weights. They hold whole tensors whatever the number of ranks, so a run can resume with a different number. Random
numbers are drawn from seeds that depend on the step, so no generator is saved.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor

from treadle.errors import ConfigError, TrainingError
from treadle.log import get_logger
from treadle.sync.model_folders import ModelOrigin, origin_of
from treadle.train.model_files import (
    ADAPTER,
    FULL,
    FolderKind,
    SavedTensors,
    clear_leftovers,
    remove_folder,
    sha256,
    shards,
    sync_and_hash,
    write_adapter,
    write_folder,
    write_model,
    write_tensors,
)
from treadle.train.optimizer import Optimizer
from treadle.train.policy import Policy
from treadle.train.ranks import ALONE, Ranks
from treadle.train.sharding import whole

if TYPE_CHECKING:
    from treadle.train.checkpoint_copies import CheckpointCopies  # needs an extra

log = get_logger("checkpoint")

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
SEALING = "syncing and hashing a checkpoint"

# ---- manifest and state files


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    sha256: dict[str, str]  # of every other file, by name
    origin: ModelOrigin
    optimizer: str
    elapsed_s: float = 0.0
    num_tokens: int = 0
    format: int = FORMAT


class CheckpointDamaged(Exception):
    """What is wrong with a checkpoint, in a few words."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write trainer.json, with its checksum.

    >>> hashes, origin = {"config.json": "9f86..."}, origin_of(folder)  # doctest: +SKIP
    >>> manifest = Manifest(step=25, sha256=hashes, origin=origin, optimizer="adamw")  # doctest: +SKIP
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

    def __init__(
        self,
        root: Path,
        model_folder: Path,
        keep: int,
        ranks: Ranks = ALONE,
        copies: CheckpointCopies | None = None,
    ) -> None:
        self._root = root
        self._copies = copies
        self._model_folder = model_folder
        self._keep = keep
        self._ranks = ranks
        if ranks.leads:
            root.mkdir(parents=True, exist_ok=True)
            clear_leftovers(root)

    def save(self, step: int, policy: Policy, optimizer: Optimizer, totals: Totals) -> None:
        """Save the published weights: call this after a publish. All ranks gather the tensors, rank 0 writes them."""
        kind, name = _kind(policy), f"{_kind(policy).prefix}{step}"
        weights, state = _own_weights(policy), _whole_shards(optimizer)
        if not self._ranks.leads:
            with self._ranks.during("saving a checkpoint"):
                deque(weights, maxlen=0)
                deque(state, maxlen=0)
            self._ranks.lead(SEALING, lambda: None)  # rank 0 does it
            return

        def fill(folder: Path) -> None:
            self._write_model(folder, policy, weights)
            model_files = sorted(folder.iterdir())
            with ThreadPoolExecutor(1) as sealer:  # a file is synced and hashed while the next one is written
                seals = {file.name: sealer.submit(sync_and_hash, file) for file in model_files}
                for number, tensors in enumerate(state):
                    file = folder / f"{STATE_PREFIX}{number:03d}.tensors"
                    write_tensors(tensors, file)
                    seals[file.name] = sealer.submit(sync_and_hash, file)
                self._ranks.lead(SEALING, lambda: wait(seals.values()))
            manifest = Manifest(
                step=step,
                sha256={name: future.result() for name, future in seals.items()},
                optimizer=optimizer.name,
                elapsed_s=totals.elapsed_s,
                num_tokens=totals.num_tokens,
                origin=self._origin,
            )
            write_manifest(folder, manifest)

        saved = write_folder(self._root, name, fill)
        # Newer ones were skipped as damaged; they must not be found again.
        kept = [s for s in self._steps(kind) if s <= step][-self._keep :]
        for other in set(self._steps(kind)) - set(kept):
            remove_folder(self._root / f"{kind.prefix}{other}")
        log.info("saved", step=step, folder=str(saved))
        self._copy(saved)

    def save_final(self, policy: Policy, *, is_merged: bool = False) -> Path:
        """`is_merged`: save adapters also as a merged model. It is written last: the newer folder is the result of the
        run."""
        final = _kind(policy).final
        weights = _own_weights(policy)
        merges = is_merged and policy.adapter is not None
        if not self._ranks.leads:
            with self._ranks.during("saving the final model"):
                deque(weights, maxlen=0)
                deque(policy.served_weights() if merges else (), maxlen=0)
            return self._root / final
        saved = write_folder(self._root, final, lambda folder: self._write_model(folder, policy, weights))
        self._copy(saved)
        if merges:
            served = policy.served_weights()
            merged = write_folder(
                self._root, FULL.final, lambda folder: write_model(folder, served, policy.weights, self._model_folder)
            )
            self._copy(merged)
        return saved

    def _copy(self, folder: Path) -> None:
        if self._copies is not None:
            self._copies.add(folder)

    def restore(self, policy: Policy, optimizer: Optimizer) -> Restored:
        """Load the newest complete checkpoint; publish after it. Everything is verified before anything is loaded."""
        kind = _kind(policy)
        # Rank 0 verifies it for all, which may take longer than they wait for a message.
        found = self._ranks.lead("verifying the checkpoints", lambda: self._newest_whole(kind))
        step = int(self._ranks.broadcast("choosing a checkpoint", b"%d" % (found or 0)))
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
        files = [folder / name for name in sorted(manifest.sha256) if name.startswith(STATE_PREFIX)]
        optimizer.load_state(SavedTensors(files, folder / kind.weights, policy.live))
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

    def _write_model(self, folder: Path, policy: Policy, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Write the trained weights and everything needed to load them elsewhere."""
        if policy.adapter is None:
            write_model(folder, weights, policy.weights, self._model_folder)
        else:
            write_adapter(folder, policy.adapter, dict(weights), self._model_folder)


def _kind(policy: Policy) -> FolderKind:
    return FULL if policy.adapter is None else ADAPTER


def _own_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint has of the model, one whole tensor at a time; all ranks must iterate together."""
    return policy.saved_weights() if policy.adapter is None else policy.saved_live()


def _whole_shards(optimizer: Optimizer) -> Iterator[dict[str, Tensor]]:
    """The optimizer's state in pieces for one file each; all ranks must iterate together."""
    return shards((name, whole(tensor)) for name, tensor in optimizer.state().items())
