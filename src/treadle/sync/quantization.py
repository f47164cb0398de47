"""Load a frozen base model in 4 bits (NF4 by bitsandbytes), in the trainer and in the transformers engine.

vLLM quantizes the same files with the same settings (blocks of 64, scales in 8 bits), so that both sides compute with
the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from treadle.errors import require


def loading_options(quantization: str, dtype: Any, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained`, which then loads onto `device`; none without quantization."""
    if quantization == "none":
        return {}
    require("quantization", "bitsandbytes")
    from transformers import BitsAndBytesConfig

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
