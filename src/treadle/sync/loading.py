"""Load a model with transformers: report progress, and quantize a frozen base model to 4 bits (NF4, bitsandbytes)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.utils import logging as transformers_logging

from treadle.errors import require

Tell = Callable[[str, int, int], None]  # ("loading weights", 120, 272)


@contextmanager
def telling_of_weights(tell: Tell) -> Iterator[None]:
    """Call `tell` for every weight that is loaded: transformers counts them for its own progress bar."""

    def counted(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        what = str(kwargs.get("desc") or "")
        if what and args and isinstance(args[0], Collection):
            args = (_each(what[0].lower() + what[1:], args[0], tell), *args[1:])
        return factory(*args, **kwargs)

    before = transformers_logging.set_tqdm_hook(counted)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def _each(what: str, things: Collection[Any], tell: Tell) -> Iterator[Any]:
    for done, thing in enumerate(things):
        tell(what, done, len(things))
        yield thing
    tell(what, len(things), len(things))


def loading_options(quantization: str, dtype: Any, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained`, which then loads onto `device`; none without quantization.

    vLLM quantizes the same files with the same settings (blocks of 64, scales in 8 bits), so that both sides compute
    with the same numbers.
    """
    if quantization == "none":
        return {}
    require("quantization", "bitsandbytes")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if dtype == "auto" else dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def num_weights(parameter: torch.Tensor) -> int:
    """How many weights a parameter has; two of 4 bits are packed into a byte."""
    return parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)
