"""Evaluate the policy on the held-out prompts.

One answer per prompt gives the accuracy; several give pass@k, the probability that one of k answers is right. Answers
that could not be scored are in none of these figures: they are counted by outcome.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from treadle.config.env import EnvConfig
from treadle.envs.base import Item, Score, stable_seed
from treadle.envs.chat import RolloutSampling
from treadle.envs.eval_statistics import mean_interval, pass_at_k, pass_interval, worthwhile_ks
from treadle.envs.rollout import (
    ROLLOUTS_AT_ONCE,
    EnvContext,
    ReportProgress,
    Rollout,
    groups_at_once,
    in_order,
    roll_group,
    score_generation,
)
from treadle.envs.scoring import none_scored
from treadle.errors import ConfigError
from treadle.formatting import with_interval
from treadle.wire.generate import MIN_TEMPERATURE


class EvalSample(msgspec.Struct, kw_only=True):
    """One answer; answers to the same prompt are consecutive."""

    prompt: str
    question: str = ""  # the last message of the prompt
    completion: str
    ended: bool = True  # False: truncated at the length limit
    gold: str
    is_right: bool
    reward: float | None = None  # None: it could not be scored, and `error` says why
    outcome: str = "scored"
    error: str = ""
    source: str = ""  # the data source of the prompt, if there are several


class SourceResult(msgspec.Struct, kw_only=True):
    """The part of an evaluation that comes from one data source."""

    num_prompts: int  # with an answer that could be scored
    num_right: int
    accuracy: float
    interval_95: tuple[float, float]
    mean_score: float | None = None
    mean_score_interval_95: tuple[float, float] | None = None


class EvalResult(msgspec.Struct, kw_only=True):
    env: str
    task: str
    step: int  # optimizer steps of the trainer
    policy_version: int  # that was sampled; the oldest one, if it changed during the evaluation
    num_prompts: int  # with an answer that could be scored
    num_answers: int  # that could be scored
    num_right: int  # of the answers
    accuracy: float  # pass@1
    interval_95: tuple[float, float]  # of the accuracy
    mean_score: float | None = None  # over prompts, of the answers that could be scored
    mean_score_interval_95: tuple[float, float] | None = None  # None: a score only says right or wrong
    ended: float | None = None  # share of the answers that were not truncated
    pass_at_k: dict[str, float]  # {"1": 0.25, "2": 0.41, "4": 0.6}
    pass_at_k_interval_95: dict[str, tuple[float, float]]
    num_unscored: int  # answers that are in none of the figures above, because scoring failed
    unscored: dict[str, int]  # by outcome: {"timed_out": 2}
    generation_params: dict[str, Any]
    mean_completion_tokens: float
    seconds: float
    by_source: dict[str, SourceResult] = {}  # of several data sources
    samples: list[EvalSample]


def eval_temperature(config: EnvConfig) -> float:
    """The configured one; by default greedy for a single answer, and the training's for several."""
    if config.eval_temperature is None:
        chosen = 0.0 if config.eval_samples == 1 else config.temperature
    else:
        chosen = config.eval_temperature
    if chosen < MIN_TEMPERATURE and config.eval_samples > 1:
        raise ConfigError(
            f"at temperature {chosen:g} all {config.eval_samples} answers to a prompt are the same",
            fix="pass --env.eval-temperature 1, or --env.eval-samples 1",
        )
    return chosen


async def evaluate_policy(
    context: EnvContext,
    step: int,
    *,
    wave_prefix: str,
    longest_sequence: int = 0,
    rollouts_at_once: int = ROLLOUTS_AT_ONCE,
    report_progress: ReportProgress | None = None,
) -> EvalResult:
    """Sample every held-out prompt `eval_samples` times.

    Single turns are sampled in waves named `{wave_prefix}-0` and so on, so that the same policy gives bitwise the same
    answers; rollouts of several turns run concurrently.
    """
    started = time.monotonic()
    temperature = eval_temperature(context.config)
    items = list(context.environment.eval_items())[: context.config.num_eval]
    sampling = RolloutSampling(context.config.max_token_length, temperature, longest_sequence=longest_sequence)
    # Depends only on settings, so that the same policy gets the same batches and gives the same answers.
    prompts_at_once = groups_at_once(context.config.eval_samples, rollouts_at_once)
    report_progress = report_progress or (lambda num_done, note: None)
    if context.environment.has_turns:
        answers = await _ask_in_turns(context, items, sampling, prompts_at_once, report_progress)
    else:
        answers = await _ask_in_waves(context, items, sampling, wave_prefix, prompts_at_once, report_progress)
    scores = [rollout.score for rollouts in answers for rollout in rollouts]
    may_fail = context.environment.waits_for_agents  # they may connect late
    if scores and not may_fail and all(score.reward is None for score in scores):
        raise none_scored(len(scores), scores[0], context.config)
    return summarize(context.config, step, items, answers, seconds=time.monotonic() - started)


async def _ask_in_waves(
    context: EnvContext,
    items: Sequence[Item],
    sampling: RolloutSampling,
    wave_prefix: str,
    wave_size: int,
    report_progress: ReportProgress,
) -> list[list[Rollout]]:
    answers: list[list[Rollout]] = []
    for number, first in enumerate(range(0, len(items), wave_size)):
        part = items[first : first + wave_size]
        prompts = [context.tokenizer.encode_chat(item.messages) for item in part]
        generations = await context.engine.generate_wave(
            f"{wave_prefix}-{number}",
            prompts,
            n=context.config.eval_samples,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seeds=_seeds(context.config, sampling, range(first, first + len(part))),
        )
        arrived = await asyncio.gather(
            *(score_generation(context, *one) for one in zip(part, prompts, generations, strict=True))
        )
        context.judge.require_scores([rollout.score for rollouts in arrived for rollout in rollouts])
        answers += arrived
        report_progress(len(answers), _summary_so_far(answers))
    return answers


async def _ask_in_turns(
    context: EnvContext,
    items: Sequence[Item],
    sampling: RolloutSampling,
    prompts_at_once: int,
    report_progress: ReportProgress,
) -> list[list[Rollout]]:
    seeds = _seeds(context.config, sampling, range(len(items)))

    async def ask(place: int) -> list[Rollout]:
        own = replace(sampling, seed=None if seeds is None else seeds[place])
        return await roll_group(context, items[place], own, num_rollouts=context.config.eval_samples)

    answers: list[list[Rollout]] = []
    async with aclosing(in_order(ask, range(len(items)), at_once=prompts_at_once)) as arriving:
        async for rollouts in arriving:
            context.judge.require_scores([rollout.score for rollout in rollouts])
            answers.append(rollouts)
            report_progress(len(answers), _summary_so_far(answers))
    return answers


def _seeds(config: EnvConfig, sampling: RolloutSampling, places: Iterable[int]) -> list[int] | None:
    """A seed for each prompt, the same in every evaluation; None for greedy sampling."""
    if sampling.temperature < MIN_TEMPERATURE:
        return None
    return [stable_seed(config.seed, "eval", place) for place in places]


def summarize(
    config: EnvConfig, step: int, items: Sequence[Item], answers: Sequence[Sequence[Rollout]], *, seconds: float
) -> EvalResult:
    """Compute the result from the answers to each item. Pure."""
    everything = [rollout for rollouts in answers for rollout in rollouts]
    unscored: Counter[str] = Counter(rollout.score.outcome for rollout in everything if rollout.score.reward is None)
    versions = {v for rollout in everything for transcript in rollout.transcripts for v in transcript.policy_versions}
    scored = _scored(answers)
    most = max(map(len, scored), default=0)
    rates = {str(k): _pass_rate(scored, k) for k in worthwhile_ks(config.eval_samples) if k <= max(most, 1)}
    of_sources = {
        source: _scored([own for item, own in zip(items, answers, strict=True) if item.source == source])
        for source in dict.fromkeys(item.source for item in items if item.source)
    }
    return EvalResult(
        env=config.name,
        task=config.task_name,
        step=step,
        policy_version=min(versions, default=step),
        num_prompts=len(scored),
        num_answers=sum(map(len, scored)),
        num_right=_num_right(scored),
        accuracy=rates["1"][0],
        interval_95=rates["1"][1],
        mean_score=_mean_score(scored),
        mean_score_interval_95=_score_interval(scored),
        ended=fmean(not rollout.is_truncated for rollout in everything) if everything else None,
        pass_at_k={k: share for k, (share, _) in rates.items()},
        pass_at_k_interval_95={k: interval for k, (_, interval) in rates.items()},
        num_unscored=unscored.total(),
        unscored=dict(unscored),
        generation_params={
            "n": config.eval_samples,
            "temperature": eval_temperature(config),
            "max_tokens": config.max_token_length,
        },
        mean_completion_tokens=sum(rollout.num_sampled for rollout in everything) / max(len(everything), 1),
        seconds=seconds,
        by_source={source: _of_source(own) for source, own in of_sources.items() if own},
        samples=[
            _as_sample(item, rollout) for item, rollouts in zip(items, answers, strict=True) for rollout in rollouts
        ],
    )


ScoredPrompts = Sequence[Sequence[Score]]  # of each prompt, the answers that could be scored; never none


def _scored(answers: Sequence[Sequence[Rollout]]) -> ScoredPrompts:
    scores = [[rollout.score for rollout in rollouts if rollout.score.reward is not None] for rollouts in answers]
    return [own for own in scores if own]


def _pass_rate(scored: ScoredPrompts, k: int) -> tuple[float, tuple[float, float]]:
    """pass@k and its 95 % interval, over the prompts with at least k scored answers."""
    counted = [own for own in scored if len(own) >= k]
    if not counted:
        return 0.0, (0.0, 1.0)
    chances = [pass_at_k(sum(score.is_right for score in own), len(own), k) for own in counted]
    return fmean(chances), pass_interval(chances, fmean(map(len, counted)) / k)


def _num_right(scored: ScoredPrompts) -> int:
    return sum(score.is_right for own in scored for score in own)


def _mean_scores(scored: ScoredPrompts) -> list[float]:
    """Of the answers to each prompt."""
    return [fmean(score.reward for score in own if score.reward is not None) for own in scored]


def _mean_score(scored: ScoredPrompts) -> float | None:
    return fmean(_mean_scores(scored)) if scored else None


def _score_interval(scored: ScoredPrompts) -> tuple[float, float] | None:
    """95 % interval of the mean score over prompts. None where right and wrong answers have one score each: there the
    accuracy says as much, and its interval is right near 0 and 1 too."""
    kinds = {(score.is_right, score.reward) for own in scored for score in own}
    is_graded = len(kinds) > len({is_right for is_right, _ in kinds})
    return mean_interval(_mean_scores(scored)) if is_graded else None


def _of_source(scored: ScoredPrompts) -> SourceResult:
    accuracy, interval = _pass_rate(scored, 1)
    return SourceResult(
        num_prompts=len(scored),
        num_right=_num_right(scored),
        accuracy=accuracy,
        interval_95=interval,
        mean_score=_mean_score(scored),
        mean_score_interval_95=_score_interval(scored),
    )


def _as_sample(item: Item, rollout: Rollout) -> EvalSample:
    return EvalSample(
        prompt=item.prompt,
        question=str(item.messages[-1]["content"]) if item.messages else "",
        completion=rollout.text,
        ended=not rollout.is_truncated,
        gold=item.answer,
        is_right=rollout.score.is_right,
        reward=rollout.score.reward,
        outcome=rollout.score.outcome,
        error=rollout.score.error,
        source=item.source,
    )


def _summary_so_far(answers: Sequence[Sequence[Rollout]]) -> str:
    scored = _scored(answers)
    num_answers, mean_score = sum(map(len, scored)), _mean_score(scored)
    if mean_score is None:
        return "none scored so far"
    return f"{_num_right(scored) / num_answers:.1%} right, mean score {mean_score:.3f} so far"


def result_path(folder: Path, step: int) -> Path:
    return folder / f"eval_step_{step:06d}.json"


def save_result(result: EvalResult, folder: Path) -> Path:
    path = result_path(folder, result.step)
    _write_whole(path, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return path


def eval_metrics(result: EvalResult) -> dict[str, float]:
    """The metrics of an evaluation, with Atropos' names if it has them."""
    low, high = result.interval_95
    of_sources: dict[str, float] = {}
    for source, own in result.by_source.items():
        own_low, own_high = own.interval_95
        shown = {"percent_correct": own.accuracy, "percent_correct_low": own_low, "percent_correct_high": own_high}
        shown |= _score_metrics(own)
        of_sources |= {f"eval/source/{source}/{name}": value for name, value in shown.items()}
    return {
        "eval/percent_correct": result.accuracy,
        "eval/percent_correct_low": low,
        "eval/percent_correct_high": high,
        **{f"eval/pass@{k}": share for k, share in result.pass_at_k.items()},
        "eval/num_unscored": result.num_unscored,
        "eval/mean_completion_tokens": result.mean_completion_tokens,
        **{f"eval/{name}": value for name, value in _score_metrics(result).items()},
        **({} if result.ended is None else {"eval/ended": result.ended}),
        **of_sources,
    }


def _score_metrics(result: EvalResult | SourceResult) -> dict[str, float]:
    low, high = result.mean_score_interval_95 or (None, None)
    values = {"mean_score": result.mean_score, "mean_score_low": low, "mean_score_high": high}
    return {name: value for name, value in values.items() if value is not None}


def save_for_atropos(result: EvalResult, folder: Path, *, model_name: str) -> None:
    """Write the two files of Atropos' `evaluate`, for tools that read those."""
    shown = eval_metrics(result)
    params = {**result.generation_params, "max_new_tokens": result.generation_params["max_tokens"]}
    metrics = {
        "config_general": {
            "model_name": model_name,
            "total_evaluation_time_seconds": str(result.seconds),
            "generation_parameters": params,
        },
        "results": {f"atropos|{Path(result.env).stem}_eval|0": shown, "all": shown},
    }
    _write_whole(folder / "metrics.json", msgspec.json.format(msgspec.json.encode(metrics), indent=2) + b"\n")
    lines = b"".join(msgspec.json.encode(sample) + b"\n" for sample in result.samples)
    _write_whole(folder / "samples.jsonl", lines)


def _write_whole(path: Path, content: bytes) -> None:
    """Write atomically: the file appears under its name when it is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".tmp{os.getpid()}")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def format_result(result: EvalResult, num_samples: int = 3) -> str:
    """The result as text, with the first answers to a few prompts."""
    env = EnvConfig(name=result.env).own_name  # "my_env" for ./my_env.py
    title = env if result.task in ("", env) else f"{env}/{result.task}"  # "arithmetic/addition"; "gsm8k" has one task
    name = f"{title} at policy version {result.policy_version}"
    bounds = result.mean_score_interval_95 or (None, None)
    mean = "" if result.mean_score is None else f"mean score {with_interval(result.mean_score, *bounds)}, "
    effort = f"{mean}{result.mean_completion_tokens:.1f} tokens per answer, {result.seconds:.1f} s"
    if result.generation_params["n"] == 1:
        found = f"{result.num_right} of {result.num_prompts} right = {_share(result, '1')}"
        lines = [f"{name}: {found}, {effort}"]
    else:
        params = result.generation_params
        lines = [
            f"{name}: {result.num_prompts} prompts, {params['n']} answers each at temperature "
            f"{params['temperature']:g}, {effort}"
        ]
        lines += [f"  pass@{k:<3} {_share(result, k)}" for k in result.pass_at_k]
    for source, own in result.by_source.items():
        low, high = own.interval_95
        lines.append(
            f"  {source}: {own.num_right} right on {own.num_prompts} prompts = {own.accuracy:.1%} (95 % interval "
            f"{low:.1%} to {high:.1%})"
        )
    if result.num_unscored:
        reasons = ", ".join(f"{outcome}: {times}" for outcome, times in result.unscored.items())
        num_asked = result.num_answers + result.num_unscored
        lines.append(f"  not scored, and not in these figures: {result.num_unscored} of {num_asked} ({reasons})")
    shown = result.samples[:: result.generation_params["n"]][:num_samples]
    for sample in shown:
        verdict = "right" if sample.is_right else f"wrong, it is {sample.gold}"
        if sample.reward is None:
            verdict = f"not scored: {sample.error or sample.outcome}"
        lines.append(f"  {sample.question!r} -> {sample.completion!r} ({verdict})")
    return "\n".join(lines)


def _share(result: EvalResult, k: str) -> str:
    low, high = result.pass_at_k_interval_95[k]
    return f"{result.pass_at_k[k]:.1%} (95 % interval {low:.1%} to {high:.1%})"
