"""A tiny model whose moves are known beforehand: what comes next depends on the last character, and hardly on the rest.

Nothing is learnt. Random layers read all that came before and move every logit a little, so that a logprob is right
only behind exactly the tokens that it was sampled behind; the head says the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.foreign.parts import TEMPLATE
from tests.tiny_model import CHARACTERS

HIDDEN_SIZE = 128
_SURE = 14.0  # logit of the likeliest; what is not said to follow has about 0
_EMBEDDING_NORM = 16.0  # the random layers add about a twentieth to it


def write_chain_model(folder: Path, next_of: Mapping[str, Sequence[str]], *, step: float) -> Path:
    """`next_of`: what may follow a character, the likeliest first; each is `step` below the one before it in logits."""
    folder.mkdir(parents=True)
    special = ["<pad>", "<end>", "<turn>"]
    vocabulary = {token: i for i, token in enumerate([*special, *CHARACTERS, *"[](){}\\/!$%*#"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # the default puts blanks between the characters
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "<pad>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    logits = torch.zeros(len(vocabulary), len(vocabulary))  # of the last token, and the next one
    for last, followers in next_of.items():
        for rank, follower in enumerate(followers):
            logits[vocabulary[last], vocabulary[follower]] = _SURE - rank * step
    _model_of(logits).save_pretrained(folder)
    return folder


def _model_of(logits: torch.Tensor) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(logits),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    directions = torch.linalg.qr(torch.randn(HIDDEN_SIZE, HIDDEN_SIZE)).Q[: len(logits)]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(_EMBEDDING_NORM * directions)
        length = HIDDEN_SIZE**0.5  # of what the head reads: the last norm sees to it
        model.lm_head.weight.copy_(logits.T @ directions / length)
    return model
