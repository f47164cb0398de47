"""Write rows of a small task into the folder reverse: the words of a prompt in reverse order.

python examples/reverse_words.py
treadle sft --data reverse --epochs 1 --train.lr 2e-4
"""

import json
import random
from pathlib import Path

WORDS = """
apple river stone light green table house music paper window garden orange silver winter summer bridge yellow friend
doctor market castle forest island kitten ladder mirror needle ocean pencil rabbit saddle tunnel violin wagon candle
dragon engine finger guitar hammer jacket kettle lemon monkey nectar onion
"""


def write_rows(folder: Path, seed: int = 0) -> None:
    draws = random.Random(seed)
    folder.mkdir(exist_ok=True)
    for name, count in (("train", 800), ("test", 64)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(count):
                words = draws.sample(WORDS.split(), draws.randint(3, 4))
                prompt = "Write these words in reverse order: " + " ".join(words)
                file.write(json.dumps({"prompt": prompt, "answer": " ".join(reversed(words))}) + "\n")


if __name__ == "__main__":
    write_rows(Path("reverse"))
