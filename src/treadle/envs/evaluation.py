"""Greedy answers to the held-out prompts: how good is the policy now?"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import msgspec

from treadle.envs.base import score_safely
from treadle.envs.rollout import Desk
from treadle.envs.stats import wilson_interval

# Requests of one evaluation wave. Fixed, so that the same policy makes the same batches and the same answers.
_WAVE_SIZE = 64


class EvalSample(msgspec.Struct, kw_only=True):
    prompt: str
    completion: str
    gold: str
    is_right: bool


class EvalResult(msgspec.Struct, kw_only=True):
    env: str
    task: str
    step: int  # optimizer steps that the trainer had taken
    policy_version: int  # the version that answered; the oldest one, should it have changed on the way
    num_prompts: int
    num_right: int
    accuracy: float
    interval_95: tuple[float, float]
    mean_completion_tokens: float
    seconds: float
    samples: list[EvalSample]


async def evaluate_policy(desk: Desk, step: int, *, wave_prefix: str) -> EvalResult:
    """Ask every held-out prompt once, at temperature 0, in waves named `{wave_prefix}-0` and so on."""
    started = time.monotonic()
    items = list(desk.environment.eval_items())[: desk.config.num_eval]
    samples: list[EvalSample] = []
    num_tokens = 0
    versions: set[int] = set()
    for number in itertools.count():
        part = items[number * _WAVE_SIZE : (number + 1) * _WAVE_SIZE]
        if not part:
            break
        generations = await desk.engine.generate_wave(
            f"{wave_prefix}-{number}",
            [desk.tokenizer.encode_chat(item.messages) for item in part],
            n=1,
            max_tokens=desk.config.max_token_length,
            temperature=0.0,
        )
        for item, generation in zip(part, generations, strict=True):
            completion = generation.completions[0]
            is_right = score_safely(desk.environment, item, completion).is_right
            samples.append(
                EvalSample(prompt=item.prompt, completion=completion.text, gold=item.answer, is_right=is_right)
            )
            num_tokens += len(completion.token_ids)
            versions.add(completion.policy_version)
    num_right = sum(sample.is_right for sample in samples)
    num_prompts = len(samples)
    return EvalResult(
        env=desk.config.name,
        task=desk.config.task,
        step=step,
        policy_version=min(versions, default=step),
        num_prompts=num_prompts,
        num_right=num_right,
        accuracy=num_right / max(num_prompts, 1),
        interval_95=wilson_interval(num_right, num_prompts),
        mean_completion_tokens=num_tokens / max(num_prompts, 1),
        seconds=time.monotonic() - started,
        samples=samples,
    )


def result_path(folder: Path, step: int) -> Path:
    return folder / f"eval_step_{step:06d}.json"


def save_result(result: EvalResult, folder: Path) -> Path:
    """Write the file whole or not at all: it appears under its name when it is complete and on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    path = result_path(folder, result.step)
    unfinished = path.with_suffix(f".tmp{os.getpid()}")
    with unfinished.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    return path


def in_words(result: EvalResult, num_samples: int = 3) -> str:
    """The result as a person reads it, with the first few answers."""
    low, high = result.interval_95
    lines = [
        f"{result.env}/{result.task} at policy version {result.policy_version}: {result.num_right} of "
        f"{result.num_prompts} right = {result.accuracy:.1%} (95 % interval {low:.1%} to {high:.1%}), "
        f"{result.mean_completion_tokens:.1f} tokens per answer, {result.seconds:.1f} s"
    ]
    for sample in result.samples[:num_samples]:
        verdict = "right" if sample.is_right else f"wrong, it is {sample.gold}"
        lines.append(f"  {sample.prompt!r} -> {sample.completion!r} ({verdict})")
    return "\n".join(lines)
