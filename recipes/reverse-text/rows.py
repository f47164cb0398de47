"""Write the rows of the recipe to data/reverse-text: texts of two to four words, and their letters in reverse order.

python recipes/reverse-text/rows.py
"""

import json
from pathlib import Path

from treadle.envs.base import stable_seed, stable_shuffle

FOLDER = Path("data/reverse-text")
NUM_ROWS = {"train": 2000, "test": 128}
MIN_WORDS, MAX_WORDS = 2, 4
# A short list: a small model learns how each word is spelt backwards, and held-out texts are new combinations.
WORDS = """
apple bird boat book bread bridge candle chair cloud corn door dream farm field fish flag flower forest garden glass
gold grass hill home horse house island jacket king lake lamp leaf lemon light milk moon mouse music night ocean paper
park pencil plant queen rain river road rock rose sail salt sand ship silver snow song star stone storm summer table
tiger train tree wagon water window winter wolf
"""


def make_rows() -> dict[str, list[dict[str, str]]]:
    """Rows of both splits; the held-out texts come first, so that training skips them."""
    rows: dict[str, list[dict[str, str]]] = {}
    seen: set[str] = set()
    words = WORDS.split()
    for split in ("test", "train"):
        rows[split] = []
        draw = 0
        while len(rows[split]) < NUM_ROWS[split]:
            count = MIN_WORDS + stable_seed("reverse-text", split, draw, "count") % (MAX_WORDS - MIN_WORDS + 1)
            text = " ".join(stable_shuffle(words, "reverse-text", split, draw)[:count])
            draw += 1
            if text not in seen:
                seen.add(text)
                rows[split].append({"prompt": f"Reverse this text letter by letter: {text}", "answer": text[::-1]})
    return rows


def write_rows(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in make_rows().items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write_rows()
    print(f"wrote {FOLDER}")
