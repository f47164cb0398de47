"""TRL's side of bench/loop.py: GRPO with vLLM in the trainer's process, on the same prompts, lengths and reward.

Prints one JSON object. Runs in a Python that has trl, datasets and vllm; treadle need not be installed there.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimer(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._started)


def parity(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion[0]["content"]) % 2) for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="JSON file with a list of prompts")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="per completion")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences forwarded at once")
    parser.add_argument("--sleep", action="store_true", help="vLLM gives its memory back while the model is trained")
    options = parser.parse_args()
    started = time.perf_counter()
    with open(options.prompts) as file:
        rows = [{"prompt": [{"role": "user", "content": text}]} for text in json.load(file)]
    config = GRPOConfig(
        output_dir="trl-out", max_steps=options.steps, num_generations=options.group_size,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.groups * options.group_size // options.micro_batch,
        max_completion_length=options.tokens, learning_rate=1e-6, warmup_steps=3, bf16=True,
        gradient_checkpointing=False, beta=0.0, epsilon_high=0.28, temperature=1.0, save_strategy="no", report_to=[],
        use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.25, vllm_max_model_length=2048,
        vllm_enable_sleep_mode=options.sleep,
    )  # fmt: skip
    timer = StepTimer()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16),
        args=config,
        reward_funcs=parity,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        callbacks=[timer],
    )
    trainer.train()
    found = {
        "seconds": timer.seconds,
        "total_s": time.perf_counter() - started,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
