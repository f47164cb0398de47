"""Compare tokens per second of the transformers engine and plain batched `generate`, on the same prompts.

    python bench/generate.py                      32 prompts, 64 tokens each, on a CPU with 1 and with 2 threads
    python bench/generate.py --device cuda        on a GPU

Each variant runs in a separate process, three times, alternating with the other; the best of each is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

NUM_PROMPTS = 32
NUM_TOKENS = 64
ROUNDS = 3
TEXT = "the river bends where old stones keep count of every winter and boats go by without a sound"


def prompts() -> list[str]:
    """Texts of different lengths, as in a real batch."""
    words = TEXT.split()
    return [" ".join(words[(i + j) % len(words)] for j in range(8 + i)) for i in range(NUM_PROMPTS)]


def run_ours(model: str, device: str, dtype: str, threads: int) -> float:
    from treadle.config import EngineConfig
    from treadle.engines.interface import Request
    from treadle.engines.model_runner import ModelRunner
    from treadle.engines.models import resolve_model
    from treadle.engines.sampling import SamplingParams

    engine = ModelRunner(EngineConfig(device=device, dtype=dtype, threads=threads), resolve_model(model))
    requests = [
        Request(engine.tokenizer.encode(text), 1, NUM_TOKENS, SamplingParams(), seed=i, ignore_eos=True)
        for i, text in enumerate(prompts())
    ]

    def generate() -> int:
        sequences = [group[0] for group in engine.admit(requests)]
        while engine.num_running:
            engine.step()
        return sum(len(s.token_ids) for s in sequences)

    return _tokens_per_s(generate)


def run_plain(model: str, device: str, dtype: str, threads: int) -> float:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from treadle.engines.models import resolve_model

    torch.set_num_threads(threads)
    folder = resolve_model(model)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    batch = tokenizer(prompts(), return_tensors="pt", padding=True).to(device)

    def generate() -> int:
        with torch.inference_mode():
            whole = policy.generate(
                **batch, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=True, top_k=0, temperature=1.0
            )
        return whole[:, batch["input_ids"].shape[1] :].numel()

    return _tokens_per_s(generate)


def _tokens_per_s(generate) -> float:  # noqa: ANN001 - a function of this file
    generate()  # the first run allocates, and compiles GPU kernels
    started = time.monotonic()
    num_tokens = generate()
    assert num_tokens == NUM_PROMPTS * NUM_TOKENS
    return num_tokens / (time.monotonic() - started)


def measure(way: str, args: argparse.Namespace, threads: int) -> float:
    command = [sys.executable, __file__, "--way", way, "--threads", str(threads)]
    command += ["--model", args.model, "--device", args.device, "--dtype", args.dtype]
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | quiet)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=0, help="0: with 1 and with 2")
    parser.add_argument("--way", choices=("ours", "plain"), help="measure one way in this process")
    args = parser.parse_args()
    if args.way is not None:
        run = run_ours if args.way == "ours" else run_plain
        print(json.dumps(run(args.model, args.device, args.dtype, args.threads or 1)))
        return
    print(f"{NUM_PROMPTS} prompts, {NUM_TOKENS} tokens each, {args.model} in {args.dtype} on {args.device}")
    for threads in (args.threads,) if args.threads else (1, 2):
        rounds = [(measure("ours", args, threads), measure("plain", args, threads)) for _ in range(ROUNDS)]
        ours, plain = (max(found) for found in zip(*rounds, strict=True))
        print(f"threads {threads}: engine {ours:.0f} tokens/s, generate {plain:.0f} tokens/s, {ours / plain:.2f}x")


if __name__ == "__main__":
    main()
