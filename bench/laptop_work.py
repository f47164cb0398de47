"""Create the work of bench/laptop.py: prompts of the arithmetic environment, and sampled completions."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path

import torch
from laptop_meter import Group
from transformers import AutoModelForCausalLM

from treadle.config.env import EnvConfig
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.tasks.arithmetic import Arithmetic

SHORTEST, LONGEST = 8, 32  # tokens of a completion, uniformly distributed: 20 on average


def make_work(model_folder: Path, num_groups: int, group_size: int, seed: int) -> list[Group]:
    """The same seed gives the same work. Every group has right and wrong completions, so none can be skipped.

    The shortest ones are right, so that the loss is far from zero and can be compared between both sides.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    environment = Arithmetic(EnvConfig(task="addition"))
    tokenizer = ChatTokenizer.load(model_folder)
    items = [environment.train_item(index) for index in range(num_groups)]
    prompts = [tokenizer.encode_chat(item.messages) for item in items]
    sampled = _sample(model_folder, [prompt for prompt in prompts for _ in range(group_size)])
    groups = []
    for number, (item, prompt) in enumerate(zip(items, prompts, strict=True)):
        rows = sampled[number * group_size : (number + 1) * group_size]
        lengths = [rng.randint(SHORTEST, LONGEST) for _ in rows]
        longest_right = sorted(lengths)[rng.randrange(group_size - 1)]
        groups.append(
            Group(
                prompt=item.prompt,
                prompt_ids=prompt,
                completions=[tokens[:length] for (tokens, _), length in zip(rows, lengths, strict=True)],
                logprobs=[logprobs[:length] for (_, logprobs), length in zip(rows, lengths, strict=True)],
                rewards=[float(length <= longest_right) for length in lengths],
            )
        )
    return groups


def _sample(model_folder: Path, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """LONGEST tokens after each prompt and their logprobs in fp32; the end token is suppressed."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    generated = model.generate(
        torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]),
        attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
        do_sample=True,
        top_k=0,
        min_new_tokens=LONGEST,
        max_new_tokens=LONGEST,
        output_logits=True,
        return_dict_in_generate=True,
    )
    sampled_BC = generated.sequences[:, longest:]
    # One token at a time: logits of all tokens at once would take a gigabyte per copy.
    logprobs_CB = [
        logits_BV.log_softmax(-1).gather(-1, token_B[:, None])[:, 0].tolist()
        for logits_BV, token_B in zip(generated.logits, sampled_BC.T, strict=True)
    ]
    return list(zip(sampled_BC.tolist(), map(list, zip(*logprobs_CB, strict=True)), strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    work = make_work(options.model, options.groups, options.group_size, options.seed)
    options.out.write_text(json.dumps([asdict(group) for group in work]))
