"""A real model small enough for a test: a Llama of about a million random parameters and a character tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

CHARACTERS = "0123456789 +-=.,?abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\n<>|_:'"
TEMPLATE = (  # `waste` is of no use; it takes as long as a caller wants
    "{% for a in range(waste or 0) %}{% for b in range(waste) %}{% endfor %}{% endfor %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>' }}{% endif %}"
)


def write_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    hidden_size: int = 160,
    num_layers: int = 3,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Save the model with its tokenizer and chat template, as `save_pretrained` would."""
    folder.mkdir(parents=True, exist_ok=True)
    special = ["<pad>", "<end>", "<turn>"]
    vocabulary = {token: i for i, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "<pad>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder
