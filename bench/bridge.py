"""Measure the cost of publishing weights to a real engine, and the logprob difference of both sides before and after.

    python bench/bridge.py --engine vllm                     SmolLM2 (or --model FOLDER), one copy of the weights
    python bench/bridge.py --engine vllm --shape 1.7b        the shape of Qwen3-1.7B, random weights
    python bench/bridge.py --engine vllm --compare stock eager      alternating with vLLM's own server, and eager mode
    python bench/bridge.py --engine vllm --mode lora_only --steps 50      adapters; or another mode

The engine process is started as by `treadle engine`. This process is the trainer: it takes real optimizer steps on
sampled completions, and publishes while requests are in flight (bridge_load.py). It prints one line of JSON at the end:
the pause of the engine, the part of it that is the optimizer's write, bytes of weights that the trainer
allocated, generated tokens per second, mean and largest difference of logprobs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from treadle.config import TrainConfig
from treadle.launch.machine import SHARED_MEMORY
from treadle.sync.modes import choose_sync
from treadle.sync.protocol import PublishResult
from treadle.train.loop import accumulate_gradients
from treadle.train.optimizers import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import build_policy
from treadle.wire.groups import IGNORED, NO_LOGPROB, ScoredGroup

START_S = 500.0
NUM_PROMPTS = 64
TEXT = "Tom has {} apples and buys {} more, then gives half of them to his {} friends. How many does he keep? Explain."
LOAD = Path(__file__).with_name("bridge_load.py")
MODES: dict[str, dict[str, Any]] = {
    "one_copy": {"single_copy": True},
    "two_copies": {"use_shared_memory": True},
    "lora_only": {"weight_bridge_mode": "lora_only", "lora_r": 16},
    "reload": {"weight_bridge_mode": "reload"},
    "delta": {"weight_bridge_mode": "delta"},
    "none": {"weight_bridge_mode": "none", "vllm_restart_interval": 1},
    "lora_restart": {"weight_bridge_mode": "lora_restart", "vllm_restart_interval": 1, "lora_r": 16},
}
ADAPTERS = ("lora_only", "lora_restart")


def write_shape(folder: Path, tokenizer_of: Path) -> Path:
    """Write a model of Qwen3-1.7B's shape with random weights and another model's tokenizer; only ids are used."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=4096, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer_of / name).is_file():
            shutil.copy(tokenizer_of / name, folder / name)
    return folder


def write_prompts(file: Path, model: Path, *, is_random: bool) -> Path:
    """Questions in the model's chat format, or random token ids for a model with random weights."""
    chance = random.Random(0)
    if is_random:
        prompts = [[chance.randrange(10, 49_000) for _ in range(64)] for _ in range(NUM_PROMPTS)]
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        prompts = []
        for _ in range(NUM_PROMPTS):
            text = TEXT.format(*(chance.randrange(2, 90) for _ in range(3)))
            turns = [{"role": "user", "content": text}]
            prompts.append(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
    file.write_text(json.dumps(prompts))
    return file


@dataclass(frozen=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def starting(argv: list[str], log: Path) -> Iterator[Server]:
    """Start the server; use `wait_until_healthy` to wait until it serves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", *argv, "--port", str(port)], stdout=out, stderr=out)
    try:
        yield Server(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.terminate()
        process.wait(60)


def wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health", timeout=5, trust_env=False).status_code == httpx.codes.OK:
                return
        if server.process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"a server did not start:\n{server.log.read_text()[-3000:]}")
        time.sleep(0.3)


class Load:
    """Runs bridge_load.py in a separate process."""

    def __init__(self, url: str, prompts: Path, known: argparse.Namespace, *more: str) -> None:
        sizes = ["--clients", known.clients, "--group", known.group, "--max-tokens", known.max_tokens]
        argv = [sys.executable, LOAD, "--url", url, "--prompts", prompts, *sizes, *more]
        self._process = subprocess.Popen(
            [str(word) for word in argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def newest(self, count: int) -> list[dict[str, Any]]:
        """The newest answers; waits for the first ones."""
        while len(answers := self.ask(f"answers {count}")) < count:
            time.sleep(0.2)
        return answers  # type: ignore[no-any-return]

    def result(self) -> dict[str, Any]:
        """The result of a fixed number of requests, when they are done."""
        output, _ = self._process.communicate()
        return json.loads(output)  # type: ignore[no-any-return]

    def stop(self) -> dict[str, Any]:
        counted: dict[str, Any] = self.ask("count")
        self._process.communicate()
        return counted


def throughput(url: str, prompts: Path, known: argparse.Namespace, *more: str) -> float:
    found = Load(url, prompts, known, "--requests", str(known.requests), *more).result()
    assert not found["failed"], found["failed"][:3]
    return float(found["tokens_per_s"])


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


def summary_ms(values: list[float]) -> list[float]:
    """Median, 90th percentile and maximum in milliseconds."""
    ordered = sorted(values)
    return [round(value * 1e3, 2) for value in (statistics.median(values), ordered[len(values) * 9 // 10], ordered[-1])]


def median_share(receipts: list[PublishResult], took: list[float]) -> float:
    """Median share of a step that verifying its publish took."""
    return round(statistics.median(r.verified.seconds / s for r, s in zip(receipts, took, strict=True)), 4)


def timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def calling(*args: Any) -> Any:
        began = time.monotonic()
        try:
            return call(*args)
        finally:
            seconds.append(time.monotonic() - began)

    return calling


def loads_ms(log: Path) -> dict[str, list[float]]:
    """Times of loading adapters, from the engine's log: from request to answer, and vLLM's part of it."""
    found = re.findall(r"adapter_loaded .*?seconds=([0-9.e-]+) vllm_s=([0-9.e-]+)", log.read_text())[1:]
    if not found:
        return {}
    whole, vllms = zip(*found, strict=True)
    return {"load_ms": summary_ms(list(map(float, whole))), "vllm_ms": summary_ms(list(map(float, vllms)))}


def publish_under_load(url: str, prompts: Path, known: argparse.Namespace, work: Path) -> dict[str, Any]:
    has_gpu = torch.cuda.is_available()
    config = TrainConfig(
        engine_url=url, save_path=work / "save", live_path=work / "live", lr=float(known.lr), warmup_steps=0,
        seq_len=4096, steps=int(known.steps), broadcast_by=known.broadcast_by, **MODES[known.mode],
    ).on_device(gpu=has_gpu)  # fmt: skip
    sync = choose_sync(config)
    attached = sync.attach()
    if has_gpu:
        torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")  # let cuBLAS allocate its workspace
    before = torch.cuda.memory_allocated() if has_gpu else 0
    policy = build_policy(attached, config)
    weights_added = (torch.cuda.memory_allocated() - before) if has_gpu else 0
    optimizer = build_optimizer(policy, config)
    saved: list[float] = []
    if known.mode in ADAPTERS:
        policy.save_adapter = timed(policy.save_adapter, saved)  # type: ignore[method-assign]
    sync.publish(policy, version=0)
    load = Load(url, prompts, known)
    first = parity(policy, load.newest(4), config)
    receipts, took, published, moved = [], [], [], 0
    for step in range(1, known.steps + 1):
        began = time.monotonic()
        batch = pack([as_group(a) for a in load.newest(4)], config, token_cost=policy.token_cost)
        accumulate_gradients(policy, batch, config)
        moved += not optimizer.step(step).skipped
        ready = time.monotonic()
        receipts.append(sync.publish(policy, version=step))
        published.append(time.monotonic() - ready)
        took.append(time.monotonic() - began)
        time.sleep(max(0.0, known.pace - took[-1]))
    under_load = load.stop()
    fresh = Load(url, prompts, known)
    last = parity(policy, fresh.newest(4), config)  # all of them were requested after the last publish
    failed = under_load["failed"] + fresh.stop()["failed"]

    return {
        "weights_added_bytes": weights_added, "steps_moved": moved, "step_ms": summary_ms(took),
        "publish_ms": summary_ms(published),
        "pause_ms": summary_ms([r.wait_s for r in receipts]), "write_ms": summary_ms([r.write_s for r in receipts]),
        "hold_ms": summary_ms([r.hold_s for r in receipts]),
        "hold_beyond_write_ms": summary_ms([r.hold_s - r.write_s for r in receipts]),
        "verify_ms": summary_ms([r.verified.seconds for r in receipts]), "verify_share": median_share(receipts, took),
        "sent_bytes": receipts[-1].num_bytes,
        "parity_before": first, "parity_after": last, **({"save_ms": summary_ms(saved[1:])} if saved else {}),
        "requests": under_load["requests"], "failed": failed[:3], "num_failed": len(failed),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=("1.7b",))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mode", choices=tuple(MODES), default="one_copy")
    parser.add_argument("--broadcast-by", choices=("auto", "memory", "nccl", "gloo"), default="auto")
    parser.add_argument("--compare", nargs="*", choices=("stock", "eager"), default=[])
    parser.add_argument("--turns", type=int, default=5, help="of each server, one after the other")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=128, help="that a turn counts")
    parser.add_argument("--lr", default="1e-6")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds from one step to the next, at least")
    parser.add_argument("--lock", type=Path, help="benches with one file measure in turn, from when all of them serve")
    parser.add_argument("--logs", type=Path, help="a folder for what the servers say; without it, it goes")
    known = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="treadle-bridge-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
    try:
        found = measure(known, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(found), flush=True)
    sys.exit(found["num_failed"] > 0)


def measure(known: argparse.Namespace, work: Path) -> dict[str, Any]:
    model = known.model
    if model is None:
        from treadle.engines.models import resolve_model

        model = resolve_model("smollm2-135m-instruct")
    if known.shape:
        model = write_shape(work / "model", model)
    prompts = write_prompts(work / "prompts.json", model, is_random=known.shape is not None)
    sizes = ["--max-num-seqs", "256", "--max-model-len", "2048", "--dtype", known.dtype]
    # Several servers start concurrently on one card: give each a fixed share, because free memory changes meanwhile.
    cache = ["--kv-cache-memory-bytes", "12G" if known.shape else "4G"] if torch.cuda.is_available() else []
    ours = ["treadle", "engine", "--engine", known.engine, "--model", str(model), *sizes]
    ours += ["--gpu-memory-utilization", "0.2", f"--vllm-args={' '.join(cache)}", "--adapter-root", str(work)]
    shared = ["--weights-file", str(work / "weights")] if known.mode in ("one_copy", "two_copies") else []
    adapters = ["--enable-lora", "--max-lora-rank", "16"] if known.mode in ADAPTERS else []
    servers = {"ours": [*ours, *shared, *adapters]}
    if "eager" in known.compare:
        servers["eager"] = [*ours, "--enforce-eager"]
    if "stock" in known.compare:
        servers["stock"] = [
            "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "policy",
            "--generation-config", "vllm", "--gpu-memory-utilization", "0.2", "--uvicorn-log-level", "warning",
            *sizes, *cache,
        ]  # fmt: skip
    result: dict[str, Any] = {"model": str(model), "mode": known.mode}
    with contextlib.ExitStack() as started:
        began = time.monotonic()
        logs = known.logs or work
        logs.mkdir(parents=True, exist_ok=True)
        turn = started.enter_context(known.lock.open("a")) if known.lock else None
        if turn:
            fcntl.flock(turn, fcntl.LOCK_SH)
        running = {name: started.enter_context(starting(argv, logs / f"{name}.log")) for name, argv in servers.items()}
        for name, server in running.items():
            wait_until_healthy(server)
            result[f"{name}_start_s"] = round(time.monotonic() - began, 1)
        urls = {name: server.url for name, server in running.items()}
        routes = {name: ("--route", "/v1/completions") if name == "stock" else () for name in urls}
        if turn:  # the other servers, which started concurrently with this one, also serve by now
            fcntl.flock(turn, fcntl.LOCK_EX)
        for name, url in urls.items():  # the first requests of a server are slow
            throughput(url, prompts, known, *routes[name], "--requests", "16")
        result |= publish_under_load(urls["ours"], prompts, known, work)
        if known.mode in ADAPTERS:
            result |= loads_ms(running["ours"].log)
        print(json.dumps(result), file=sys.stderr, flush=True)
        speeds: dict[str, list[float]] = {name: [] for name in urls}
        for _ in range(known.turns):
            for name, url in urls.items():
                speeds[name].append(round(throughput(url, prompts, known, *routes[name])))
            print(json.dumps(speeds), file=sys.stderr, flush=True)
        result |= {f"{name}_tokens_per_s": found for name, found in speeds.items()}
    return result


if __name__ == "__main__":
    main()
