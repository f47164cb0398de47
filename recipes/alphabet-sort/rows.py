"""Write the rows of the recipe to data/alphabet-sort: lists of three to six first names, and the same names sorted.

python recipes/alphabet-sort/rows.py
"""

import json
from pathlib import Path

from treadle.envs.base import stable_seed, stable_shuffle

FOLDER = Path("data/alphabet-sort")
NUM_ROWS = {"train": 2000, "test": 128}
MIN_NAMES, MAX_NAMES = 3, 6
# Several names with each initial, so that the second and third letters count too.
NAMES = """
Abel Ada Agnes Alma Anton Arne Basil Beata Bella Bruno Carl Carmen Cecil Clara Conrad Dag Daria Dora Doris Dylan Edgar
Edith Elena Elias Emma Fabio Felix Fiona Flora Frida Gina Gloria Greta Gustav Hanna Hector Helen Henry Hugo Ida Igor
Ines Iris Ivan Jana Jasper Joan Jonas Julia Karl Katja Kevin Kirsten Klaus Laura Lena Lilian Lorenz Lucy Magda Marta
Miles Mona Murat Nadia Neil Nina Nora Norbert Olga Oliver Oscar Otto Paula Peter Petra Philip Quentin Ralf Rebecca Rita
Robert Ruth Sandra Selma Simon Sofia Sven Tamara Theo Tilda Tom Ulla Ursula Vera Victor Walter Wendy Xaver Yvonne Zita
"""


def make_rows() -> dict[str, list[dict[str, str]]]:
    """Rows of both splits. No list of names is in both, in whatever order."""
    rows: dict[str, list[dict[str, str]]] = {}
    seen: set[frozenset[str]] = set()
    names = NAMES.split()
    for split in ("test", "train"):
        rows[split] = []
        draw = 0
        while len(rows[split]) < NUM_ROWS[split]:
            count = MIN_NAMES + stable_seed("alphabet-sort", split, draw, "count") % (MAX_NAMES - MIN_NAMES + 1)
            chosen = stable_shuffle(names, "alphabet-sort", split, draw)[:count]
            draw += 1
            if chosen != sorted(chosen) and frozenset(chosen) not in seen:  # repeating the list would be right
                seen.add(frozenset(chosen))
                prompt = f"Sort these names alphabetically: {', '.join(chosen)}"
                rows[split].append({"prompt": prompt, "answer": ", ".join(sorted(chosen))})
    return rows


def write_rows(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in make_rows().items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write_rows()
    print(f"wrote {FOLDER}")
