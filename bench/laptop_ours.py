"""Treadle's side of bench/laptop.py: the trainer's own functions in the order of its loop, without hub and engine."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from laptop_meter import Group, Meter, read_work

from treadle.config import TrainConfig
from treadle.train.loop import accumulate_gradients
from treadle.train.optimizers import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import load_policy
from treadle.wire.groups import IGNORED, NO_LOGPROB, ScoredGroup


def scored(group: Group) -> ScoredGroup:
    """The group as the hub would deliver it."""
    num_prompt = len(group.prompt_ids)
    return ScoredGroup(
        tokens=[group.prompt_ids + completion for completion in group.completions],
        masks=[[IGNORED] * num_prompt + completion for completion in group.completions],
        scores=group.rewards,
        inference_logprobs=[[NO_LOGPROB] * num_prompt + logprobs for logprobs in group.logprobs],
        generation_params={"temperature": 1.0},
        policy_version=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--micro-tokens", type=int, default=0, help="the trainer's own default when absent")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    groups = [scored(group) for group in read_work(options.work)]
    config = TrainConfig(
        model=str(options.model),
        device="cpu",
        steps=options.steps,
        lr=1e-6,
        warmup_steps=0,
        schedule="constant",
        std_ddof=1,  # TRL's value, so that both losses are equal; everything else is the default
        micro_tokens=options.micro_tokens,
    )
    policy = load_policy(options.model, config)
    optimizer = build_optimizer(policy, config)
    meter = Meter()
    for step in range(1, options.steps + 1):
        meter.start()
        batch = pack(groups, config, token_cost=policy.token_cost)
        losses = accumulate_gradients(policy, batch, config).metrics()
        outcome = optimizer.step(step, loss_is_finite=math.isfinite(losses["loss"]))
        policy.write_live_weights()
        measured = meter.stop()
        measured.loss, measured.grad_norm = losses["loss"], outcome.grad_norm
    meter.report()


if __name__ == "__main__":
    main()
