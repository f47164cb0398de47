"""Sample and score the rollouts of an item: one completion each, or a coroutine of several turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.config.env import EnvConfig
from treadle.envs.base import Environment, Item, Score
from treadle.envs.chat import Model, RolloutSampling, Transcript
from treadle.envs.engine_client import Completion, EngineResult, InferenceClient
from treadle.envs.scoring import Judge, as_score, failed
from treadle.envs.tokens import ChatTokenizer
from treadle.errors import ConfigError, EngineError, RequestError, UserError


@dataclass(frozen=True)
class Rollout:
    """One attempt of the policy at an item, and its score."""

    transcripts: list[Transcript]  # all of them are trained on
    score: Score
    seconds: float  # time of the engine; rollouts of a group are generated concurrently
    text: str = ""  # the last completion

    @property
    def num_sampled(self) -> int:
        return sum(transcript.num_sampled for transcript in self.transcripts)

    @property
    def is_truncated(self) -> bool:
        return any(transcript.finish_reason == "length" for transcript in self.transcripts)


@dataclass(frozen=True)
class EnvContext:
    """Everything that an environment process needs for sampling and scoring; created once at its start."""

    environment: Environment
    engine: InferenceClient
    tokenizer: ChatTokenizer
    judge: Judge

    @property
    def config(self) -> EnvConfig:
        return self.environment.config

    @property
    def name(self) -> str:
        """The name of this environment at the hub; a restarted process resumes by it."""
        return self.config.wandb_name or self.config.own_name


async def roll_group(context: EnvContext, item: Item, sampling: RolloutSampling, *, num_rollouts: int) -> list[Rollout]:
    """Sample and score `num_rollouts` rollouts of one item."""
    if context.environment.has_turns:
        return await _roll_turns(context, item, sampling, num_rollouts)
    prompt = context.tokenizer.encode_chat(item.messages)
    check_lengths([prompt], sampling.max_tokens, sampling.longest_sequence)
    generation = await context.engine.generate(
        prompt,
        n=num_rollouts,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
    )
    return await score_generation(context, item, prompt, generation)


async def score_generation(
    context: EnvContext, item: Item, prompt: Sequence[int], generation: EngineResult
) -> list[Rollout]:
    """One rollout per completion: every sampled token is trained on, the prompt is not."""
    scores = await context.judge.scores(item, generation.completions)
    return [
        Rollout([_single_turn(item, prompt, completion)], score, generation.seconds, completion.text)
        for completion, score in zip(generation.completions, scores, strict=True)
    ]


def _single_turn(item: Item, prompt: Sequence[int], completion: Completion) -> Transcript:
    transcript = Transcript(messages=[*item.messages, {"role": "assistant", "content": completion.text}])
    transcript.read(prompt)
    transcript.wrote(completion)
    return transcript


async def _roll_turns(context: EnvContext, item: Item, sampling: RolloutSampling, num_rollouts: int) -> list[Rollout]:
    """Run the rollouts concurrently. If one fails because the engine is gone, the others are cancelled."""
    tasks = [
        asyncio.ensure_future(roll_one(context, item, replace(sampling, seed=_seed_of(sampling.seed, number))))
        for number in range(num_rollouts)
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def roll_one(context: EnvContext, item: Item, sampling: RolloutSampling) -> Rollout:
    model = Model(context.engine, context.tokenizer, sampling)
    try:
        given = await context.environment.rollout(item, model)
        score = (
            await _judge_last_reply(context, item, model) if given is None else as_score(given, context.config.right)
        )
    except RequestError as error:  # an invalid request: an error of the user code, in this rollout
        score = _failed(context, item, error)
    except (EngineError, UserError):  # the engine or a setting: concerns all rollouts
        raise
    except asyncio.CancelledError as error:
        if _is_being_cancelled():
            raise
        score = _failed(context, item, error)  # the user code cancelled itself
    except (Exception, SystemExit) as error:  # user code
        score = _failed(context, item, error)
    last = model.last_completion
    return Rollout(model.transcripts, score, model.seconds, "" if last is None else last.text)


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failed(context: EnvContext, item: Item, error: BaseException) -> Score:
    context.judge.failures.note("rollout_failed", f"{type(error).__name__}: {error}", item, "", with_trace=True)
    return failed(error)


async def _judge_last_reply(context: EnvContext, item: Item, model: Model) -> Score:
    if model.last_completion is None:
        raise ValueError("the rollout asked the model nothing, and gave no score")
    (score,) = await context.judge.scores(item, [model.last_completion])
    return score


def _seed_of(seed: int | None, number: int) -> int | None:
    """Far enough from the next rollout's seed that the seeds of their turns, which increase by 1, do not overlap."""
    return None if seed is None else (seed + number * 2**20) % 2**63


def check_lengths(prompts: Sequence[Sequence[int]], max_tokens: int, longest_sequence: int) -> None:
    """Refuse sequences that are too long for the trainer before they are sampled; 0 or less is no limit."""
    longest_prompt = max(map(len, prompts))
    if 0 < longest_sequence < longest_prompt + max_tokens:
        raise ConfigError(
            f"a prompt of {longest_prompt} tokens and a completion of up to {max_tokens} do not fit into the "
            f"trainer's sequences of {longest_sequence} tokens",
            fix="lower --env.max-token-length or raise --train.seq-len",
        )
