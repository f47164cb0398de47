"""What the trainer knows of single tokens, for people who look at them: one small file per step, the newest ones kept.

tokens/step-000012.rank-0    each rollout that carried loss: where its tokens stand, the trainer's logprob minus the
                             engine's, and the advantage they were trained with, as 16-bit numbers
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

FOLDER = "tokens"  # beside the metrics file
_NAME = re.compile(r"\.?step-(\d+)\.rank-\d+")  # with a dot: being written


class RolloutTokens(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one rollout that carried loss. Numbers are little-endian and of 16 bits."""

    group: int  # the fingerprint of its group
    rollout: int  # which of the group
    runs: list[int]  # where a stretch of such tokens begins and how long it is, for each stretch
    differences: bytes  # trainer's logprob minus engine's; NaN: the engine's is not known
    advantages: bytes  # a single one: it holds for all

    def places(self) -> list[int]:
        pairs = zip(self.runs[::2], self.runs[1::2], strict=True)
        return [place for start, length in pairs for place in range(start, start + length)]

    def figures(self) -> list[tuple[int, float, float]]:
        """(place in the rollout, difference, advantage) of each token."""
        places, advantages = self.places(), _numbers(self.advantages)
        if len(advantages) == 1:
            advantages *= len(places)
        return list(zip(places, _numbers(self.differences), advantages, strict=True))


_FILE = msgspec.msgpack.Decoder(list[RolloutTokens])


class TokenFiles:
    """`TokenFiles(run / "tokens").of_group(step, fingerprint(group))`; a folder that is not there holds nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, step: int, rank: int, rollouts: Sequence[RolloutTokens]) -> None:
        """In one move: nobody reads half a file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{step:06d}.rank-{rank}"
        beside = self._folder / f".{name}"
        beside.write_bytes(msgspec.msgpack.encode(rollouts))
        os.replace(beside, self._folder / name)

    def forget_before(self, step: int) -> None:
        for path in self._folder.iterdir():
            found = _NAME.fullmatch(path.name)
            if found and int(found[1]) < step:
                path.unlink(missing_ok=True)

    def of_group(self, step: int, group: int) -> dict[int, RolloutTokens] | None:
        """By the number of the rollout; one that is missing carried no loss. None: nothing is kept of this step."""
        files = sorted(self._folder.glob(f"step-{step:06d}.rank-*"))
        try:
            rollouts = [rollout for file in files for rollout in _FILE.decode(file.read_bytes())]
        except (OSError, msgspec.DecodeError):  # deleted just now, or a power cut left less than was written
            return None
        return {one.rollout: one for one in rollouts if one.group == group} if files else None


def _numbers(packed: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(packed) // 2}e", packed))
