"""Write a model folder as one GGUF file, which llama.cpp and the programs built on it load.

config.json      ->  metadata of the architecture: sizes, rotary positions
tokenizer.json   ->  tokens, their types, merges, special ids; the chat template
*.safetensors    ->  tensors under llama.cpp's names, one at a time: matrices in the number format of the checkpoint,
                     norms and biases in float32

`read_model` refuses what this cannot write, and reads no weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from treadle.engines.model_folder import check_model_folder, read_header, read_settings
from treadle.errors import ModelError
from treadle.support import FAMILIES

ARCHITECTURES = {kind: family.gguf for kind, family in FAMILIES.items() if family.gguf}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_OF_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<part>.+)")
_DTYPES = {
    "F32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "F16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "BF16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How a text is cut before merges apply, as tokenizer.json has it -> llama.cpp's name for it (tokenizer.ggml.pre).
_PRE_TOKENIZERS = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (_WORDS + r"\p{N}" + _REST, "ByteLevel"): "qwen2",
    (_WORDS + r"\p{N}{1,3}" + _REST, "ByteLevel"): "llama-bpe",
}


@dataclass(frozen=True)
class GgufModel:
    """A model folder that can be written, with its settings as read from the files."""

    folder: Path
    config: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    pre_tokenizer: str
    headers: Mapping[Path, Mapping[str, Any]]  # of the safetensors files

    @property
    def architecture(self) -> str:
        return ARCHITECTURES[self.config["model_type"]]

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])

    @property
    def rope(self) -> Mapping[str, Any]:
        """{"rope_type": ..., "rope_theta": ..., ...}; earlier releases of transformers saved it in two parts."""
        saved = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        theta = saved.get("rope_theta") or self.config.get("rope_theta") or 10000.0
        return {"rope_type": saved.get("type", "default"), **saved, "rope_theta": theta}

    @property
    def names(self) -> dict[str, tuple[Path, str]]:
        """GGUF's name of each tensor -> (file, name in it)."""
        found = {}
        for file, header in self.headers.items():
            for name in header:
                if name == "lm_head.weight" and self.config.get("tie_word_embeddings"):
                    continue  # the embedding again
                found[_gguf_name(name, file)] = (file, name)
        return found


def read_model(folder: Path) -> GgufModel:
    """The settings of a model folder; refuses families, tokenizers and number formats that cannot be written."""
    check_model_folder(folder)
    config = read_settings(folder / "config.json")
    kind = config.get("model_type")
    known = ", ".join(ARCHITECTURES)
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"{folder} is a model of type '{kind}'; GGUF is written for {known}",
            fix="--merged DIR writes it in safetensors; llama.cpp's own converter takes that folder",
        )
    if config.get("quantization_config"):
        raise ModelError(f"the weights of {folder} are quantized", fix="export the model that they were made from")
    if config.get("use_sliding_window"):
        raise ModelError(f"{folder} uses a sliding window, which GGUF's '{kind}' does not have", fix="--merged DIR")
    tokenizer = read_settings(folder / "tokenizer.json")
    headers = {file: read_header(file) for file in sorted(folder.glob("*.safetensors"))}
    dtypes = {tensor["dtype"] for header in headers.values() for tensor in header.values()}
    if odd := sorted(dtypes - set(_DTYPES)):
        raise ModelError(f"{folder} has weights in {odd[0]}; written are {', '.join(_DTYPES)}", fix="--merged DIR")
    model = GgufModel(folder, config, tokenizer, _pre_tokenizer(tokenizer, folder), headers)
    if model.rope["rope_type"] not in ("default", "llama3", "linear"):
        raise ModelError(
            f"{folder} has rotary positions of type '{model.rope['rope_type']}'; written are default, linear, llama3",
            fix="--merged DIR",
        )
    return model


def write_gguf(model: GgufModel, target: Path) -> None:
    """Write `target` whole or not at all."""
    staging = target.with_name(f".{target.name}.partial")
    writer = GGUFWriter(staging, model.architecture)
    try:
        _add_architecture(writer, model)
        _add_tokenizer(writer, model)
        tensors = model.names
        factors = _rope_factors(model)
        if factors is not None:
            writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
        for name, (file, own) in tensors.items():
            _add_tensor_info(writer, name, model.headers[file][own])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for weights in _tensors(model, tensors):
            writer.write_tensor_data(weights)
        writer.close()
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)


def _gguf_name(name: str, file: Path) -> str:
    """ "model.layers.3.mlp.up_proj.weight" -> "blk.3.ffn_up.weight"."""
    stem, _, suffix = name.rpartition(".")
    found = _LAYER.fullmatch(stem)
    part = _OF_LAYER.get(found["part"]) if found else _TOP.get(stem)
    if part is None or suffix not in ("weight", "bias"):
        raise ModelError(f"{file} has a tensor '{name}', which GGUF has no name for", fix="--merged DIR")
    return f"blk.{found['layer']}.{part}.{suffix}" if found else f"{part}.{suffix}"


def _add_architecture(writer: GGUFWriter, model: GgufModel) -> None:
    config, rope = model.config, model.rope
    writer.add_type("model")
    writer.add_name(model.folder.name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_string(f"{model.architecture}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_vocab_size(config["vocab_size"])
    matrices = [t["dtype"] for header in model.headers.values() for t in header.values() if len(t["shape"]) > 1]
    writer.add_file_type(_DTYPES[max(set(matrices), key=matrices.count)][1])


def _rope_factors(model: GgufModel) -> np.ndarray[Any, Any] | None:
    """Llama 3's rotary positions: by how much each frequency is divided. None for other kinds."""
    rope = model.rope
    if rope["rope_type"] != "llama3":
        return None
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    frequencies = rope["rope_theta"] ** (-torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim)
    turns = frequencies * rope["original_max_position_embeddings"] / (2 * math.pi)  # within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: as it is; 0: divided by `factor`
    factors: np.ndarray[Any, Any] = (1 / ((1 - kept) / factor + kept)).to(torch.float32).numpy()
    return factors


# ---- the tokenizer


def _pre_tokenizer(tokenizer: Mapping[str, Any], folder: Path) -> str:
    """llama.cpp's name for how this byte-level BPE tokenizer cuts a text."""
    bpe, pre = tokenizer.get("model") or {}, tokenizer.get("pre_tokenizer") or {}
    parts = pre.get("pretokenizers") or [pre]
    kinds = tuple(
        str((part.get("pattern") or {}).get("Regex")) if part.get("type") == "Split" else str(part.get("type"))
        for part in parts
    )
    name = _PRE_TOKENIZERS.get(kinds)
    if bpe.get("type") != "BPE" or bpe.get("byte_fallback") or name is None:
        raise ModelError(
            f"{folder / 'tokenizer.json'} is a {bpe.get('type')} tokenizer with the pre-tokenizer {kinds}; GGUF is "
            "written for the byte-level BPE tokenizers of GPT-2, SmolLM, Qwen2 and Llama 3",
            fix="--merged DIR writes it in safetensors; llama.cpp's own converter takes that folder",
        )
    return name


def _add_tokenizer(writer: GGUFWriter, model: GgufModel) -> None:
    size = int(model.config["vocab_size"])
    vocabulary: Mapping[str, int] = model.tokenizer["model"]["vocab"]
    added = {token["id"]: token for token in model.tokenizer.get("added_tokens") or []}
    largest = max([*vocabulary.values(), *added])
    if largest >= size:
        raise ModelError(
            f"the tokenizer of {model.folder} has token {largest}, and the model has {size}",
            fix="save the model again with its own tokenizer",
        )
    tokens = [f"[PAD{number}]" for number in range(size)]  # rows of the embedding without a token
    kinds = [int(TokenType.UNUSED)] * size
    for token, number in vocabulary.items():
        tokens[number], kinds[number] = token, int(TokenType.NORMAL)
    for number, token in added.items():
        tokens[number] = token["content"]
        kinds[number] = int(TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(model.pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    settings = _optional(model.folder / "tokenizer_config.json")
    numbers = {token: number for number, token in enumerate(tokens)}
    ids = {name: _special_id(name, settings, model.config, numbers) for name in ("bos", "eos", "unk", "pad")}
    for name, found in ids.items():
        if found is not None:
            writer.add_uint32(f"tokenizer.ggml.{_ID_KEYS[name]}_token_id", found)
    first = Tokenizer.from_file(str(model.folder / "tokenizer.json")).encode("a").ids[0]
    writer.add_add_bos_token(ids["bos"] is not None and first == ids["bos"])
    template = model.folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    if text:
        writer.add_chat_template(text)


_ID_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _special_id(
    name: str, settings: Mapping[str, Any], config: Mapping[str, Any], numbers: Mapping[str, int]
) -> int | None:
    """As the tokenizer's settings name the token, else as the model's do."""
    token = settings.get(f"{name}_token")
    content = token.get("content") if isinstance(token, dict) else token
    if content is not None and content in numbers:
        return numbers[content]
    number = config.get(f"{name}_token_id")
    return number[0] if isinstance(number, list) and number else number if isinstance(number, int) else None


def _optional(file: Path) -> dict[str, Any]:
    return read_settings(file) if file.is_file() else {}


# ---- the tensors


def _add_tensor_info(writer: GGUFWriter, name: str, header: Mapping[str, Any]) -> None:
    shape, dtype = header["shape"], "F32" if len(header["shape"]) == 1 else header["dtype"]
    num_bytes = math.prod(shape) * (4 if dtype == "F32" else 2)
    kind = np.dtype(np.float32 if dtype == "F32" else np.float16)
    writer.add_tensor_info(name, shape, kind, num_bytes, raw_dtype=_DTYPES[dtype][0])


def _tensors(model: GgufModel, tensors: Mapping[str, tuple[Path, str]]) -> Iterator[np.ndarray[Any, Any]]:
    """The weights in the order of `tensors`, read one at a time."""
    heads = int(model.config["num_attention_heads"])
    num_heads = {"attn_q": heads, "attn_k": int(model.config.get("num_key_value_heads") or heads)}
    for name, (file, own) in tensors.items():
        with safe_open(file, framework="pt") as opened:
            weight: Tensor = opened.get_tensor(own)
        part = name.split(".")[-2]
        if model.architecture == "llama" and part in num_heads:
            weight = _interleaved(weight, num_heads[part])
        if weight.ndim == 1:
            weight = weight.to(torch.float32)
        weight = weight.contiguous()
        # numpy has no bfloat16: its bytes are written as they are
        yield (weight.view(torch.float16) if weight.dtype == torch.bfloat16 else weight).numpy()


def _interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rotary positions turn pairs of rows: (i, i + half of a head) here, (2i, 2i + 1) in llama.cpp's Llama."""
    half = weight.shape[0] // num_heads // 2
    return weight.view(num_heads, 2, half, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
