"""Format numbers, durations, paths, and commands for terminal output and reports."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


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
