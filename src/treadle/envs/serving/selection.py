"""Which item comes next: each in its turn, or those more often that the policy gets right only sometimes.

A group in which all rollouts are right, or none, teaches nothing. So with `--env.sampling difficulty` each turn draws a
few candidates and takes the one whose rewards are expected to differ most: the share p of right answers seen so far,
which fades with time, gives p(1 - p); an item that was never asked counts as an even chance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from treadle.config.load import replace_text
from treadle.envs.rollout import Rollout
from treadle.envs.seeds import stable_seed
from treadle.errors import ConfigError

NUM_CANDIDATES = 4
MEMORY = 0.5  # what the newest group counts beside all before
ROUNDS_TO_SAVE = 20


class Selection(Protocol):
    def place_of(self, index: int) -> int:
        """The item (an index for Environment.train_item) that turn `index` asks."""
        ...

    def learn(self, place: int, rollouts: Sequence[Rollout]) -> None: ...


class InTurn:
    def place_of(self, index: int) -> int:
        return index

    def learn(self, place: int, rollouts: Sequence[Rollout]) -> None:
        return None


class ByDifficulty:
    """`shares[place]` is the share of right answers, for the items that were asked."""

    def __init__(self, num_items: int, seed: int, path: Path) -> None:
        self._num_items = num_items
        self._seed = seed
        self._path = path
        self._unsaved = 0
        self._shares: dict[int, float] = {}
        if path.is_file():
            try:
                self._shares = {int(place): float(share) for place, share in json.loads(path.read_text()).items()}
            except (ValueError, TypeError, AttributeError) as error:
                problem = f"{path} cannot be read: {error}"
                raise ConfigError(problem, fix="delete it to learn the difficulty of the items again") from None

    def place_of(self, index: int) -> int:
        drawn = [stable_seed("candidate", self._seed, index, n) % self._num_items for n in range(NUM_CANDIDATES)]
        return max(drawn, key=self._expected_spread)  # the first of equals

    def learn(self, place: int, rollouts: Sequence[Rollout]) -> None:
        scored = [rollout.score for rollout in rollouts if rollout.score.reward is not None]
        if not scored:
            return
        share = sum(score.is_right for score in scored) / len(scored)
        before = self._shares.get(place)
        self._shares[place] = share if before is None else MEMORY * share + (1 - MEMORY) * before
        self._unsaved += 1
        if self._unsaved >= ROUNDS_TO_SAVE:
            self._unsaved = 0
            replace_text(self._path, json.dumps(self._shares))

    def _expected_spread(self, place: int) -> float:
        share = self._shares.get(place, 0.5)
        return share * (1 - share)
