"""Numbers and commands in the words of the launcher's view and report."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def near(path: str | Path) -> str:
    """As the user would type it: relative when it is below the current folder."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere; or the current folder was deleted
        return str(path)


def program() -> str:
    """How to call us again: `treadle` where that is found, else the program beside our Python."""
    own = Path(sys.executable).parent / "treadle"
    found = shutil.which("treadle")
    return "treadle" if found is not None and Path(found).resolve() == own.resolve() else near(own)


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
    """One digit after the point, as in "1.6 %": small beginnings count."""
    return f"{100 * fraction:.1f} %"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size < 10e9 else f"{size / 1e9:.1f} GB"


def sparkline(values: list[float], width: int = 40, *, top: float = 1.0) -> str:
    """A row of bars, the newest at the right; longer histories are averaged into `width` bars.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    bars = "▁▂▃▄▅▆▇█"
    num_bins = min(width, len(values))
    bins = [values[len(values) * i // num_bins : len(values) * (i + 1) // num_bins] for i in range(num_bins)]
    heights = [sum(part) / len(part) / top for part in bins]
    return "".join(bars[min(len(bars) - 1, max(0, round(height * (len(bars) - 1))))] for height in heights)


def one_line(text: str, width: int) -> str:
    """Text of a model on one line of at most `width` characters."""
    flat = " ".join(text.split())
    flat = "".join(character for character in flat if character.isprintable())
    return flat if len(flat) <= width else flat[: width - 1] + "…"
