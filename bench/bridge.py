"""The single copy of the weights: what a publish costs a real engine, and whether both sides agree before and after.

    python bench/bridge.py --engine vllm                     SmolLM2, or --model FOLDER
    python bench/bridge.py --shape 1.7b --engine vllm        the shape of Qwen3-1.7B, random weights
    python bench/bridge.py --engine vllm --alone             generation only, as the same vLLM serves without us

An engine process is started as `treadle engine` starts it; this process is the trainer: it binds its model to the
engine's weights, takes real optimizer steps on what the engine sampled, and publishes while requests are in flight.
One line of JSON at the end: seconds from pause to resume (the hold), what of it is the optimizer's own write, bytes of
weights that the trainer allocated, tokens per second of generation, mean and largest difference of logprobs.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from treadle.config import TrainConfig
from treadle.launch.machine import SHARED_MEMORY
from treadle.sync.single_copy import SingleCopySync
from treadle.train.optim import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import build_policy
from treadle.train.step import accumulate_gradients
from treadle.wire.groups import IGNORED, NO_LOGPROB, ScoredGroup

START_S = 400.0


def write_shape(folder: Path, tokenizer_of: Path | None) -> Path:
    """Qwen3-1.7B's shape with random weights, and the tokenizer of another model: only token ids are asked."""
    import shutil

    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=4096, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    if tokenizer_of is not None:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (tokenizer_of / name).is_file():
                shutil.copy(tokenizer_of / name, folder / name)
    return folder


@contextmanager
def running_engine(words: list[str], log: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        engine = subprocess.Popen(
            [sys.executable, "-m", "treadle", "engine", "--port", str(port), *words], stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == httpx.codes.OK:
                    break
            except httpx.TransportError:
                pass
            if engine.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the engine did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.3)
        yield url
    finally:
        engine.terminate()
        engine.wait(60)


class Load:
    """Requests in flight, from threads of their own, until it is stopped."""

    def __init__(self, url: str, vocab_size: int, *, num_clients: int, max_tokens: int, group: int) -> None:
        self._url, self._vocab, self._max_tokens, self._group = url, vocab_size, max_tokens, group
        self._stop = threading.Event()
        self.answers: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(num_clients)]
        self.started = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> float:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return time.monotonic() - self.started

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=self._url, timeout=300, trust_env=False) as client:
            while not self._stop.is_set():
                prompt = [chance.randrange(10, self._vocab) for _ in range(64)]
                body = {
                    "prompt": {"prompt_token_ids": prompt}, "n": self._group, "max_tokens": self._max_tokens,
                    "temperature": 1.0, "logprobs": 0, "ignore_eos": True,
                }  # fmt: skip
                answer = client.post("/generate", json=body)
                if answer.status_code == httpx.codes.OK:
                    self.answers.append(answer.json())
                else:
                    self.failed.append(answer.text[:200])


def tokens_of(answers: list[dict[str, Any]]) -> int:
    return sum(len(ids) for answer in answers for ids in answer["token_ids"])


def as_group(answer: dict[str, Any]) -> ScoredGroup:
    prompt = answer["prompt_token_ids"]
    chosen = [
        [position[0][str(token)] for token, position in zip(ids, positions, strict=True)]
        for ids, positions in zip(answer["token_ids"], answer["logprobs"], strict=True)
    ]
    ids = answer["token_ids"]
    return ScoredGroup(
        tokens=[prompt + c for c in ids],
        masks=[[IGNORED] * len(prompt) + c for c in ids],
        scores=[float(i % 2) for i in range(len(ids))],
        inference_logprobs=[[NO_LOGPROB] * len(prompt) + c for c in chosen],
        policy_version=answer["policy_version"],
    )


@torch.no_grad()
def parity(policy: Any, answers: list[dict[str, Any]], config: TrainConfig) -> tuple[float, float]:
    """Mean and largest |trainer - engine| over sampled tokens that all came from one version."""
    batch = pack([as_group(a) for a in answers], config, token_cost=policy.token_cost)
    gaps = [(policy.score(micro)[0].cpu() - micro.loss_tokens.rollout_logprobs_L).abs() for micro in batch.micros]
    everything = torch.cat(gaps)
    return float(everything.mean()), float(everything.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=("1.7b",))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10.0, help="of generation that is timed")
    parser.add_argument("--alone", action="store_true", help="no sharing, no trainer: throughput only")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--lr", default="1e-6")
    known = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="treadle-bridge-"))
    model = known.model
    if known.shape:
        model = write_shape(work / "model", known.model)
    if model is None:
        from treadle.engines.models import resolve_model

        model = resolve_model("smollm2-135m-instruct")
    words = ["--engine", known.engine, "--model", str(model), "--dtype", known.dtype, "--max-num-seqs", "256"]
    words += ["--enforce-eager"] if known.eager else []
    if not known.alone:
        words += ["--weights-file", str((SHARED_MEMORY if SHARED_MEMORY.is_dir() else work) / f"{work.name}.weights")]
    started = time.monotonic()
    with running_engine(words, work / "engine.log") as url:
        result: dict[str, Any] = {"start_s": time.monotonic() - started}
        vocab = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        shape = {"num_clients": known.clients, "max_tokens": known.max_tokens, "group": known.group}
        warm = Load(url, vocab, **shape)
        time.sleep(2)
        warm.stop()
        load = Load(url, vocab, **shape)
        time.sleep(known.seconds)
        seconds = load.stop()
        result["tokens_per_s"] = tokens_of(load.answers) / seconds
        if not known.alone:
            result |= publish_under_load(url, load.answers, known, shape, vocab, work)
        print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in result.items()}), flush=True)


def publish_under_load(
    url: str, answers: list[dict[str, Any]], known: Any, shape: dict[str, int], vocab: int, work: Path
) -> dict[str, Any]:
    config = TrainConfig(
        engine_url=url, save_path=work / "save", lr=float(known.lr), warmup_steps=0, seq_len=4096, single_copy=True,
    )  # fmt: skip
    sync = SingleCopySync(config)
    attached = sync.attach()
    has_gpu = torch.cuda.is_available()
    config = config.on_device(gpu=has_gpu)
    before = torch.cuda.memory_allocated() if has_gpu else 0
    policy = build_policy(attached, config)
    weights_added = (torch.cuda.memory_allocated() - before) if has_gpu else 0
    optimizer = build_optimizer(policy, config)
    few = answers[-4:]
    mean_before, max_before = parity(policy, few, config)
    sync.publish(policy, version=0)
    load = Load(url, vocab, **shape)
    waits, writes, verifies, moved = [], [], [], 0
    for step in range(1, known.steps + 1):
        recent = (load.answers or answers)[-4:]
        accumulate_gradients(policy, pack([as_group(a) for a in recent], config, token_cost=policy.token_cost), config)
        moved += not optimizer.step(step).skipped
        receipt = sync.publish(policy, version=step)
        waits.append(receipt.wait_s)
        writes.append(receipt.write_s)
        verifies.append(receipt.verified.seconds)
    load.stop()
    fresh = Load(url, vocab, **shape)
    time.sleep(1)
    fresh.stop()
    after = [a for a in fresh.answers if a["policy_version"] == known.steps][-4:]
    mean_after, max_after = parity(policy, after, config)
    mixed = sum(len(v) > 1 for a in load.answers for v in a["policy_versions"])
    return {
        "weights_added_bytes": weights_added, "steps_moved": moved,
        "pause_ms": statistics.median(waits) * 1e3, "write_ms": statistics.median(writes) * 1e3,
        "verify_ms": statistics.median(verifies) * 1e3,
        "parity_before": [mean_before, max_before], "parity_after": [mean_after, max_after],
        "failed_requests": len(load.failed) + len(fresh.failed), "completions_over_several_versions": mixed,
    }  # fmt: skip


if __name__ == "__main__":
    main()
