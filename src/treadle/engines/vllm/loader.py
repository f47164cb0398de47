"""Inside vLLM's worker: a model loader that leaves the weights where a trainer can read and write them.

With `weights_file` in --model-loader-extra-config the parameters are put into that file, and on a CPU vLLM computes
from there: before it warms up, compiles or captures anything, so that all of it sees the final addresses.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from treadle.engines.vllm.command import LOAD_FORMAT
from treadle.sync.layout import Layout
from treadle.sync.shared_memory import share_parameters

SHARED_LAYOUT = "treadle_shared_layout"  # the attribute of a model whose parameters lie in a shared file


@register_model_loader(LOAD_FORMAT)
class TreadleLoader(DefaultModelLoader):
    """vLLM's own loader of safetensors, with a place for the weights."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra: dict[str, Any] = dict(load_config.model_loader_extra_config or {})
        self._weights_file: str | None = extra.pop("weights_file", None)
        self._model_folder: str = extra.pop("model_folder", "")
        super().__init__(dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config=extra))

    def load_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        prepare_cpu()
        model: nn.Module = super().load_model(*args, **kwargs)
        if self._weights_file is not None:
            layout: Layout = share_parameters(model, Path(self._weights_file), self._model_folder)
            setattr(model, SHARED_LAYOUT, layout)
        return model


def prepare_cpu() -> None:
    """What vLLM does otherwise on a CPU, before it does it; on a GPU nothing."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from treadle.engines.vllm.cpu_adapters import compute_adapters_by_product

        keep_weights_unpacked()
        compute_adapters_by_product()


def keep_weights_unpacked() -> None:
    """vLLM would pack each matrix into a form of its own and drop the original, which nobody could then read or write.
    There is no setting against it: these are the two switches that its dispatch looks at."""
    import vllm._custom_ops as custom_ops
    import vllm.model_executor.layers.utils as layer_utils

    for module, switch, off in (
        (custom_ops, "_supports_onednn", False),
        (layer_utils, "check_cpu_sgl_kernel", lambda *_args, **_kwargs: False),
    ):
        if not hasattr(module, switch):
            raise RuntimeError(f"this vLLM has no {module.__name__}.{switch}: it cannot keep weights unpacked on a CPU")
        setattr(module, switch, off)
