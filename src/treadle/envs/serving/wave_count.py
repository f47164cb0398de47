"""Which wave is next, of which items. Pure.

Wave w is what optimizer step w trains on. Usually it is the prompts of a whole batch, and the count goes on by itself:
a trainer that resumes from an older checkpoint repeats steps on what the hub has kept, and needs no wave for them.

When the trainer wants batches of another size, or waits although all waves are delivered (the hub had to drop
something), the count starts anew with what the hub has: the next wave completes the batch that is begun there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from treadle.wire.hub import EnvStanding


@dataclass(frozen=True)
class Wave:
    step: int  # that will train on it
    first_item: int
    num_prompts: int
    name: str  # no other wave has it


@dataclass(frozen=True)
class WaveCount:
    """What is delivered: all waves up to that of `step`, made of the items before `next_item`."""

    step: int
    next_item: int
    batch_size: int
    group_size: int
    num_begun: int = 0  # sequences that the next wave finds there already

    @classmethod
    def at_start(cls, standing: EnvStanding, *, groups_accepted: int, group_size: int) -> Self:
        """Of an environment that has registered. Of a wave of which the hub has only a part, all is sampled again."""
        prompts_per_wave = standing.batch_size // group_size
        delivered = groups_accepted // prompts_per_wave
        step = max(delivered, standing.step + standing.untrained_sequences // standing.batch_size)
        is_usual = step == delivered or groups_accepted == 0
        next_item = step * prompts_per_wave if is_usual else groups_accepted
        return cls(step, next_item, standing.batch_size, group_size)

    def corrected(self, standing: EnvStanding) -> Self:
        """By what the hub has, where that is not what was delivered."""
        has_other_size = standing.batch_size != self.batch_size
        owed = (self.step - standing.step) * self.batch_size
        if not has_other_size and not (standing.trainer_waits and standing.untrained_sequences < owed):
            return self
        num_whole, num_begun = divmod(standing.untrained_sequences, standing.batch_size)
        return replace(self, step=standing.step + num_whole, batch_size=standing.batch_size, num_begun=num_begun)

    def next_wave(self) -> Wave:
        step = self.step + 1
        prompts_per_wave = self.batch_size // self.group_size
        num_prompts = math.ceil((self.batch_size - self.num_begun) / self.group_size)
        is_usual = num_prompts == prompts_per_wave and self.next_item == self.step * prompts_per_wave
        name = str(step) if is_usual else f"{step}-item-{self.next_item}"
        return Wave(step, self.next_item, num_prompts, name)

    def after(self, wave: Wave) -> Self:
        return replace(self, step=wave.step, next_item=wave.first_item + wave.num_prompts, num_begun=0)
