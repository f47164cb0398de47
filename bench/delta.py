"""Compare bytes and time of a publish through the disk: all weights (reload) against the changed elements (delta).

    python bench/delta.py                                    SmolLM2 in bfloat16, AdamW at 1e-6
    python bench/delta.py --model FOLDER --engine vllm --lr 1e-5 --live-path /mnt/shared

The engine process is started as by `treadle engine`. This process is the trainer: it takes real optimizer steps on
sampled completions, and publishes and verifies each, first in one mode and then from the initial weights in the other.
Prints one line of JSON per mode: MB and seconds of the first publish and of later ones (first step, median, last step).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from treadle.config import TrainConfig
from treadle.engines.models import resolve_model
from treadle.launch.machine import SHARED_MEMORY
from treadle.net.address import take_port
from treadle.sync.modes import choose_sync
from treadle.sync.protocol import EngineLink, PublishResult
from treadle.train.loop import accumulate_gradients
from treadle.train.optimizers import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import build_policy
from treadle.wire.bridge import BridgeInfo
from treadle.wire.groups import IGNORED, NO_LOGPROB, ScoredGroup

START_S = 400.0
PROMPT_TOKENS = 64
PROMPTS_PER_STEP, GROUP_SIZE = 2, 4


@contextmanager
def running_engine(words: list[str], log: Path) -> Iterator[str]:
    with take_port("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        command = [sys.executable, "-m", "treadle", "engine", "--port", str(port), *words]
        engine = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        EngineLink(url, START_S).wait_for("/bridge/info", BridgeInfo, START_S)
        yield url
    finally:
        engine.terminate()
        engine.wait(60)


def sample(url: str, vocab_size: int, known: argparse.Namespace) -> list[ScoredGroup]:
    """Groups for all steps; both modes train on the same groups."""
    chance = random.Random(0)
    groups = []
    for _ in range(known.steps * PROMPTS_PER_STEP):
        body = {
            "prompt": {"prompt_token_ids": [chance.randrange(10, vocab_size) for _ in range(PROMPT_TOKENS)]},
            "n": GROUP_SIZE, "max_tokens": known.max_tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True,
        }  # fmt: skip
        answer = httpx.post(f"{url}/generate", json=body, timeout=300, trust_env=False)
        groups.append(as_group(answer.raise_for_status().json()))
    return groups


def as_group(answer: dict[str, Any]) -> ScoredGroup:
    prompt, completions = answer["prompt_token_ids"], answer["token_ids"]
    chosen = [
        [position[0][str(token)] for token, position in zip(ids, positions, strict=True)]
        for ids, positions in zip(completions, answer["logprobs"], strict=True)
    ]
    return ScoredGroup(
        tokens=[prompt + ids for ids in completions],
        masks=[[IGNORED] * len(prompt) + ids for ids in completions],
        scores=[float(i % 2) for i in range(len(completions))],
        inference_logprobs=[[NO_LOGPROB] * len(prompt) + logprobs for logprobs in chosen],
        policy_version=answer["policy_version"],
    )


def publish_steps(config: TrainConfig, groups: list[ScoredGroup]) -> list[PublishResult]:
    sync = choose_sync(config)
    attached = sync.attach()
    config = config.on_device(gpu=torch.cuda.is_available())
    policy = build_policy(attached, config)
    optimizer = build_optimizer(policy, config)
    receipts = [sync.publish(policy, version=0)]
    for step in range(1, config.steps + 1):
        first = (step - 1) * PROMPTS_PER_STEP
        batch = pack(groups[first : first + PROMPTS_PER_STEP], config, token_cost=policy.token_cost)
        accumulate_gradients(policy, batch, config)
        if optimizer.step(step).skipped:
            raise SystemExit(f"step {step} was skipped")
        receipts.append(sync.publish(policy, version=step))
    return receipts


def summary(receipts: list[PublishResult]) -> dict[str, list[float]]:
    """Values of the publish before the first step, of the first step, the median over steps, and of the last step."""

    def at(values: list[float]) -> list[float]:
        first, *steps = values
        return [round(v, 3) for v in (first, steps[0], statistics.median(steps), steps[-1])]

    return {
        "mb": at([receipt.num_bytes / 1e6 for receipt in receipts]),
        "transfer_s": at([receipt.write_s for receipt in receipts]),
        "verify_s": at([receipt.verified.seconds for receipt in receipts]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--live-path", type=Path, default=None, help="empty: a memory disk where there is one")
    known = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as scratch:
        work = Path(scratch)
        model = known.model or resolve_model("smollm2-135m-instruct")
        words = ["--engine", known.engine, "--model", str(model), "--dtype", known.dtype]
        words += ["--adapter-root", str(known.live_path or work)]
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        groups: list[ScoredGroup] = []
        for mode in ("reload", "delta"):
            with running_engine(words, work / "engine.log") as url:
                groups = groups or sample(url, vocab_size, known)
                config = TrainConfig(
                    engine_url=url, model=str(model), save_path=work / mode, live_path=known.live_path, lr=known.lr,
                    optimizer=known.optimizer, warmup_steps=0, schedule="constant", seq_len=1024, steps=known.steps,
                    weight_bridge_mode=mode,
                )  # fmt: skip
                print(json.dumps({"mode": mode, "lr": known.lr, **summary(publish_steps(config, groups))}), flush=True)


if __name__ == "__main__":
    main()
