"""State of the stream pace on disk, so that neither a failed post nor a killed process loses or repeats an item.

STATE/cursor.json                               {"next": 130, "begun": [126, 129]}: 0 to 125, 127 and 128 are done
STATE/difficulty.json                           the share of right answers of each item (--env.sampling difficulty)
STATE/spool/000130-gsm8k-0-item-126.groups      scored, waits to be posted, oldest first
STATE/refused/...                               refused by the hub; kept for inspection
STATE/of-run-4f1c.../...                        left over from an earlier run; never delivered
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote, unquote

from treadle.config.load import replace_text
from treadle.envs.base import stable_seed
from treadle.envs.hub_client import HubClient
from treadle.envs.rollout import Rollout
from treadle.errors import ConfigError, HubError
from treadle.log import get_logger
from treadle.wire.groups import ScoredGroup, pack_group

NUM_CANDIDATES = 4
NEWEST_WEIGHT = 0.5  # weight of the newest group in the moving average
ROUNDS_TO_SAVE = 20


class ItemCursor:
    """`index = cursor.take()` ... `cursor.finish(index)`, and `save()` regularly.

    Items that were taken and not finished are taken again after a restart. `first` and `distance` are those of a
    process that takes a part of the items.
    """

    def __init__(self, path: Path, first: int = 0, distance: int = 1) -> None:
        self._path = path
        self._first, self._distance = first, distance
        self._next = first
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
        return (self._next - self._first) // self._distance - len(self._started)

    def take(self) -> int:
        if self._retries:
            return self._retries.pop()
        index, self._next = self._next, self._next + self._distance
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
        self._next, self._started, self._retries = self._first, set(), []
        self._is_saved = False

    async def save(self) -> None:
        """Items finished since the last save are sampled again after a kill, and the hub refuses the repetition."""
        if not self._is_saved:
            text = json.dumps({"next": self._next, "begun": sorted(self._started)})
            self._is_saved = True
            await asyncio.to_thread(replace_text, self._path, text)


class DifficultySelection:
    """Prefers items that the policy gets right only sometimes: if all rollouts are right, or none, nothing is learned.

    Each turn draws a few candidates and takes the one with the largest expected reward variance p(1 - p), where p is
    the share of right answers as an exponential moving average (0.5 for an item that was never sampled).
    """

    def __init__(self, candidate: Callable[[int, int], int], seed: int, path: Path) -> None:
        """`candidate`: the index of an item that may be taken in a turn, from a random number."""
        self._candidate = candidate
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
        numbers = [stable_seed("candidate", self._seed, turn, n) for n in range(NUM_CANDIDATES)]
        drawn = [self._candidate(turn, number) for number in numbers]
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


log = get_logger("env")

SUFFIX = ".groups"
UNFINISHED = ".partial"
MAX_REFUSED = 3  # in a row


class Spool:
    """Files of packed groups that wait for delivery."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "spool"
        self._refused = folder / "refused"
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob(f"*{UNFINISHED}"):  # killed during a write: the item is sampled again
            path.unlink()
        self._count = max((int(path.name.partition("-")[0]) for path in self.waiting()), default=-1) + 1

    def put(self, key: str, group: ScoredGroup) -> Path:
        """Write and fsync a group. `key` is the idempotency key of its delivery."""
        path = self._folder / f"{self._count:06d}-{quote(key, safe='')}{SUFFIX}"
        self._count += 1
        unfinished = path.with_suffix(UNFINISHED)
        with unfinished.open("wb") as file:
            file.write(pack_group(group))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        return path

    def waiting(self) -> list[Path]:
        """Files to deliver, oldest first; the caller deletes each after its delivery."""
        return sorted(self._folder.glob(f"*{SUFFIX}"))

    @staticmethod
    def key(path: Path) -> str:
        return unquote(path.name.removesuffix(SUFFIX).partition("-")[2])

    def refuse(self, path: Path) -> Path:
        self._refused.mkdir(exist_ok=True)
        return path.replace(self._refused / path.name)

    def put_aside(self, name: str) -> Path | None:
        """Move all files of an earlier run to the folder `name` and return it; None if there were none."""
        left = [*self.waiting(), *sorted(self._refused.glob(f"*{SUFFIX}"))]
        if not left:
            return None
        aside = self._folder.parent / name
        for path in left:
            (aside / path.parent.name).mkdir(parents=True, exist_ok=True)
            path.replace(aside / path.parent.name / path.name)
        return aside


class Delivery:
    """`async with Delivery(hub, spool) as delivery: await delivery.accept(key, group)`.

    Waits for a hub that is unreachable. Several refusals in a row end the delivery: `failed` holds the error.
    """

    def __init__(self, hub: HubClient, spool: Spool) -> None:
        self._hub = hub
        self._spool = spool
        self._new_groups = asyncio.Queue[None]()
        self._posting: asyncio.Task[None] | None = None
        self._refused_in_a_row = 0
        self.num_waiting = len(spool.waiting())

    async def __aenter__(self) -> Self:
        if self.num_waiting:
            log.info("groups_left_from_before", groups=self.num_waiting)
        self._new_groups.put_nowait(None)
        self._posting = asyncio.create_task(self._post_forever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._posting is not None:
            self._posting.cancel()
            await asyncio.wait([self._posting])

    @property
    def failed(self) -> asyncio.Task[None]:
        """Finishes, with the hub's error, only after repeated refusals."""
        if self._posting is None:
            raise RuntimeError("a delivery is used inside its async with")
        return self._posting

    async def accept(self, key: str, group: ScoredGroup) -> None:
        """Queue a group for delivery; it is on disk when this returns."""
        self.num_waiting += 1
        await asyncio.to_thread(self._spool.put, key, group)
        self._new_groups.put_nowait(None)

    async def _post_forever(self) -> None:
        while True:
            await self._new_groups.get()
            for path in await asyncio.to_thread(self._spool.waiting):
                packed = await asyncio.to_thread(path.read_bytes)
                try:
                    await self._hub.post_packed([packed], self._spool.key(path))
                except HubError as error:
                    self._refuse(path, error)
                else:
                    self._refused_in_a_row = 0
                    await asyncio.to_thread(path.unlink)
                self.num_waiting -= 1

    def _refuse(self, path: Path, error: HubError) -> None:
        """Set a refused group aside and continue; raise after MAX_REFUSED refusals in a row."""
        kept = self._spool.refuse(path)
        log.error("group_refused", kept=str(kept), problem=error.message)
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= MAX_REFUSED:
            raise HubError(f"{error.message}; the group is kept in {kept}", fix=error.fix) from error
