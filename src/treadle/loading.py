"""Load a model in trainer and engine: choose the device, quantize a frozen base to 4 bits, report progress."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.utils import logging as transformers_logging

from treadle.errors import require

ARM = ("aarch64", "arm64")


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU if there is one."""
    return torch.device(name if name != "auto" else ("cuda" if torch.cuda.is_available() else "cpu"))


def choose_matmul_backend(model: Any) -> None:
    """For float32 on an ARM CPU: multiply with BLAS instead of oneDNN, in the whole process.

    Measured on two Neoverse-N1 cores with torch 2.13, GFLOP/s of a product with 1,536 x 576 weights: 16 rows 43 (oneDNN
    35), 64 rows 65 (60), 590 rows 71 (70). oneDNN is ten times slower for the small batched products of attention, and
    ignores torch's number of threads.
    """
    if platform.machine() in ARM and model.device.type == "cpu" and model.dtype == torch.float32:
        torch.backends.mkldnn.set_flags(False)


def loading_options(quantization: str, dtype: Any, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` for 4-bit weights (NF4 by bitsandbytes), loaded onto `device`; {} without.

    vLLM quantizes the same files with the same settings (blocks of 64, 8-bit scales), so trainer and engine compute
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
    """Number of weights in a parameter; two 4-bit weights are packed into one byte."""
    return parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)


LoadingCallback = Callable[[str, int, int], None]  # ("loading weights", 120, 272)


@contextmanager
def report_loading(report: LoadingCallback) -> Iterator[None]:
    """Call `report` for every weight that transformers loads, through the hook of its progress bar."""

    def counted(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        what = str(kwargs.get("desc") or "")
        if what and args and isinstance(args[0], Collection):
            args = (_reported(what[0].lower() + what[1:], args[0], report), *args[1:])
        return factory(*args, **kwargs)

    before = transformers_logging.set_tqdm_hook(counted)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def _reported(what: str, items: Collection[Any], report: LoadingCallback) -> Iterator[Any]:
    for done, item in enumerate(items):
        report(what, done, len(items))
        yield item
    report(what, len(items), len(items))
