"""What an examination found, in plain words and with the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

Verdict = Literal["ok", "warning", "problem"]
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True)
class Finding:
    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def problems(findings: Sequence[Finding]) -> list[str]:
    """The names of what is wrong."""
    return [finding.name for finding in findings if finding.verdict == "problem"]


def as_table(findings: Sequence[Finding]) -> Table:
    table = Table(show_edge=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for column in ("check", "", "found", "what to do"):
        table.add_column(column, header_style="dim", overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict, style=_COLOURS[finding.verdict])
        table.add_row(Text(finding.name), verdict, Text(finding.found), Text(finding.remedy))
    return table
