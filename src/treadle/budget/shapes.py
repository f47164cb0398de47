"""Find the dimensions of a model and count its parameters exactly. Pure, except for reading a config.json."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treadle.config.load import suggest
from treadle.errors import ModelError
from treadle.support import FAMILIES

_OTHER_KINDS = ("qwen3_moe",)  # planned, but engine and trainer are not tested with them
_QUANTIZED = ("awq", "gptq", "gguf", "fp8", "int4", "int8", "bnb", "4bit", "8bit")


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the Llama family, or one whose MLP is a mixture of experts.

    >>> KNOWN["qwen3-1.7b"].num_params
    1720574976
    """

    name: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool = False  # the output layer is the embedding
    has_qk_norm: bool = False  # Qwen3
    has_qkv_bias: bool = False  # Qwen2
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    # A mixture of experts; `ffn` is then the width of all the experts that a token uses together.
    num_experts: int = 0
    experts_per_token: int = 0
    num_other_params: int = 0  # the rest of a model that is given only as a number of parameters

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each linear layer in one decoder layer, by name; experts are counted apart."""
        attention = {
            "q_proj": (self.hidden, self.query_width),
            "k_proj": (self.hidden, self.kv_width),
            "v_proj": (self.hidden, self.kv_width),
            "o_proj": (self.query_width, self.hidden),
        }
        if self.num_experts:
            return attention
        return attention | {
            "gate_proj": (self.hidden, self.ffn),
            "up_proj": (self.hidden, self.ffn),
            "down_proj": (self.ffn, self.hidden),
        }

    @property
    def expert_ffn(self) -> int:
        """Inner width of one expert; 0 without experts."""
        return self.ffn // self.experts_per_token if self.num_experts else 0

    @property
    def num_matrix_params(self) -> int:
        """Weights of the linear layers in one decoder layer, with all experts and the router that chooses them."""
        experts = self.num_experts * self.hidden * (3 * self.expert_ffn + 1)
        return sum(inputs * outputs for inputs, outputs in self.linears.values()) + experts

    @property
    def num_largest_in_layer(self) -> int:
        """The largest single tensor of a layer: of experts, all their gate and up matrices are one."""
        experts = self.num_experts * self.hidden * 2 * self.expert_ffn
        return max(experts, *(inputs * outputs for inputs, outputs in self.linears.values()))

    @property
    def num_layer_params(self) -> int:
        biases = (
            self.has_qkv_bias * (self.query_width + 2 * self.kv_width)
            + self.has_o_bias * self.hidden
            + self.has_mlp_bias * (2 * self.ffn + self.hidden)
        )
        norms = 2 * self.hidden + self.has_qk_norm * 2 * self.head_dim
        return self.num_matrix_params + biases + norms

    @property
    def num_embedding_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def num_outer_params(self) -> int:
        """Embedding, last norm, and the output layer if it is not tied."""
        return self.num_embedding_params * (1 if self.is_tied else 2) + self.hidden + self.num_other_params

    @property
    def num_params(self) -> int:
        return self.num_layers * self.num_layer_params + self.num_outer_params

    @property
    def num_largest(self) -> int:
        """The largest single tensor."""
        return max(self.num_embedding_params, self.num_largest_in_layer)


def _qwen3(name: str, layers: int, hidden: int, ffn: int, heads: int, *, is_tied: bool) -> ModelShape:
    return ModelShape(name, layers, hidden, ffn, heads, 8, 128, 151_936, is_tied, has_qk_norm=True)


def _qwen3_moe(name: str, layers: int, hidden: int, expert_ffn: int, heads: int) -> ModelShape:
    return ModelShape(
        name, layers, hidden, 8 * expert_ffn, heads, 4, 128, 151_936, has_qk_norm=True, num_experts=128,
        experts_per_token=8,
    )  # fmt: skip


def _qwen2(
    name: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, *, head_dim: int = 128,
    vocab: int = 152_064, is_tied: bool = False,
) -> ModelShape:  # fmt: skip
    return ModelShape(name, layers, hidden, ffn, heads, kv_heads, head_dim, vocab, is_tied, has_qkv_bias=True)


_SHAPES = (
    ModelShape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49_152, is_tied=True),
    ModelShape("SmolLM2-360M", 32, 960, 2560, 15, 5, 64, 49_152, is_tied=True),
    ModelShape("SmolLM2-1.7B", 24, 2048, 8192, 32, 32, 64, 49_152, is_tied=True),
    _qwen3("Qwen3-0.6B", 28, 1024, 3072, 16, is_tied=True),
    _qwen3("Qwen3-1.7B", 28, 2048, 6144, 16, is_tied=True),
    _qwen3("Qwen3-4B", 36, 2560, 9728, 32, is_tied=True),
    _qwen3("Qwen3-8B", 36, 4096, 12_288, 32, is_tied=False),
    _qwen3("Qwen3-14B", 40, 5120, 17_408, 40, is_tied=False),
    _qwen3("Qwen3-32B", 64, 5120, 25_600, 64, is_tied=False),
    _qwen3_moe("Qwen3-30B-A3B", 48, 2048, 768, 32),
    _qwen3_moe("Qwen3-235B-A22B", 94, 4096, 1536, 64),
    _qwen2("Qwen2.5-0.5B", 24, 896, 4864, 14, 2, head_dim=64, vocab=151_936, is_tied=True),
    _qwen2("Qwen2.5-1.5B", 28, 1536, 8960, 12, 2, vocab=151_936, is_tied=True),
    _qwen2("Qwen2.5-3B", 36, 2048, 11_008, 16, 2, vocab=151_936, is_tied=True),
    _qwen2("Qwen2.5-7B", 28, 3584, 18_944, 28, 4),
    _qwen2("Qwen2.5-14B", 48, 5120, 13_824, 40, 8),
    _qwen2("Qwen2.5-32B", 64, 5120, 27_648, 40, 8),
    _qwen2("Qwen2.5-72B", 80, 8192, 29_568, 64, 8),
    ModelShape("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128_256, is_tied=True),
    ModelShape("Llama-3.2-3B", 28, 3072, 8192, 24, 8, 128, 128_256, is_tied=True),
    ModelShape("Llama-3.1-8B", 32, 4096, 14_336, 32, 8, 128, 128_256),
    ModelShape("Llama-3.1-70B", 80, 8192, 28_672, 64, 8, 128, 128_256),
    ModelShape("Llama-3.3-70B", 80, 8192, 28_672, 64, 8, 128, 128_256),
    ModelShape("Mistral-7B-v0.3", 32, 4096, 14_336, 32, 8, 128, 32_768),
    ModelShape("Mistral-Small-24B", 40, 5120, 32_768, 32, 8, 128, 131_072),
)
_SAME_SHAPE = {"Hermes-3-Llama-3.1-8B": "Llama-3.1-8B", "Hermes-3-Llama-3.1-70B": "Llama-3.1-70B"}
KNOWN: dict[str, ModelShape] = {shape.name.lower(): shape for shape in _SHAPES}
KNOWN |= {other.lower(): replace(KNOWN[same.lower()], name=other) for other, same in _SAME_SHAPE.items()}


def find_shape(model: str) -> ModelShape:
    """From the config.json of a folder, or by a known name: `find_shape("Qwen/Qwen3-8B-Base").name` is 'Qwen3-8B'."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return read_shape(folder / "config.json")
    name = model.rpartition("/")[2].lower().removeprefix("meta-")
    if not any(word in name for word in _QUANTIZED):
        # A suffix after the size ("-Instruct-2507") does not change the shape.
        fitting = [known for known in KNOWN if name == known or name.startswith(f"{known}-")]
        if fitting:
            return KNOWN[max(fitting, key=len)]
    raise ModelError(
        f"the shape of the model '{model}' is not known here, and there is no such folder",
        fix=f"{suggest(name, KNOWN) or 'known: ' + ', '.join(shape.name for shape in KNOWN.values())}; "
        "else give a folder with a config.json, or a size as in --params 24e9",
    )


def read_shape(path: Path) -> ModelShape:
    """The shape that a model folder's config.json describes."""
    try:
        settings = json.loads(path.read_text())
    except OSError:
        raise ModelError(f"{path.parent} holds no config.json", fix="--model takes a model's folder or name") from None
    except ValueError:
        raise ModelError(f"{path} is damaged: it cannot be parsed", fix="fetch or save the model again") from None
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if kind not in (*FAMILIES, *_OTHER_KINDS):
        raise ModelError(
            f"{path} describes a model of type '{kind}'; known are {', '.join((*FAMILIES, *_OTHER_KINDS))}",
            fix="give its size instead, as in --params 24e9",
        )
    try:
        return _from_settings(path.parent.name, kind, settings)
    except KeyError as missing:
        raise ModelError(f"{path} does not say {missing}", fix="save the model again with save_pretrained") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"{path} has a size that cannot be used: {error}", fix="fetch or save the model again"
        ) from None


def shape_of_size(num_params: float) -> ModelShape:
    """A model of exactly this size: the nearest known shape with more or fewer layers."""
    if not 1e6 <= num_params <= 1e13:
        raise ModelError(f"--params {num_params:g} is no size of a model", fix="count parameters, as in --params 24e9")
    dense = [shape for shape in _SHAPES if not shape.num_experts]
    nearest = min(dense, key=lambda shape: abs(math.log(shape.num_params / num_params)))
    layers = max(1, int((num_params - nearest.num_outer_params) / nearest.num_layer_params))
    resized = replace(nearest, name=f"a model of {num_params / 1e9:g} B parameters", num_layers=layers)
    return replace(resized, num_other_params=int(num_params) - resized.num_params)


def _from_settings(name: str, kind: str, settings: dict[str, Any]) -> ModelShape:
    heads, hidden = int(settings["num_attention_heads"]), int(settings["hidden_size"])
    has_bias = bool(settings.get("attention_bias"))
    num_experts = int(settings.get("num_experts") or settings.get("num_local_experts") or 0)
    per_token = int(settings["num_experts_per_tok"]) if num_experts else 0
    return ModelShape(
        name=name,
        num_layers=int(settings["num_hidden_layers"]),
        hidden=hidden,
        ffn=per_token * int(settings["moe_intermediate_size"]) if num_experts else int(settings["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(settings.get("num_key_value_heads") or heads),
        head_dim=int(settings.get("head_dim") or hidden // heads),
        vocab=int(settings["vocab_size"]),
        is_tied=bool(settings.get("tie_word_embeddings", False)),
        has_qk_norm=kind in ("qwen3", "qwen3_moe"),
        has_qkv_bias=kind == "qwen2" or has_bias,
        has_o_bias=has_bias,
        has_mlp_bias=bool(settings.get("mlp_bias")),
        num_experts=num_experts,
        experts_per_token=per_token,
    )
