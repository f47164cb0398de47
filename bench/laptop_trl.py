"""TRL's side of bench/laptop.py. Runs in .venv-trl, where only TRL is installed.

TRL is used unpatched: `GRPOTrainer.train()` with a `rollout_func`, its interface for external completions. It returns
the recorded completions, so no time is spent on generation. A callback measures each optimizer step from beginning to
end, without reading data and logging.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from laptop_meter import Group, Meter, read_work
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimer(TrainerCallback):  # type: ignore[misc]
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._meter.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._meter.stop()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "grad_norm" in logs:
            self._meter.steps[-1].loss = float(logs["loss"])
            self._meter.steps[-1].grad_norm = float(logs["grad_norm"])


def replay(work: list[Group]) -> Any:
    """A rollout function that returns the recorded completions of a prompt, one for each time the prompt is listed."""
    by_prompt = {group.prompt: group for group in work}

    def rollout(prompts: list[list[dict[str, str]]], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        rows = []
        times_seen = dict.fromkeys(by_prompt, 0)
        for messages in prompts:
            prompt = messages[-1]["content"]
            rows.append((by_prompt[prompt], times_seen[prompt]))
            times_seen[prompt] += 1
        return {
            "prompt_ids": [group.prompt_ids for group, _ in rows],
            "completion_ids": [group.completions[i] for group, i in rows],
            "logprobs": [group.logprobs[i] for group, i in rows],
            "recorded_reward": [group.rewards[i] for group, i in rows],
        }

    return rollout


def recorded_reward(recorded_reward: list[float], **_: Any) -> list[float]:
    return recorded_reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, default=64, help="sequences forwarded at once")
    parser.add_argument("--weights", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--autocast", action="store_true", help="TRL's default (bf16=True): products in bf16")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="TRL's default")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    work = read_work(options.work)
    num_sequences = sum(len(group.completions) for group in work)
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            model_init_kwargs={"dtype": options.weights},
            bf16=options.autocast,
            gradient_checkpointing=options.gradient_checkpointing,
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=num_sequences // options.micro_batch,
            num_generations=len(work[0].completions),
            max_completion_length=max(len(c) for group in work for c in group.completions),
            max_steps=options.steps,
            shuffle_dataset=False,
            # the same objective and optimizer as Treadle's side
            loss_type="dapo",
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            num_iterations=1,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            adam_beta2=0.99,
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=str(options.model),
            args=config,
            processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": g.prompt}]} for g in work]),
            reward_funcs=recorded_reward,
            rollout_func=replay(work),
            callbacks=[StepTimer(meter)],
        )
        trainer.train()
    meter.report()


if __name__ == "__main__":
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    main()
