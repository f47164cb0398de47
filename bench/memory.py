"""Compare the memory that `treadle plan` predicts with that of a real trainer on one GPU.

    python bench/memory.py                     the three runs that docs/plan.md quotes
    python bench/memory.py --only "8B LoRA"    one of them

Random weights of the model's shape, 64 sequences with prompts of 256 and completions of up to 1024 tokens. It compares
the peak of the trainer's tensors (torch.cuda.max_memory_allocated), and also prints the allocator's peak. The
prediction is for the largest micro of this work: micros are balanced, so they are rarely full.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass, field
from typing import Any

import torch
from step import make_groups
from transformers import AutoModelForCausalLM, Qwen3Config

from treadle.budget.estimate import estimate
from treadle.budget.hardware import Machine
from treadle.budget.job import PlannedJob
from treadle.budget.shapes import find_shape
from treadle.config import TrainConfig
from treadle.config.load import parse
from treadle.train.loop import accumulate_gradients
from treadle.train.optimizers import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import Policy

MEAN_COMPLETION = 599  # of make_groups: random.Random(0), 64 draws from 64..1024


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    settings: dict[str, Any]
    job: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("1.7B, AdamW", "Qwen3-1.7B", {"micro_tokens": 16384}),
    Case(
        "4B, 8-bit AdamW, checkpointing",
        "Qwen3-4B",
        {"micro_tokens": 16384, "optimizer": "adamw_8bit", "gradient_checkpointing": True},
        {"optimizer": "adamw_8bit", "is_checkpointed": True},
    ),
    Case(
        "8B LoRA",
        "Qwen3-8B",
        {"micro_tokens": 8192, "lora": True},
        {"lora": True},
    ),
]


def build_model(model: str) -> Any:
    shape = find_shape(model)
    config = Qwen3Config(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=shape.is_tied, max_position_embeddings=40_960,
    )  # fmt: skip
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def run(case: Case) -> None:
    torch._dynamo.reset()
    config = parse(TrainConfig, {"device": "cuda", "seq_len": 4096, **case.settings}, source="bench")
    groups = make_groups(shared_prompts=False)
    policy = Policy(build_model(case.model), config)
    optimizer = build_optimizer(policy, config)
    torch.cuda.reset_peak_memory_stats()
    batch = pack(groups, config, token_cost=policy.token_cost)
    for step in (1, 2):
        accumulate_gradients(policy, batch, config)
        optimizer.step(step)
        policy.write_live_weights()
    torch.cuda.synchronize()
    measured, held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info()
    job = PlannedJob(
        find_shape(case.model), mode="lora" if config.lora else "none", engine_gpus=1, shares_prompts=False,
        micro_tokens=max(len(micro.token_ids_T) for micro in batch.micros), prompt_tokens=256,
        completion_tokens=MEAN_COMPLETION, **case.job,
    )  # fmt: skip
    place = estimate(job, Machine("card", total, 2**40)).places[0]
    predicted = place.trainer_tensors
    print(
        f"{case.name:34s} predicted {predicted / 1e9:7.2f} GB  measured {measured / 1e9:7.2f} GB  "
        f"{100 * (predicted / measured - 1):+5.1f} %   whole process: predicted {place.peak / 1e9:.2f} GB, "
        f"held {held / 1e9:.2f} GB, card {(total - free) / 1e9:.2f} GB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the name of one case")
    only = parser.parse_args().only
    for case in CASES:
        if only in (None, case.name):
            run(case)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
