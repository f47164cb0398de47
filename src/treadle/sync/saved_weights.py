"""Whether the weights that an engine shares are those of the model's files, each in its own place.

With one copy, engine and trainer read the same bytes: fingerprints of both sides are equal wherever a weight lies. That
it lies where the engine says, only the files can tell, which hold it under its own name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from treadle.errors import SyncError
from treadle.sync.fingerprint import fingerprints
from treadle.sync.proof import explain


def refuse_misplaced(weights: Iterable[tuple[str, Tensor]], folder: Path) -> int:
    """Before anything was trained; how many were found in the files of `folder`, and are as they are there."""
    views = dict(weights)
    served = fingerprints(views.items(), 0)
    saved: dict[str, str] = {}
    for file in _files(folder):
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.keys() if name in views]  # noqa: SIM118 - it is no dictionary
            own = ((name, opened.get_tensor(name).to(views[name].dtype)) for name in names)
            saved |= fingerprints(own, 0)
    if any(served[name] != found for name, found in saved.items()):
        dtype = str(next(iter(views.values())).dtype).removeprefix("torch.")
        message, _ = explain(saved, {name: served[name] for name in saved}, own_dtype=dtype, engine_dtype=dtype)
        raise SyncError(
            f"the weights that the engine shares are not those of {folder}: {message}",
            fix="start the engine from that model; if it was, leave --single-copy out (shared_vllm: and give "
            "--use-shared-memory), and report the model",
        )
    return len(saved)


def _files(folder: Path) -> list[Path]:
    """Those that are the model: beside them others may lie, of another form or left over."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
