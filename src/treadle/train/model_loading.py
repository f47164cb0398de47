"""Load the weights of a model: whole for a single rank, for several ranks only the rows that each of them keeps.

build_model       one rank: the model with its weights
                  several: a model whose weights are placeholders, to be sharded (sharding.py)
read_own_rows     fills the shards from the model's files, one tensor at a time
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from treadle.errors import ModelError
from treadle.log import get_logger
from treadle.sync.model_folders import weight_files
from treadle.train.ranks import Ranks
from treadle.train.sharding import own_part, own_rows

log = get_logger("trainer")


def build_model(folder: Path, dtype: Any, ranks: Ranks, **options: Any) -> tuple[Any, bool]:
    """(the model on the host, whether its weights are still to be read by `read_own_rows`).

    `dtype`: a torch.dtype, or "auto" for that of the files; `options`: further arguments of `from_pretrained`, with
    which every rank loads the whole model.
    """
    if ranks.size > 1 and not options:
        model = _with_placeholders(folder, dtype)
        different = _different_names(model, folder)
        if not different:
            return model, True
        log.info(
            "loaded_whole", weight=different, reason="it is no weight, or its files have another name or shape for it"
        )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options), False


@torch.no_grad()
def read_own_rows(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Fill this rank's shards of `weights` (by their original names) from the files of `folder`."""
    missing = set(weights)
    for name, opened in _saved_tensors(folder):
        if name not in missing:
            continue  # the second name of a tied weight
        missing.remove(name)
        part, rows = own_part(weights[name]), own_rows(weights[name])
        if part.numel():  # a small weight has no rows for some ranks
            part.copy_(opened.get_slice(name)[rows] if part.ndim else opened.get_tensor(name))
    if missing:
        raise ModelError(f"{folder} holds no {min(missing)}", fix="fetch or save the model again")


def _with_placeholders(folder: Path, dtype: Any) -> Any:
    """The model without memory for its weights: all parameters are views of one buffer, which is never written.

    They are not on the meta device, because PEFT puts adapters where the weights are, and draws their values there.
    """
    settings = AutoConfig.from_pretrained(folder)
    if dtype == "auto":
        dtype = settings.dtype or _first_dtype(folder)
    with init_empty_weights(include_buffers=False):  # buffers, such as rotary frequencies, are computed by the model
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    model.tie_weights()  # tied parameters were separated when they were emptied
    buffer = torch.empty(max(p.numel() for p in model.parameters()), dtype=torch.float32)
    placeholders: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter has one
    for module in model.modules():
        for name, empty in module._parameters.items():
            if empty is None:
                continue
            if empty not in placeholders:
                values = buffer.view(empty.dtype)[: empty.numel()].view(empty.shape)
                placeholders[empty] = nn.Parameter(values, requires_grad=empty.requires_grad)
            module._parameters[name] = placeholders[empty]
    return model


def _different_names(model: nn.Module, folder: Path) -> str:
    """A weight that the files do not have in its shape, or a buffer that is stored with the weights; "" if there is
    none. transformers can load both."""
    saved = {name: tuple(opened.get_slice(name).get_shape()) for name, opened in _saved_tensors(folder)}
    stored = model.state_dict().keys() & dict(model.named_buffers()).keys()
    different = (name for name, p in model.named_parameters() if saved.get(name) != tuple(p.shape))
    return next(iter(stored), "") or next(different, "")


def _first_dtype(folder: Path) -> torch.dtype:
    return next(opened.get_tensor(name).dtype for name, opened in _saved_tensors(folder))


def _saved_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """(name, the open file that has it) of each tensor."""
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                yield name, opened
