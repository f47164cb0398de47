"""Measure the host memory of trainer ranks on a CPU, and compare it with the plan's tensors of a rank.

    python bench/ranks.py MODEL_FOLDER --ranks 1 2 4      SmolLM2-135M: the figures of docs/plan.md

Each rank reads its weights, builds the trainer (with its self-test, which computes), takes two steps of AdamW in fp32,
gathers the weights as a publish does, and saves a checkpoint, over Gloo. For each of these phases
the peak of the anonymous memory (RssAnon: without files that are mapped, which the system can drop) is sampled every
5 ms, less what the process had before it loaded the model. malloc returns freed memory at once, so "steps" is
comparable with the plan, which counts tensors.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treadle.budget.estimate import estimate
from treadle.budget.hardware import Machine
from treadle.budget.job import PlannedJob
from treadle.budget.shapes import read_shape
from treadle.config import TrainConfig
from treadle.wire.groups import IGNORED, ScoredGroup

PROMPT, COMPLETION, GROUP_SIZE, NUM_GROUPS = 64, 192, 4, 2
MICRO_TOKENS = 1024
VOCABULARY = 40_000  # at most that of the model
SAMPLE_S = 0.005
# malloc keeps freed memory in its heap; with these, the memory of a tensor goes back to the system when it is freed.
RETURNED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}


def anonymous_bytes() -> int:
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


class Peaks:
    """The peak of the anonymous memory in each phase, over what there was at the start."""

    def __init__(self) -> None:
        self.by_phase: dict[str, int] = {}
        self._base = anonymous_bytes()
        self._phase = ""
        threading.Thread(target=self._sample, daemon=True).start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase = name
        yield
        self._look()
        self._phase = ""

    def _look(self) -> None:
        name = self._phase
        if name:
            self.by_phase[name] = max(self.by_phase.get(name, 0), anonymous_bytes() - self._base)

    def _sample(self) -> None:
        while True:
            self._look()
            threading.Event().wait(SAMPLE_S)


def make_groups() -> list[ScoredGroup]:
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(count)]

    groups = []
    for _ in range(NUM_GROUPS):
        prompt, completions = tokens(PROMPT), [tokens(COMPLETION) for _ in range(GROUP_SIZE)]
        groups.append(
            ScoredGroup(
                tokens=[prompt + completion for completion in completions],
                masks=[[IGNORED] * PROMPT + completion for completion in completions],
                scores=[float(place) for place in range(GROUP_SIZE)],
            )
        )
    return groups


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_rank(model: Path, out: Path, settings: dict[str, Any]) -> None:
    """One rank; its place is in the variables of torchrun."""
    import torch

    from treadle.train.checkpoint import Checkpoints, Totals
    from treadle.train.loop import accumulate_gradients
    from treadle.train.model_loading import build_model, read_own_rows
    from treadle.train.optimizers import build_optimizer
    from treadle.train.pack import pack
    from treadle.train.policy import load_policy
    from treadle.train.ranks import join_ranks
    from treadle.train.sharding import shard_model

    torch.set_num_threads(1)
    config = TrainConfig(
        device="cpu", dtype="float32", micro_tokens=MICRO_TOKENS, share_prompts="off", warmup_steps=0, **settings
    )
    ranks = join_ranks(config)
    ranks.barrier("warming up")
    peaks = Peaks()
    with peaks.phase("weights"):
        weights, has_placeholders = build_model(model, torch.float32, ranks)
        shard_model(weights, config, ranks, torch.device("cpu"))
        if has_placeholders:
            read_own_rows(dict(weights.named_parameters()), model)
    del weights
    gc.collect()
    with peaks.phase("self-test"):
        policy = load_policy(model, config, ranks=ranks)
    with peaks.phase("steps"):
        optimizer = build_optimizer(policy, config)
        batch = pack(make_groups(), config, token_cost=policy.token_cost)
        for step in (1, 2):
            accumulate_gradients(policy, batch, config)
            optimizer.step(step)
            policy.write_live_weights()
    with peaks.phase("publishing"):
        for _ in policy.served_weights():
            pass
    with peaks.phase("checkpoint"):
        Checkpoints(out / "checkpoints", model, 1, ranks).save(2, policy, optimizer, Totals())
    (out / f"{ranks.rank}.json").write_text(json.dumps(peaks.by_phase))
    ranks.close()


def planned_bytes(model: Path, num_ranks: int, settings: dict[str, Any]) -> int:
    """The peak of a rank's tensors."""
    job = PlannedJob(
        read_shape(model / "config.json"), mode="none", train_gpus=num_ranks, engine_gpus=1, weight_bytes=4,
        micro_tokens=MICRO_TOKENS, prompt_tokens=PROMPT, completion_tokens=COMPLETION, group_size=GROUP_SIZE,
        shares_prompts=False, logprob_chunk=2048, is_compiled=False, is_lean=True, has_block_attention=True,
        shard=settings.get("shard", "fsdp2"),
    )  # fmt: skip
    return estimate(job, Machine("none", 2**40, 2**40)).pools[0].trainer_tensors


def measure(model: Path, num_ranks: int, settings: dict[str, Any]) -> list[dict[str, int]]:
    """The peaks of each rank, by phase."""
    with tempfile.TemporaryDirectory() as folder:
        place = {"WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(model), "--out", folder, "--settings", json.dumps(settings)],
                env=os.environ
                | RETURNED_AT_ONCE
                | {key: str(value) for key, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()},
            )
            for rank in range(num_ranks)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--settings", type=json.loads, default={}, help="of the trainer, as JSON")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # given to a rank
    given = parser.parse_args()
    if given.out:
        run_rank(given.model, given.out, given.settings)
        return
    for num_ranks in given.ranks:
        peaks = measure(given.model, num_ranks, given.settings)
        planned = planned_bytes(given.model, num_ranks, given.settings)
        print(f"{num_ranks} ranks: the plan counts {planned / 1e9:.2f} GB of tensors in a rank's step", flush=True)
        for rank, by_phase in enumerate(peaks):
            shown = "  ".join(f"{name} {size / 1e9:.2f} GB" for name, size in by_phase.items())
            print(f"    rank {rank}  {shown}", flush=True)


if __name__ == "__main__":
    main()
