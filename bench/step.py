"""Measure one optimizer step on fixed work, on one GPU: real tokens per second, MFU, peak memory.

The work: the shape of Qwen3-1.7B with random bf16 weights, 64 sequences, prompts of 256 tokens, completions uniform in
64..1024 (random.Random(0)), full fine-tune with AdamW on fp32 masters. A step is everything from the scored groups to
the new live weights: advantages, packing, forward, backward, clipping, update, rounding into the live weights.

    python bench/step.py                    the trainer's defaults
    python bench/step.py --ideas            add the optimisations one after another, starting without any
    python bench/step.py --train.optimizer adamw_8bit --train.gradient-checkpointing true     any setting of the trainer

Tokens are real tokens: a prompt that eight completions share counts eight times, even if it is forwarded once. MFU
counts 6 operations per parameter and forwarded token against the card's data sheet.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from treadle.config import TrainConfig
from treadle.config.load import parse
from treadle.train import logprobs
from treadle.train import optimizer as optimizer_module
from treadle.train.loop import accumulate_gradients, peak_flops
from treadle.train.optimizers import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import Policy
from treadle.wire.groups import IGNORED, NO_LOGPROB, ScoredGroup

VOCABULARY = 151_936
NUM_SEQUENCES, GROUP_SIZE, PROMPT = 64, 8, 256
LOGPROB = -12.3  # about the logprob of every token with random weights


@dataclass(frozen=True)
class Result:
    name: str
    step_s: float
    tokens_per_s: float
    mfu: float | None
    peak_gib: float
    first_s: float
    num_micros: int
    forwarded: int

    def line(self) -> str:
        mfu = "  -  " if self.mfu is None else f"{self.mfu:.3f}"
        return (
            f"{self.name:48s} {self.step_s:7.3f} s {self.tokens_per_s / 1e3:7.1f}k tok/s  MFU {mfu} "
            f"{self.peak_gib:6.1f} GiB  {self.num_micros:2d} micros  {self.forwarded:6d} forwarded  "
            f"first {self.first_s:.0f} s"
        )


def make_groups(*, shared_prompts: bool) -> list[ScoredGroup]:
    lengths = random.Random(0)
    tokens = random.Random(1)
    groups = []
    for _ in range(NUM_SEQUENCES // GROUP_SIZE):
        prompt = _draw(tokens, PROMPT)
        prompts = [prompt if shared_prompts else _draw(tokens, PROMPT) for _ in range(GROUP_SIZE)]
        completions = [_draw(tokens, lengths.randint(64, 1024)) for _ in range(GROUP_SIZE)]
        groups.append(
            ScoredGroup(
                tokens=[p + c for p, c in zip(prompts, completions, strict=True)],
                masks=[[IGNORED] * PROMPT + c for c in completions],
                scores=[float(i % 3) for i in range(GROUP_SIZE)],
                advantages=[[0.5 - i % 2] * (PROMPT + len(c)) for i, c in enumerate(completions)],
                inference_logprobs=[[NO_LOGPROB] * PROMPT + [LOGPROB] * len(c) for c in completions],
            )
        )
    return groups


def _draw(source: random.Random, count: int) -> list[int]:
    return [source.randrange(VOCABULARY) for _ in range(count)]


def build_model(layers: int) -> Any:
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=2048, intermediate_size=6144, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=40_960,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def measure(name: str, config: TrainConfig, groups: list[ScoredGroup], *, layers: int, repeat: int) -> Result:
    policy = Policy(build_model(layers), config)
    optimizer = build_optimizer(policy, config)
    num_tokens = sum(len(t) for g in groups for t in g.tokens)
    torch.cuda.reset_peak_memory_stats()

    def step(number: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        batch = pack(groups, config, token_cost=policy.token_cost)
        stats = accumulate_gradients(policy, batch, config)
        stats.metrics()
        outcome = optimizer.step(number)
        policy.write_live_weights()
        torch.cuda.synchronize()
        assert outcome.grad_norm > 0
        assert not outcome.skipped
        return time.perf_counter() - started

    first_s = step(1)
    step(2)
    step_s = statistics.median(step(3 + i) for i in range(repeat))
    batch = pack(groups, config, token_cost=policy.token_cost)
    peak = peak_flops(policy.device)
    flops = policy.flops_per_token * batch.num_forwarded_tokens
    return Result(
        name, step_s, num_tokens / step_s, flops / step_s / peak if peak else None,
        torch.cuda.max_memory_allocated() / 2**30, first_s, len(batch.micros), batch.num_forwarded_tokens,
    )  # fmt: skip


@contextmanager
def without_kernels() -> Iterator[None]:
    """Use the plain torch implementations instead of the Triton kernels."""
    kept = logprobs._softmax_functions, optimizer_module.choose_adder
    logprobs._softmax_functions = lambda _: (logprobs.add_softmax_sums, logprobs.logit_gradients)
    optimizer_module.choose_adder = lambda _: torch.Tensor.add_
    try:
        yield
    finally:
        logprobs._softmax_functions, optimizer_module.choose_adder = kept


def ideas(config: TrainConfig, *, layers: int, repeat: int) -> Iterator[Result]:
    """From the slowest to the fastest; each line adds one optimisation to the line before."""
    apart, together = make_groups(shared_prompts=False), make_groups(shared_prompts=True)

    def run(name: str, groups: list[ScoredGroup], **settings: Any) -> Result:
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        return measure(name, config.model_copy(update=settings), groups, layers=layers, repeat=repeat)

    with without_kernels():
        yield run("packed, variable-length attention", apart, compile="off", micro_tokens=8192, attention="varlen")
        yield run("+ layers compiled", apart, micro_tokens=8192, attention="varlen")
    yield run("+ fused logprob and gradient kernels", apart, micro_tokens=8192, attention="varlen")
    yield run("+ micros of 16384 tokens", apart, micro_tokens=16384, attention="varlen")
    yield run("+ FlashAttention 4, if it is there (the default)", apart, micro_tokens=16384)
    yield run("+ micros of 28672 tokens", apart, micro_tokens=28672)
    yield run("same, prompts shared by 8, forwarded apart", together, micro_tokens=28672, share_prompts="off")
    yield run("+ each prompt forwarded once", together, micro_tokens=28672)
    yield run("default micros, prompts once", together, micro_tokens=16384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ideas", action="store_true", help="one line for each idea")
    parser.add_argument("--shared-prompts", action="store_true", help="the completions of a group share their prompt")
    parser.add_argument("--layers", type=int, default=28, help="fewer, to try the script out")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    known, rest = parser.parse_known_args()
    given = {
        flag.removeprefix("--train.").replace("-", "_"): value
        for flag, value in zip(rest[::2], rest[1::2], strict=True)
    }
    defaults = {"device": "cuda", "seq_len": 4096, "micro_tokens": 28672, "lr": 1e-6, "warmup_steps": 0}
    config = parse(TrainConfig, defaults | given, source="the command line")
    if known.ideas:
        results = ideas(config, layers=known.layers, repeat=known.repeat)
    else:
        groups = make_groups(shared_prompts=known.shared_prompts)
        name = " ".join(f"{key}={value}" for key, value in given.items()) or "as the trainer does it"
        results = iter([measure(name, config, groups, layers=known.layers, repeat=known.repeat)])
    for result in results:
        print(json.dumps(result.__dict__) if known.json else result.line(), flush=True)


if __name__ == "__main__":
    main()
