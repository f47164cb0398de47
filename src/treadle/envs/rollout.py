"""One wave: the prompts of one optimizer step -> scored groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.config.schema import EnvConfig
from treadle.envs.base import Environment, Item, Score, score_safely
from treadle.envs.engine_client import EngineClient, Generation
from treadle.envs.seeds import stable_seed
from treadle.envs.tokens import ChatTokenizer
from treadle.errors import ConfigError
from treadle.wire.groups import IGNORED, NO_LOGPROB, ScoredGroup


@dataclass(frozen=True)
class Desk:
    """What an environment process works with; made once at its start."""

    config: EnvConfig
    environment: Environment
    engine: EngineClient
    tokenizer: ChatTokenizer

    @property
    def name(self) -> str:
        """The name the hub knows this environment by; the cursor of a restarted one hangs on it."""
        return self.config.wandb_name or self.config.name


async def roll_wave(
    desk: Desk, wave: int, *, prompts_per_wave: int, env_id: int, longest_sequence: int
) -> list[ScoredGroup]:
    """Sample and score wave `wave` (1-based). The same seed always asks for the same wave."""
    config = desk.config
    first = (wave - 1) * prompts_per_wave
    indexes = range(first, first + prompts_per_wave)
    items = [desk.environment.train_item(index) for index in indexes]
    prompts = [desk.tokenizer.encode_chat(item.messages) for item in items]
    check_lengths(prompts, config.max_token_length, longest_sequence)
    generations = await desk.engine.generate_wave(
        f"{desk.name}-train-{wave}",
        prompts,
        n=config.group_size,
        max_tokens=config.max_token_length,
        temperature=config.temperature,
        seeds=[stable_seed(config.seed, "train", wave, i) for i in range(prompts_per_wave)],
    )
    groups = []
    for index, item, prompt, generation in zip(indexes, items, prompts, generations, strict=True):
        scores = [score_safely(desk.environment, item, completion) for completion in generation.completions]
        group = build_group(item, prompt, generation, scores, temperature=config.temperature)
        group.item, group.env_id = index, env_id
        groups.append(group)
    return groups


def build_group(
    item: Item, prompt: Sequence[int], generation: Generation, scores: Sequence[Score], *, temperature: float
) -> ScoredGroup:
    """Completions and scores -> the group that is sent: the prompt is not trained, every sampled token is."""
    completions = generation.completions
    num_prompt = len(prompt)
    is_truncated_G = [completion.finish_reason == "length" for completion in completions]
    metrics = {
        "accuracy": sum(score.is_right for score in scores) / len(scores),
        "generation_s": generation.seconds,
        "generated_tokens": float(sum(len(completion.token_ids) for completion in completions)),
        "truncated": sum(is_truncated_G) / len(completions),
    }
    num_errors = sum(bool(score.error) for score in scores)
    if num_errors:
        metrics["score_errors"] = float(num_errors)
    return ScoredGroup(
        tokens=[[*prompt, *completion.token_ids] for completion in completions],
        masks=[[IGNORED] * num_prompt + completion.token_ids for completion in completions],
        scores=[score.reward for score in scores],
        inference_logprobs=[[NO_LOGPROB] * num_prompt + completion.logprobs for completion in completions],
        messages=[[*item.messages, {"role": "assistant", "content": c.text}] for c in completions],
        generation_params={"temperature": temperature},
        # the trainer may leave out what was cut off; a group that ended by itself sends nothing
        overrides=[{"finish_reason": "length"} if cut else {} for cut in is_truncated_G]
        if any(is_truncated_G)
        else None,
        policy_version=min(completion.policy_version for completion in completions),
        metrics=metrics,
    )


def check_lengths(prompts: Sequence[Sequence[int]], max_tokens: int, longest_sequence: int) -> None:
    """A sequence that the trainer would not take is refused before it is paid for; 0 or less is no limit."""
    longest_prompt = max(map(len, prompts))
    if 0 < longest_sequence < longest_prompt + max_tokens:
        raise ConfigError(
            f"a prompt of {longest_prompt} tokens and a completion of up to {max_tokens} do not fit into the "
            f"trainer's sequences of {longest_sequence} tokens",
            fix="lower --env.max-token-length or raise --train.seq-len",
        )
