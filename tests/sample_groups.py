"""Groups of random tokens for the tiny model: prompts that begin alike, four completions with different scores."""

from __future__ import annotations

import torch

from treadle.wire.groups import ScoredGroup


def make_groups(num_groups=5, seed=0, *, prompt_length=(3, 9), completion_length=(1, 8)):
    """Lengths are drawn from [low, high)."""
    random = torch.Generator().manual_seed(seed)

    def draw(low, high):
        length = int(torch.randint(low, high, (1,), generator=random))
        return torch.randint(3, 60, (length,), generator=random).tolist()

    groups = []
    for _ in range(num_groups):
        prompt = [7, 8, 9, *draw(*prompt_length)]
        completions = [draw(*completion_length) for _ in range(4)]
        groups.append(
            ScoredGroup(
                tokens=[prompt + c for c in completions],
                masks=[[-100] * len(prompt) + c for c in completions],
                scores=[0.0, 1.0, 0.5, 2.0],
                inference_logprobs=[[1.0] * len(prompt) + [-4.0] * len(c) for c in completions],
                generation_params={"temperature": 0.7},
            )
        )
    return groups
