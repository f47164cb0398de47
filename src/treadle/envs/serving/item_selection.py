"""Choose the next item to sample, and remember across restarts which items are finished.

`ItemCursor` numbers the turns and saves its state, so that a killed process skips no item and repeats none:

    {"next": 130, "begun": [126, 129]}     items 0 to 125, 127 and 128 are done

`ItemSelection` maps a turn to an item. With `--env.sampling difficulty` each turn draws a few candidates and takes the
one with the largest expected reward variance p(1 - p), where p is the share of right answers as an exponential moving
average (0.5 for an item that was never sampled): a group in which all rollouts are right, or none, teaches nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from treadle.config.load import replace_text
from treadle.envs.base import stable_seed
from treadle.envs.rollout import Rollout
from treadle.errors import ConfigError

NUM_CANDIDATES = 4
NEWEST_WEIGHT = 0.5  # weight of the newest group in the moving average
ROUNDS_TO_SAVE = 20


class ItemCursor:
    """`index = cursor.take()` ... `cursor.finish(index)`, and `save()` regularly.

    Items that were taken and not finished are taken again after a restart.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = 0
        self._started: set[int] = set()
        self._retries: list[int] = []  # the smallest last
        self._is_saved = False
        if path.is_file():
            try:
                values = json.loads(path.read_text())
                self._next, self._started = int(values["next"]), {int(index) for index in values["begun"]}
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path} cannot be read: {error}", fix="delete it to begin with item 0") from None
            self._retries = sorted(self._started, reverse=True)

    @property
    def num_done(self) -> int:
        return self._next - len(self._started)

    def take(self) -> int:
        if self._retries:
            return self._retries.pop()
        index, self._next = self._next, self._next + 1
        self._started.add(index)
        self._is_saved = False
        return index

    def finish(self, index: int) -> None:
        """Call it when the group is on disk, or was dropped."""
        self._started.discard(index)
        if index in self._retries:
            self._retries.remove(index)
        self._is_saved = False

    def give_back(self, index: int) -> None:
        """Take the item again, after those that were given back before it."""
        self._retries.insert(0, index)

    def start_over(self) -> None:
        self._next, self._started, self._retries = 0, set(), []
        self._is_saved = False

    async def save(self) -> None:
        """Items finished since the last save are sampled again after a kill, and the hub refuses the repetition."""
        if not self._is_saved:
            text = json.dumps({"next": self._next, "begun": sorted(self._started)})
            self._is_saved = True
            await asyncio.to_thread(replace_text, self._path, text)


class DifficultySelection:
    """Prefers items that the policy gets right only sometimes; saves the share of right answers of each item."""

    def __init__(self, num_items: int, seed: int, path: Path) -> None:
        self._num_items = num_items
        self._seed = seed
        self._path = path
        self._unsaved = 0
        self._shares: dict[int, float] = {}
        if path.is_file():
            try:
                self._shares = {int(index): float(share) for index, share in json.loads(path.read_text()).items()}
            except (ValueError, TypeError, AttributeError) as error:
                problem = f"{path} cannot be read: {error}"
                raise ConfigError(problem, fix="delete it to learn the difficulty of the items again") from None

    def item_index(self, turn: int) -> int:
        """The item of this turn, as an index for Environment.train_item."""
        drawn = [stable_seed("candidate", self._seed, turn, n) % self._num_items for n in range(NUM_CANDIDATES)]
        variances = [share * (1 - share) for share in (self._shares.get(index, 0.5) for index in drawn)]
        return drawn[variances.index(max(variances))]  # the first of equals

    def learn(self, item_index: int, rollouts: Sequence[Rollout]) -> None:
        scored = [rollout.score for rollout in rollouts if rollout.score.reward is not None]
        if not scored:
            return
        share = sum(score.is_right for score in scored) / len(scored)
        before = self._shares.get(item_index)
        self._shares[item_index] = share if before is None else NEWEST_WEIGHT * share + (1 - NEWEST_WEIGHT) * before
        self._unsaved += 1
        if self._unsaved >= ROUNDS_TO_SAVE:
            self._unsaved = 0
            replace_text(self._path, json.dumps(self._shares))
