"""Describe the results of checks (name, verdict, text and remedy) and print them; for `doctor` and `validate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Verdict = Literal["ok", "warning", "problem"]
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}
_WIDEST_NAME = 28


@dataclass(frozen=True)
class Finding:
    """`remedy`: the command or the change that fixes it. A skipped check is ok, and `found` says so."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def problems(findings: Sequence[Finding]) -> list[str]:
    """The names of the checks with problems."""
    return [finding.name for finding in findings if finding.verdict == "problem"]


def show(findings: Sequence[Finding], console: Console, *, verbose: bool) -> None:
    """Print the checks that are not ok, then a summary; `verbose`: print all checks, in order."""
    listed = findings if verbose else [finding for finding in findings if finding.verdict != "ok"]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=_WIDEST_NAME, overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in listed:
        remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
        verdict = Text(finding.verdict, style=_COLOURS[finding.verdict])
        table.add_row(Text(finding.name), verdict, Text(finding.found + remedy))
    if listed:
        console.print(table)
    console.print(summary(findings) + ("" if verbose else " (--verbose lists them)"), highlight=False)


def summary(findings: Sequence[Finding]) -> str:
    """ "1 problem, 2 warnings, 19 checks ok"."""
    num = Counter(finding.verdict for finding in findings)
    wrong = [
        f"{num[verdict]} {verdict}{'s' * (num[verdict] > 1)}" for verdict in ("problem", "warning") if num[verdict]
    ]
    return ", ".join([*wrong, f"{num['ok']} check{'s' * (num['ok'] != 1)} ok"])
