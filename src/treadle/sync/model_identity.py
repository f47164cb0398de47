"""Identify a model by its configuration and weights, wherever its folder lies and however it is named."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from treadle.config import DEFAULT_MODEL
from treadle.errors import ModelError

NUM_SAMPLES = 64  # per file of weights
SAMPLE_BYTES = 4096


class ModelOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """A model folder, recognised wherever it lies."""

    config: str  # sha256 of config.json
    weights: str  # sha256 of the names, shapes and places of its weights, and of samples of their values


def origin_of(folder: Path) -> ModelOrigin:
    """Cheap: of a large model a few hundred kilobytes are read.

    >>> origin_of(Path("model"))  # doctest: +SKIP
    ModelOrigin(config='5fd8...', weights='a3b1...')
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("model*.safetensors")):
        _add_samples(digest, file)
    config = folder / "config.json"
    hashed = hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else ""
    return ModelOrigin(config=hashed, weights=digest.hexdigest())


def local_folder(name: str) -> Path | None:
    """The folder of a model on this machine: `name` is a folder, or an id in the cache of Hugging Face."""
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
    """Whether a model's name can only be a folder, and no id of a model hub.

    >>> is_path("./my-model"), is_path("Qwen/Qwen3-8B")
    (True, False)
    """
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def find_model(name: str) -> Path | None:
    """The folder of a model on this machine; None for an id that is to be fetched. Refuses a path that is not there."""
    folder = local_folder(name)
    if folder is None and is_path(name):
        raise ModelError(f"there is no model folder '{name}'", fix="check --model")
    return folder


def is_same_model(name: str, served: Path) -> bool:
    """Whether the model that a user named is the one that an engine serves from the folder `served`.

    By content where both are on this machine, else by name.
    """
    folder = local_folder(name)
    if folder is not None and served.is_dir():
        return folder.resolve() == served.resolve() or origin_of(folder) == origin_of(served)
    return is_called(name, served)


def is_called(name: str, folder: Path) -> bool:
    """Whether a folder has the name of a model: the last part of its id, or the place of the id in the cache."""
    if name == DEFAULT_MODEL:  # a hash is added to the name of its folder
        return folder.name.rpartition("-")[0] == name
    return Path(name).name.lower() == folder.name.lower() or f"models--{name.replace('/', '--')}" in folder.parts


def _add_samples(digest: Any, file: Path) -> None:
    """Two models that differ only in their values (a base and its fine-tune, say) have one header: so look at both."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = min(int.from_bytes(stream.read(8), "little"), size)
        digest.update(stream.read(header_bytes))
        start = stream.tell()
        for number in range(NUM_SAMPLES):
            stream.seek(start + (size - start) * number // NUM_SAMPLES)
            digest.update(stream.read(SAMPLE_BYTES))
