"""Format numbers, durations, paths, commands and the results of checks for terminal output and reports."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console


def near(path: str | Path) -> str:
    """A path as the user would type it: relative if it is below the current folder."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere; or the current folder was deleted
        return str(path)


def program() -> str:
    """How to call this program: `treadle` if that is on the PATH, else the script beside this Python."""
    own = Path(sys.executable).parent / "treadle"
    found = shutil.which("treadle")
    return "treadle" if found is not None and Path(found).resolve() == own.resolve() else near(own)


def counted(number: int, word: str) -> str:
    """
    >>> counted(1, "step"), counted(25, "step")
    ('1 step', '25 steps')
    """
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def duration(seconds: float) -> str:
    """
    >>> duration(75), duration(3723)
    ('1 min 15 s', '1 h 02 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def percent(fraction: float) -> str:
    """With one decimal, as in "1.6 %": accuracies may start near zero."""
    return f"{100 * fraction:.1f} %"


def with_interval(mean: float, low: float | None, high: float | None) -> str:
    """A score and its interval, if it has one.

    >>> with_interval(0.14, 0.0971, 0.1829), with_interval(0.5, None, None)
    ('0.140 (0.097 to 0.183)', '0.500')
    """
    return f"{mean:.3f}" if low is None or high is None else f"{mean:.3f} ({low:.3f} to {high:.3f})"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size < 10e9 else f"{size / 1e9:.1f} GB"


def sparkline(values: list[float], width: int = 40) -> str:
    """A row of bars scaled from the lowest value to the highest, the newest at the right. More than `width` values are
    averaged into `width` bars. Equal values give the lowest bar.

    >>> sparkline([-1.0, 0.0, 3.0])
    '▁▃█'
    """
    bars = "▁▂▃▄▅▆▇█"
    num_bins = min(width, len(values))
    bins = [values[len(values) * i // num_bins : len(values) * (i + 1) // num_bins] for i in range(num_bins)]
    means = [sum(part) / len(part) for part in bins]
    lowest, height = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join(bars[round((mean - lowest) / height * (len(bars) - 1)) if height else 0] for mean in means)


def model_name(model: str) -> str:
    """The last part of a path; a name or an id unchanged.

    >>> model_name("/data/models/qwen3-tuned"), model_name("Qwen/Qwen3-8B")
    ('qwen3-tuned', 'Qwen/Qwen3-8B')
    """
    return Path(model).name if model.startswith((".", "/", "~")) or model.count("/") > 1 else model


def one_line(text: str, width: int) -> str:
    """Generated text on one line of at most `width` printable characters."""
    flat = " ".join(text.split())
    flat = "".join(character for character in flat if character.isprintable())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


# ---- results of checks (`doctor`, `validate`)

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


def show_findings(findings: Sequence[Finding], console: Console, *, verbose: bool) -> None:
    """Print the checks that are not ok, then "1 problem, 2 warnings, 19 checks ok"; `verbose`: print all, in order."""
    from rich.table import Table
    from rich.text import Text

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
    num = Counter(finding.verdict for finding in findings)
    wrong = [counted(num[verdict], verdict) for verdict in ("problem", "warning") if num[verdict]]
    summary = ", ".join([*wrong, f"{counted(num['ok'], 'check')} ok"])
    console.print(summary + ("" if verbose else " (--verbose lists them)"), highlight=False)
