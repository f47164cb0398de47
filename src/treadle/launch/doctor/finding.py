"""A check, its verdict, and what to do; as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Verdict = Literal["ok", "warning", "problem"]
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True)
class Check:
    """`remedy`: the command or the change that mends it; a check that was skipped is ok, and says so."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def is_well(checks: Sequence[Check]) -> bool:
    return all(check.verdict != "problem" for check in checks)


def as_json(checks: Sequence[Check]) -> dict[str, Any]:
    return {"ok": is_well(checks), "checks": [asdict(check) for check in checks]}


def show(checks: Sequence[Check], console: Console) -> None:
    table = Table(show_edge=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for column in ("check", "", "found", "what to do"):
        table.add_column(column, header_style="dim", overflow="fold")
    for check in checks:
        verdict = Text(check.verdict, style=_COLOURS[check.verdict])
        table.add_row(check.name, verdict, Text(check.found), Text(check.remedy))
    console.print(table)
    console.print(f"\n{_in_words(checks)}", highlight=False)


def _in_words(checks: Sequence[Check]) -> str:
    num = {verdict: sum(check.verdict == verdict for check in checks) for verdict in ("problem", "warning")}
    told = [f"{count} {word}{'s' if count > 1 else ''}" for word, count in num.items() if count]
    return ", ".join(told) or "nothing is wrong"
