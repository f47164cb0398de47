"""Layer numbers: parse the setting, and compare it with the layers that a model has."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from treadle.config.section import Count
from treadle.errors import ConfigError

_SIZES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")  # what a config.json calls their number


def parse_layers(value: Any) -> Any:
    """ "20-22,0-1" -> (0, 1, 20, 21, 22); what is not a text of that form is left to the type to refuse."""
    if not isinstance(value, str):
        return value
    layers: set[int] = set()
    for part in value.replace(",", " ").split():
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"'{value}' is no list of layers; write for example 20-31,0-3")
        if dash and int(last) < int(first):
            raise ValueError(f"'{part}' counts backwards; write {last}-{first}")
        layers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(layers))


Layers = Annotated[tuple[Count, ...] | None, BeforeValidator(parse_layers)]


def refuse_missing(layers: Iterable[int], numbers: Collection[int], *, flag: str) -> None:
    """Refuse layers that the model does not have; `numbers` are those of its layers, `flag` names the setting."""
    missing = sorted(set(layers) - set(numbers))
    if missing:
        first, last = min(numbers), max(numbers)
        raise ConfigError(
            f"there is no layer {', '.join(map(str, missing))}: the model has {len(numbers)} layers, {first} to {last}",
            fix=f"give {flag} numbers from {first} to {last}",
        )


def num_layers_in(folder: Path) -> int | None:
    """How many layers the config.json of a model folder names at most; None: it names none."""
    try:
        pending: list[Any] = [json.loads((folder / "config.json").read_bytes())]
    except (OSError, ValueError, RecursionError):  # reported when the model is loaded
        return None
    found: list[int] = []
    while pending:
        value = pending.pop()
        if isinstance(value, dict):  # a model with pictures has a section for each of its parts
            found += [size for name in _SIZES if isinstance(size := value.get(name), int)]
            pending += value.values()
    return max(found, default=None)
