"""One wave: all prompts of one optimizer step, generated side by side, so that the same seed gives the same curve."""

from __future__ import annotations

import asyncio

from treadle.envs.grouping import build_group, settle
from treadle.envs.rollout import Desk, check_lengths, score_generation
from treadle.envs.seeds import stable_seed
from treadle.errors import ProcessDied
from treadle.wire.groups import ScoredGroup


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
    scored = await asyncio.gather(
        *(score_generation(desk, *one) for one in zip(items, prompts, generations, strict=True))
    )
    every = [rollout for rollouts in scored for rollout in rollouts]
    if all(rollout.score.reward is None for rollout in every):
        raise ProcessDied(
            f"none of {len(every)} completions could be scored: {every[0].score.error}",
            fix=f"treadle env {config.name} validate",
        )
    groups = []
    for index, rollouts in zip(indexes, scored, strict=True):
        group = build_group(settle(desk.environment, rollouts), temperature=config.temperature)
        group.item, group.env_id = index, env_id
        groups.append(group)
    return groups
