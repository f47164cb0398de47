"""Identify model folders by content, and manage the folder of published weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path

import msgspec

from treadle.config import DEFAULT_MODEL, TrainConfig
from treadle.errors import ModelError

NUM_SAMPLES = 64  # per weights file
SAMPLE_BYTES = 4096
NUM_KEPT = 2  # published folders: a request in flight or a restart may still read the one before the newest
PUBLISHED_PREFIXES = ("adapter_v", "weights_v")


class ModelOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a model, independent of its path."""

    config: str  # sha256 of config.json
    weights: str  # sha256 of the safetensors headers and of samples of the values


def origin_of(folder: Path) -> ModelOrigin:
    """Identify a model. Cheap: only a few hundred kilobytes of a large model are read.

    >>> origin_of(Path("model"))  # doctest: +SKIP
    ModelOrigin(config='5fd8...', weights='a3b1...')
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("model*.safetensors")):
        # Header and samples: a base model and its fine-tune differ only in values.
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = min(int.from_bytes(stream.read(8), "little"), size)
            digest.update(stream.read(header_bytes))
            start = stream.tell()
            for number in range(NUM_SAMPLES):
                stream.seek(start + (size - start) * number // NUM_SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
    config = folder / "config.json"
    hashed = hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else ""
    return ModelOrigin(config=hashed, weights=digest.hexdigest())


def weight_files(folder: Path) -> list[Path]:
    """The files that belong to the model; the folder may contain other formats or leftovers."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def cache_folder() -> Path:
    """Folder of converted models and compiled code: $TREADLE_CACHE, else the user's cache folder."""
    if own := os.environ.get("TREADLE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treadle"


def local_folder(name: str) -> Path | None:
    """The folder of a model on this machine: `name` is a folder, or an id in the Hugging Face cache."""
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        return folder
    if is_path(name):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def is_path(name: str) -> bool:
    """Whether a model name is a path and not an id on a model hub.

    >>> is_path("./my-model"), is_path("Qwen/Qwen3-8B")
    (True, False)
    """
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def find_model(name: str) -> Path | None:
    """The folder of a model on this machine; None for an id that must be downloaded; an error for a missing path."""
    folder = local_folder(name)
    if folder is None and is_path(name):
        raise ModelError(f"there is no model folder '{name}'", fix="check --model")
    return folder


def is_same_model(name: str, served: Path) -> bool:
    """Whether the model that a user named is the one that an engine serves from `served`.

    Compared by content if both are on this machine, else by name.
    """
    folder = local_folder(name)
    if folder is not None and served.is_dir():
        return folder.resolve() == served.resolve() or origin_of(folder) == origin_of(served)
    return is_called(name, served)


def is_called(name: str, folder: Path) -> bool:
    """Whether a folder is named like a model: the last part of its id, or its folder in the Hugging Face cache."""
    if name == DEFAULT_MODEL:  # its folder's name ends with a hash
        return folder.name.rpartition("-")[0] == name
    return Path(name).name.lower() == folder.name.lower() or f"models--{name.replace('/', '--')}" in folder.parts


class LiveFolder:
    """The folder for published weights, one subfolder per version. `root` is absolute: the engine may have another
    working folder."""

    def __init__(self, config: TrainConfig) -> None:
        self.root = (config.live_path or config.save_path / "live").resolve()
        self._written: list[Path] = []

    def prepare(self) -> Path:
        """Create the folder if it does not exist."""
        self.root.mkdir(parents=True, exist_ok=True)
        return self.root

    def keep_newest(self, folder: Path, in_use: Collection[Path] = ()) -> int:
        """Delete old versions, except those `in_use`, after the engine has loaded `folder`; returns the size of its
        weights in bytes."""
        self._written = [*(f for f in self._written if f != folder), folder][-NUM_KEPT:]
        for other in self.root.iterdir():
            if other.name.startswith(PUBLISHED_PREFIXES) and other not in {*self._written, *in_use}:
                shutil.rmtree(other, ignore_errors=True)
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    def holds(self, folder: Path) -> bool:
        """Whether an engine that serves `folder` was started from a published version."""
        return folder.resolve().parent == self.root
