"""Compute reference logprobs with a plain Hugging Face forward in float32."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM


def load(folder, adapter=None):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model.eval()


@torch.inference_mode()
def logits_after(model, prompt_ids, token_ids):
    """[T, V]: the logits that each of `token_ids` was sampled from."""
    logits = model(torch.tensor([prompt_ids + token_ids], device=model.device)).logits[0].float().cpu()
    return logits[len(prompt_ids) - 1 : -1]


def logprobs_of(model, prompt_ids, token_ids, temperature=1.0):
    logits = logits_after(model, prompt_ids, token_ids) / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids)[:, None]).squeeze(1)


def mean_difference(model, prompt_ids, completions, temperature=1.0):
    """Mean |difference| of logprobs over all tokens of all completions."""
    differences = [
        (logprobs_of(model, prompt_ids, c.token_ids, temperature) - torch.tensor(c.logprobs)).abs() for c in completions
    ]
    return torch.cat(differences).mean().item()
