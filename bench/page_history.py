"""Generate a long run for the page: metrics, evaluations, logs, and a queue of trained and waiting groups.

python bench/page_history.py /tmp/long-run --steps 10000 --groups 100000
treadle hub --database /tmp/long-run/hub.sqlite --run-folder /tmp/long-run
"""

from __future__ import annotations

import argparse
import json
import math
import random
import struct
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models

from treadle.hub.batching import plan
from treadle.store import Batch, LeaseTerms, Limits, NewGroup, Post, SqliteStore, runs
from treadle.track.files import TOKENS_FOLDER, RolloutTokens, TokenFiles
from treadle.wire.groups import ATROPOS_KEYS, IGNORED, NO_LOGPROB, ScoredGroup, fingerprint, from_stored, pack_group
from treadle.wire.hub import RegisterEnv, RegisterTrainer

GROUP_SIZE = 4
ENVS = ("arithmetic", "gsm8k")
CHARACTERS = "0123456789 +-*/=?.,abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\n"
AT_ONCE = 50
NUM_TOKEN_STEPS = 20


def write_run(folder: Path, *, num_steps: int, num_groups: int, seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    write_config(folder, num_steps)
    write_metrics(folder, num_steps, seed)
    write_queue(folder / "hub.sqlite", num_steps=num_steps, num_groups=num_groups, seed=seed)


def write_model(folder: Path) -> None:
    """A tokenizer of single characters."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(CHARACTERS)}, "?"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_config(folder: Path, num_steps: int) -> None:
    config = {
        "model": "made-up",
        "steps": num_steps,
        "engine": {"model": str(folder / "model")},
        "env": {"name": "arithmetic", "task": "addition"},
        "train": {"engine_url": ""},
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_metrics(folder: Path, num_steps: int, seed: int = 0) -> None:
    dice = random.Random(seed)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            file.write(json.dumps(made_up_step(step, num_steps, dice)) + "\n")
    evals, logs = folder / "evals", folder / "logs"
    evals.mkdir(exist_ok=True)
    logs.mkdir(exist_ok=True)
    for step in range(0, num_steps + 1, max(1, num_steps // 10)):
        accuracy = 0.8 * step / num_steps
        evaluation = {"step": step, "accuracy": accuracy, "interval_95": [max(0, accuracy - 0.05), accuracy + 0.05]}
        (evals / f"step-{step:06d}.json").write_text(json.dumps(evaluation))
    for name in ("hub", "engine", "env", "trainer"):
        lines = (f"2026-01-02T03:04:05.678 INFO    {name} step step={step} seconds=1.2\n" for step in range(num_steps))
        (logs / f"{name}.log").write_text("".join(islice(lines, 2000)))


def made_up_step(step: int, num_steps: int, dice: random.Random) -> dict[str, float]:
    progress, noise = step / num_steps, lambda: dice.gauss(0, 1)
    wait, train, publish = 0.4 + 0.1 * abs(noise()), 1.1 + 0.05 * noise(), 0.15 + 0.02 * abs(noise())
    mean_length = 60 + 80 * progress + 4 * noise()
    figures = {
        "step": step,
        "policy_version": step,
        "time_s": 2.0 * step,
        "reward": 1 / (1 + math.exp(3 - 6 * progress)) + 0.06 * noise(),
        "rollout/accuracy": min(1, max(0, 1 / (1 + math.exp(3 - 6 * progress)) + 0.08 * noise())),
        "mean_kl": 0.02 + 0.02 * abs(noise()) + (0.7 if step % 997 == 0 else 0),
        "kl": 0.01 * abs(noise()),
        "mean_ratio": 1 + 0.05 * noise(),
        "clipped_fraction": abs(0.08 + 0.03 * noise()),
        "clip_ratio/low_mean": abs(0.03 + 0.01 * noise()),
        "clip_ratio/high_mean": abs(0.05 + 0.02 * noise()),
        "entropy": 1.2 * math.exp(-2 * progress) + 0.02 * abs(noise()),
        "grad_norm": math.exp(0.3 * noise()),
        "completions/mean_length": mean_length,
        "completions/min_length": mean_length * 0.4,
        "completions/max_length": mean_length * 1.9,
        "completions/clipped_ratio": abs(0.05 * noise()),
        "perf/trained_tok_s_wall_clock": 4000 + 300 * noise(),
        "perf/forwarded_tok_s_wall_clock": 5200 + 300 * noise(),
        "perf/mfu_wall_clock": 0.21 + 0.01 * noise(),
        "perf/mfu_fwd_bwd": 0.38 + 0.01 * noise(),
        "perf/rollout_wait_s": wait,
        "perf/fwd_bwd_s": train,
        "perf/optimizer_s": 0.08,
        "perf/weight_sync_s": publish,
        "perf/weight_sync_pause_s": publish * 0.2,
        "perf/weight_sync_transfer_s": publish * 0.5,
        "perf/weight_sync_verify_s": publish * 0.1,
        "perf/step_s": wait + train + publish + 0.08,
        "rollout/generation_s": 0.9 + 0.1 * abs(noise()),
        "rollout/score_s": 0.1 + 0.02 * abs(noise()),
        "sample/staleness_mean": 1 + 0.3 * abs(noise()),
        "sample/staleness_max": 2.0,
        "frac_reward_zero_std": abs(0.3 + 0.05 * noise()),
        "by_group/frac_all_good": 0.2 * progress,
        "by_group/frac_all_bad": 0.2 * (1 - progress),
        "sampling/sampling_logp_difference/mean": abs(0.01 + 0.003 * noise()),
        "sampling/sampling_logp_difference/max": abs(0.2 + 0.1 * noise()),
        "sync/bytes": 1.2e7,
    }
    return figures | {f"rollout/further_{number}": noise() for number in range(20)}


def write_queue(database: Path, *, num_steps: int, num_groups: int, seed: int = 0) -> None:
    """A tenth of the groups waits; the others are trained, the same number in each step."""
    dice = random.Random(seed)
    per_step = max(1, num_groups * 9 // 10 // num_steps)
    limits = Limits(groups=10**9)
    with SqliteStore.open(database) as store:
        store.register_trainer(_trainer(per_step * GROUP_SIZE, num_steps)).result()
        for name in ENVS:
            env = RegisterEnv(max_token_length=256, desired_name=name, weight=1.0, group_size=GROUP_SIZE)
            store.write(runs.register_env, env, resume=False, idle_s=lambda _: 0.0, gone_after_s=10.0).result()
        groups = (made_up_group(number, num_groups, num_steps, dice) for number in range(num_groups))
        for some in _portions(num_steps):
            new = list(islice(groups, per_step * len(some)))
            store.append(Post(new), limits).result()
            leases = [lease for step in some if (lease := store.lease(step, "bench", _TERMS).result()) is not None]
            for lease in leases:
                if lease.step > num_steps - NUM_TOKEN_STEPS:
                    write_tokens(database.parent, store.batch_of(lease), dice)
            for ack in [store.ack(lease.step, lease.token) for lease in leases]:
                ack.result()
        while new := list(islice(groups, 500)):
            store.append(Post(new), limits).result()


def write_tokens(folder: Path, batch: Batch, dice: random.Random) -> None:
    """Token files as written by a trainer, for half of the rollouts: those better or worse than their group."""
    groups = [from_stored(stored.content()) for stored in batch.groups]
    rollouts = [made_up_tokens(group, row, dice) for group in groups for row in range(group.size)]
    TokenFiles(folder / TOKENS_FOLDER).write(batch.step, 0, [one for one in rollouts if one is not None])


def made_up_tokens(group: ScoredGroup, row: int, dice: random.Random) -> RolloutTokens | None:
    advantage = group.scores[row] - sum(group.scores) / group.size
    if advantage == 0:
        return None
    trained = [place for place, mask in enumerate(group.masks[row]) if mask != IGNORED]
    return RolloutTokens(
        group=fingerprint(group),
        rollout=row,
        runs=[trained[0], len(trained)],
        differences=struct.pack(f"<{len(trained)}e", *(dice.gauss(0, 0.1) for _ in trained)),
        advantages=struct.pack("<e", 2 * advantage),
    )


def _portions(num_steps: int) -> Iterator[tuple[int, ...]]:
    for start in range(1, num_steps + 1, AT_ONCE):
        yield tuple(range(start, min(start + AT_ONCE, num_steps + 1)))


def _trainer(batch_size: int, num_steps: int) -> RegisterTrainer:
    return RegisterTrainer(
        wandb_group="g", wandb_project="p", batch_size=batch_size, max_token_len=4096, checkpoint_dir="c",
        save_checkpoint_interval=0, starting_step=0, num_steps=num_steps,
    )  # fmt: skip


_TERMS = LeaseTerms(lease_s=600.0, max_deliveries=5, plan=plan, is_alive=lambda _: True)


def made_up_group(number: int, num_groups: int, num_steps: int, dice: random.Random) -> NewGroup:
    """Every second group is JSON, as sent by Atropos' environments."""
    a, b = dice.randrange(1000), dice.randrange(1000)
    prompt = f"What is {a} + {b}? "
    scores = [float(dice.random() < number / num_groups) for _ in range(GROUP_SIZE)]
    answers = [f"The sum is {a + b if score else a + b + dice.randrange(1, 9)}." for score in scores]
    version = min(num_steps - 1, number * num_steps // max(1, num_groups))
    group = ScoredGroup(
        tokens=[_ids(prompt + answer) for answer in answers],
        masks=[[IGNORED] * len(prompt) + _ids(answer) for answer in answers],
        scores=scores,
        inference_logprobs=[
            [NO_LOGPROB] * len(prompt) + [-dice.expovariate(2.0) for _ in answer] for answer in answers
        ],
        messages=[
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}] for answer in answers
        ],
        overrides=[{"outcome": "scored", "parts": {"correct": score, "format": 1.0}} for score in scores],
        generation_params={"temperature": 1.0},
        env_id=number % len(ENVS),
        metrics={"accuracy": sum(scores) / GROUP_SIZE, "reward/correct": sum(scores) / GROUP_SIZE},
    )
    is_json = number % 2 == 0
    payload = msgspec.json.encode({key: getattr(group, key) for key in ATROPOS_KEYS}) if is_json else pack_group(group)
    return NewGroup(
        payload=payload,
        size=GROUP_SIZE,
        num_tokens=sum(map(len, group.tokens)),
        format="json" if is_json else "binary",
        env_id=group.env_id,
        policy_version=version,
        item=number,
        metrics=msgspec.json.encode(group.metrics),
    )


def _ids(text: str) -> list[int]:
    return [max(0, CHARACTERS.find(letter)) for letter in text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=100_000)
    values = parser.parse_args()
    began = time.monotonic()
    write_run(values.folder, num_steps=values.steps, num_groups=values.groups)
    size = sum(path.stat().st_size for path in values.folder.rglob("*") if path.is_file())
    print(f"{values.folder}: {size / 1e6:.0f} MB in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
