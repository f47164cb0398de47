"""What the trainer has said about the run's health: its `health` events, read from its log while it grows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from treadle.config.advice import as_flags_of

_EVENT = re.compile(r"^\S+ (?:INFO|WARNING|ERROR)\s+trainer health(?P<fields>( .*)?)$")
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


@dataclass(frozen=True)
class HealthLine:
    """One thing that was said: `HealthLine(12, "mean_ratio 1.31 (healthy 0.8 to 1.2): ...")`."""

    step: int | None
    message: str

    def __str__(self) -> str:
        return self.message if self.step is None else f"step {self.step}: {self.message}"


@dataclass
class HealthLog:
    """Reads on where it stopped, because a view asks several times a second and a log grows long."""

    path: Path
    _offset: int = 0
    _lines: list[HealthLine] = field(default_factory=list)

    def read(self) -> tuple[HealthLine, ...]:
        """Everything said so far, each once: a resumed trainer takes steps again and says the same of them."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return tuple(self._lines)
        whole = new[: new.rfind(b"\n") + 1]  # the last line may still be under way
        self._offset += len(whole)
        for text in whole.decode("utf-8", errors="replace").splitlines():
            line = parse_health(text)
            if line is not None and line not in self._lines:
                self._lines.append(line)
        return tuple(self._lines)


def parse_health(text: str) -> HealthLine | None:
    """None for a line of the log that says something else.

    >>> parse_health('2026-01-02T03:04:05.678 WARNING trainer health step=12 message="mean_kl 0.61"')
    HealthLine(step=12, message='mean_kl 0.61')

    The log is in the folder of a `treadle run`, whose flags the message names: --train.lr for the trainer's own --lr.
    """
    event = _EVENT.match(text)
    if event is None:
        return None
    fields = {name: _unquoted(value) for name, value in _FIELD.findall(event["fields"])}
    if "message" not in fields:
        return None
    step = fields.get("step", "")
    return HealthLine(int(step) if step.isdigit() else None, as_flags_of("run", fields["message"], "train"))


def _unquoted(value: str) -> str:
    try:
        return str(json.loads(value)) if value.startswith('"') else value
    except ValueError:
        return value
