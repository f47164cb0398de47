"""A tiny model that has learnt one thing: to call a tool, and to say its result. Learnt within seconds, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.foreign.parts import TEMPLATE
from tests.tiny_model import CHARACTERS

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>'
QUESTION, RESULT, ANSWER = "2 times 3?", "6", "It is 6."
_SURE_ENOUGH = 1e-3  # the loss at which the conversation comes nine times out of ten
_MAX_STEPS = 600


def write_tool_model(folder: Path) -> Path:
    """`<turn>` CALL `<end>` RESULT `<turn>` ANSWER `<end>`, behind QUESTION."""
    folder.mkdir(parents=True)
    special = ["<pad>", "<end>", "<turn>"]
    vocabulary = {token: i for i, token in enumerate([*special, *CHARACTERS, *'{}"/'])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # the default puts blanks between the characters
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "<pad>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    text = f"{QUESTION}<turn>{CALL}<end>{RESULT}<turn>{ANSWER}<end>"
    _taught(tokenizer.encode(text).ids, len(vocabulary)).save_pretrained(folder)
    return folder


def _taught(ids: list[int], vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # it is too small for two, which would only wait for each other
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sequence = torch.tensor([ids])
    for _ in range(_MAX_STEPS):
        loss = model(input_ids=sequence, labels=sequence).loss
        if loss.item() < _SURE_ENOUGH:
            with torch.no_grad():
                model.lm_head.weight.mul_(2)  # surer still: it must not depend on the numbers that are drawn
            return model
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError(f"the model did not learn its conversation: loss {loss.item():.4f}")
