"""Weights from files into a model that serves: all of them, those that changed, or their changed elements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from treadle.errors import RequestError
from treadle.sync.delta import DELTA_FROM, WeightUpdate, from_tensors, misfit, set_weight


def read_weights(
    folder: Path, weights: Mapping[str, Tensor], policy_version: int, *, must_be_all: bool = False
) -> dict[str, WeightUpdate]:
    """What `folder` holds, each of which has its place in `weights`, which are of this version; anything that has no
    place, or that is the difference to another version, is refused by name. `must_be_all`: the weights there are a
    mixture, which nothing less can mend."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RequestError(f"{folder} holds no *.safetensors", fix="save the weights there first")
    tensors: dict[str, Tensor] = {}
    is_delta = False
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                base = (opened.metadata() or {}).get(DELTA_FROM)
            if base is not None:
                _refuse_other_base(file, base, policy_version)
                is_delta = True
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{file} cannot be read: {error}", fix="save it again") from None
    if not tensors and not is_delta:  # a step that changed nothing is a delta without weights
        raise RequestError(f"the files in {folder} hold no weights", fix="save the weights there first")
    found = _checked(tensors, folder, weights)
    if must_be_all:
        _refuse_part(found, folder, weights)
    return found


def write_weights(found: Mapping[str, WeightUpdate], weights: Mapping[str, Tensor]) -> None:
    for name, sent in found.items():
        set_weight(weights[name], sent)


def _checked(tensors: Mapping[str, Tensor], folder: Path, weights: Mapping[str, Tensor]) -> dict[str, WeightUpdate]:
    try:
        found = from_tensors(tensors)
    except ValueError as error:
        raise RequestError(f"in {folder} {error}", fix="save the weights again") from None
    for name, sent in found.items():
        known = weights.get(name)
        if known is None:
            raise RequestError(f"{folder} holds {name}, which this model does not have", fix="use the engine's model")
        reason = misfit(sent, known)
        if reason is not None:
            raise RequestError(f"{name} in {folder} does not fit: {reason}", fix="use the engine's model")
    return found


def _refuse_part(found: Mapping[str, WeightUpdate], folder: Path, weights: Mapping[str, Tensor]) -> None:
    """A tied weight has several names; one of them is enough."""
    given = {weights[name].data_ptr() for name, sent in found.items() if isinstance(sent, Tensor)}
    missing = next((name for name, weight in weights.items() if weight.data_ptr() not in given), None)
    if missing is not None:
        raise RequestError(
            f"the engine's weights are a mixture since a publish broke off, and {folder} has not all of {missing}",
            fix="load all weights, or POST /bridge/restart",
        )


def _refuse_other_base(file: Path, base: str, policy_version: int) -> None:
    if base != str(policy_version):
        raise RequestError(
            f"{file} holds what changed since version {base}, and the engine has version {policy_version}",
            fix="send all weights; a trainer that is started again (treadle run --resume) does",
        )
