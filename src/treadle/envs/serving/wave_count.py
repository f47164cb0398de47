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
    first_place: int = 0  # of its prompts in the batch: behind those that are there already

    @property
    def name(self) -> str:
        """No other wave has it: an item is delivered once, but a step may get several waves."""
        return f"{self.step}-item-{self.first_item}"


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
        """Of an environment that has registered: the next item is the first that the hub does not have.

        How many waves its groups make up is only a guess, because earlier batches may have had another size; a wrong
        one is corrected as soon as the trainer waits. A hub that has nothing gets what comes, not what was.
        """
        prompts_per_wave = standing.batch_size // group_size
        num_whole, num_begun = divmod(standing.untrained_sequences, standing.batch_size)
        step = max(groups_accepted // prompts_per_wave, standing.step + num_whole)
        return cls(step, groups_accepted or step * prompts_per_wave, standing.batch_size, group_size, num_begun)

    def corrected(self, standing: EnvStanding) -> Self:
        """By what the hub has, where that is not what was delivered."""
        has_other_size = standing.batch_size != self.batch_size
        owed = (self.step - standing.step) * self.batch_size
        if not has_other_size and not (standing.trainer_waits and standing.untrained_sequences < owed):
            return self
        num_whole, num_begun = divmod(standing.untrained_sequences, standing.batch_size)
        return replace(self, step=standing.step + num_whole, batch_size=standing.batch_size, num_begun=num_begun)

    def next_wave(self) -> Wave:
        num_prompts = math.ceil((self.batch_size - self.num_begun) / self.group_size)
        return Wave(self.step + 1, self.next_item, num_prompts, self.batch_size // self.group_size - num_prompts)

    def after(self, wave: Wave) -> Self:
        return replace(self, step=wave.step, next_item=wave.first_item + wave.num_prompts, num_begun=0)
