"""Write and read the files of a run that can be read while it goes on.

metrics.jsonl                one object per optimizer step
health.jsonl                 an event when a metric leaves its healthy range and when it is back:
                             {"step": 12, "message": "mean_ratio 1.31 (healthy 0.8 to 1.2): ..."}
tokens/step-000012.rank-0    the tokens of each rollout that carried loss, of the newest steps: their positions, the
                             trainer's logprob minus the engine's, and the advantage, as 16-bit numbers
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from treadle.config.flag_spelling import respell_flags
from treadle.errors import DiskFull

HEALTH_FILE = "health.jsonl"
TOKENS_FOLDER = "tokens"  # beside the metrics file
_NAME = re.compile(r"\.?step-(\d+)\.rank-\d+")  # with a dot: being written


# ---- metrics and health events


class JsonlTracker:
    """Append one line per step: `log(3, {"reward": 0.25, "policy_loss": float("nan")})` appends
    {"step": 3, "reward": 0.25, "policy_loss": null}."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        line = {"step": step, **{key: _jsonable(value) for key, value in metrics.items()}}
        with self._naming_a_full_disk():
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()  # a reader sees the step at once; durability is the checkpoint's business

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, and lines that a crash cut short; the file changes in one move."""
        self._file.close()
        _truncate_after(self._path, step)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        with self._naming_a_full_disk():
            self._file.close()

    @contextlib.contextmanager
    def _naming_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DiskFull(
                f"the disk is full while writing {self._path}",
                fix="free some space and continue with treadle run --resume",
            ) from None


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file, in order; a missing file is an empty one."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    steps = (_parsed(line) for line in content.splitlines())
    return [step for step in steps if step is not None]


@dataclass(frozen=True)
class HealthEvent:
    """What the trainer found at a step: `HealthEvent(12, "mean_ratio 1.31 (healthy 0.8 to 1.2): ...")`."""

    step: int
    message: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.message}"


@dataclass
class HealthFile:
    """The health events of a run. `read` continues where it stopped: a view asks several times a second."""

    path: Path
    _offset: int = 0
    _events: list[HealthEvent] = field(default_factory=list)

    def write(self, step: int, message: str) -> None:
        """Append an event. A disk that refuses it is no error here: the metrics file reports that."""
        with contextlib.suppress(OSError):
            _end_last_line(self.path)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "message": message}) + "\n")

    def truncate_after(self, step: int) -> None:
        """Drop the events of later steps, which a resumed trainer takes again."""
        if self.path.exists():
            _truncate_after(self.path, step)

    def read(self) -> tuple[HealthEvent, ...]:
        """All events, each once: a resumed trainer repeats steps. Messages name the flags of `treadle run`."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # truncated by a resumed trainer
                    self._offset, self._events = 0, []
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return tuple(self._events)
        whole = new[: new.rfind(b"\n") + 1]  # the last line may be incomplete
        self._offset += len(whole)
        for line in whole.splitlines():
            values = _parsed(line)
            if values is not None and isinstance(values.get("message"), str):
                event = HealthEvent(values["step"], respell_flags("run", values["message"], "train"))
                self._events += [event] if event not in self._events else []
        return tuple(self._events)


def _truncate_after(path: Path, step: int) -> None:
    """Keep the whole lines up to `step`. Readers see the old file or the new one."""
    lines = path.read_bytes().splitlines()
    kept = [line for line in lines if (values := _parsed(line)) is not None and int(values["step"]) <= step]
    beside = path.with_suffix(".tmp")
    beside.write_bytes(b"".join(line + b"\n" for line in kept))
    os.replace(beside, path)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line's values; None for one that is not whole (a crash, a damaged disk, or a write that is still under way)."""
    try:
        values = json.loads(line)
    except ValueError:  # no JSON, or not UTF-8
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None


def _jsonable(value: float | int | str) -> float | int | str | None:
    if isinstance(value, (str, int)):
        return value
    number = float(value)  # numpy's and torch's scalars too
    return number if math.isfinite(number) else None


def _end_last_line(path: Path) -> None:
    """A line that a crash cut short must not swallow the first line that we append."""
    try:
        with path.open("rb+") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    except FileNotFoundError:
        return


# ---- tokens


class RolloutTokens(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one rollout that carried loss. Numbers are 16-bit floats, little-endian."""

    group: int  # the fingerprint of its group
    rollout: int  # which of the group
    runs: list[int]  # (start, length) of each run of such tokens, flat
    differences: bytes  # trainer's logprob minus engine's; NaN: the engine's is not known
    advantages: bytes  # one for each token, or a single one for all

    def figures(self) -> list[tuple[int, float, float]]:
        """(position in the rollout, difference, advantage) of each token."""
        pairs = zip(self.runs[::2], self.runs[1::2], strict=True)
        positions = [position for start, length in pairs for position in range(start, start + length)]
        differences, advantages = (
            struct.unpack(f"<{len(packed) // 2}e", packed) for packed in (self.differences, self.advantages)
        )
        if len(advantages) == 1:
            advantages *= len(positions)
        return list(zip(positions, differences, advantages, strict=True))


_FILE = msgspec.msgpack.Decoder(list[RolloutTokens])


class TokenFiles:
    """`TokenFiles(run / "tokens").of_group(step, fingerprint(group))`; a missing folder is an empty one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, step: int, rank: int, rollouts: Sequence[RolloutTokens]) -> None:
        """The file appears in one move: readers never see half of it."""
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
        """By rollout index; a missing one carried no loss. None: there are no files of this step."""
        files = sorted(self._folder.glob(f"step-{step:06d}.rank-*"))
        try:
            rollouts = [rollout for file in files for rollout in _FILE.decode(file.read_bytes())]
        except (OSError, msgspec.DecodeError):  # deleted just now, or a power cut left less than was written
            return None
        return {one.rollout: one for one in rollouts if one.group == group} if files else None
