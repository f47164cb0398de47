"""trainer.json, which says what a checkpoint is and proves that it is whole.

It holds the sha256 of every other file, and a checksum of itself: a number that changed in it would pass for true.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from treadle.sync.model_folders import ModelOrigin
from treadle.train.durable import hash_all

FORMAT = 1
MANIFEST = "trainer.json"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The first release wrote no format, and hashes of the state files alone; the next one no origin or checksum."""

    step: int
    sha256: dict[str, str]
    format: int = 0
    optimizer: str = "adamw"
    elapsed_s: float = 0.0
    num_tokens: int = 0
    num_ranks: int = 1  # that wrote state files
    origin: ModelOrigin | None = None
    checksum: str | None = None  # of all other values


class Damaged(Exception):
    """What is wrong with a checkpoint, in a few words."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write trainer.json, with its checksum.

    >>> write_manifest(Path("step_25"), Manifest(step=25, sha256={"config.json": "9f86..."}))  # doctest: +SKIP
    """
    values = msgspec.to_builtins(manifest)
    values["checksum"] = _checksum(values)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(values)) + b"\n")


def verify(folder: Path, step: int) -> Manifest:
    """Read the manifest and check it and every file that it names; raises Damaged."""
    manifest = read_manifest(folder, step)
    missing = [name for name in manifest.sha256 if not (folder / name).is_file()]
    if missing:
        raise Damaged(f"{missing[0]} is missing")
    try:
        hashes = hash_all([folder / name for name in manifest.sha256])
    except OSError as error:
        raise Damaged(f"{error.filename} cannot be read: {error.strerror}") from None
    for (name, expected), found in zip(manifest.sha256.items(), hashes, strict=True):
        if found != expected:
            raise Damaged(f"the sha256 of {name} is wrong")
    return manifest


def read_manifest(folder: Path, step: int) -> Manifest:
    """The manifest, checked by itself; raises Damaged."""
    try:
        values = msgspec.json.decode((folder / MANIFEST).read_bytes())
        manifest = msgspec.convert(values, Manifest)
        checksum = _checksum(values)
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    # Bytes that are no UTF-8, no JSON or not these fields are all ValueErrors; the others are numbers and nestings
    # that no manifest has.
    except (ValueError, OverflowError, RecursionError, OSError) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from None
    if manifest.format not in (0, FORMAT):
        raise Damaged(f"{MANIFEST} has format {manifest.format}, this release reads up to {FORMAT}")
    if manifest.step != step:
        raise Damaged(f"{MANIFEST} is of step {manifest.step}")
    if manifest.checksum not in (None, checksum):
        raise Damaged(f"the checksum of {MANIFEST} is wrong")
    return manifest


def _checksum(values: dict[str, Any]) -> str:
    """Of the values as they were read, not of a Manifest: a later release may add fields, and their defaults."""
    others = {key: value for key, value in values.items() if key != "checksum"}
    return hashlib.sha256(msgspec.json.encode(others, order="sorted")).hexdigest()
