"""From an item to the scored rollouts of its group: one completion each, or a coroutine of several turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.config.env import EnvConfig
from treadle.envs.base import Environment, Item, Score
from treadle.envs.chat import Model, Sampling, Transcript
from treadle.envs.engine_client import Completion, Engine, Generation
from treadle.envs.scoring import Judge, as_score, failed
from treadle.envs.tokens import ChatTokenizer
from treadle.errors import ConfigError, EngineError, RequestError, UserError


@dataclass(frozen=True)
class Rollout:
    """What the policy did for one item, and what that was worth."""

    transcripts: list[Transcript]  # every one of them is trained on
    score: Score
    seconds: float  # that the engine took for it; rollouts of a group are generated side by side
    text: str = ""  # the last thing that the policy said

    @property
    def num_sampled(self) -> int:
        return sum(transcript.num_sampled for transcript in self.transcripts)

    @property
    def is_truncated(self) -> bool:
        return any(transcript.finish_reason == "length" for transcript in self.transcripts)


@dataclass(frozen=True)
class EnvContext:
    """What an environment process works with; made once at its start."""

    environment: Environment
    engine: Engine
    tokenizer: ChatTokenizer
    judge: Judge

    @property
    def config(self) -> EnvConfig:
        return self.environment.config

    @property
    def name(self) -> str:
        """The name the hub knows this environment by; the cursor of a restarted one hangs on it."""
        return self.config.wandb_name or self.config.own_name


async def roll_group(context: EnvContext, item: Item, sampling: Sampling, *, num_rollouts: int) -> list[Rollout]:
    """Sample and score so many rollouts of one item."""
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
    context: EnvContext, item: Item, prompt: Sequence[int], generation: Generation
) -> list[Rollout]:
    """One completion is one rollout: the prompt is not trained, every sampled token is."""
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


async def _roll_turns(context: EnvContext, item: Item, sampling: Sampling, num_rollouts: int) -> list[Rollout]:
    """Side by side. When one fails because the engine is gone, the others are given up with it."""
    tasks = [
        asyncio.ensure_future(roll_one(context, item, replace(sampling, seed=_seed_of(sampling.seed, number))))
        for number in range(num_rollouts)
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def roll_one(context: EnvContext, item: Item, sampling: Sampling) -> Rollout:
    model = Model(context.engine, context.tokenizer, sampling)
    try:
        given = await context.environment.rollout(item, model)
        score = (
            await _judge_last_reply(context, item, model) if given is None else as_score(given, context.config.right)
        )
    except RequestError as error:  # asked in a way that cannot be: the code's mistake, in this rollout
        score = _failed(context, item, error)
    except (EngineError, UserError):  # the engine's fault, or a setting's: not this one rollout's
        raise
    except asyncio.CancelledError as error:
        if _is_being_cancelled():
            raise
        score = _failed(context, item, error)  # the user's code cancelled itself
    except (Exception, SystemExit) as error:  # the border to code that a user writes
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
    """Far enough from the next rollout's that the seeds of their turns, which count on, do not meet."""
    return None if seed is None else (seed + number * 2**20) % 2**63


def check_lengths(prompts: Sequence[Sequence[int]], max_tokens: int, longest_sequence: int) -> None:
    """A sequence that the trainer would not take is refused before it is paid for; 0 or less is no limit."""
    longest_prompt = max(map(len, prompts))
    if 0 < longest_sequence < longest_prompt + max_tokens:
        raise ConfigError(
            f"a prompt of {longest_prompt} tokens and a completion of up to {max_tokens} do not fit into the "
            f"trainer's sequences of {longest_sequence} tokens",
            fix="lower --env.max-token-length or raise --train.seq-len",
        )
