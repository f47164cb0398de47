"""Train a model with your own reward functions, from Python: python examples/own_reward.py

The functions take lists and return a list, as in TRL. They run in separate processes, which get a copy of their
source, so this file needs no `if __name__ == "__main__":`.
"""

import re

import treadle

MODEL = "smollm2-135m-instruct"  # or any id or folder of a chat model
STEPS = 25
SETTINGS = {"max_token_length": 24, "learning_rate": 2e-5}

ROWS = [{"prompt": f"What is {a} + {b}?", "answer": a + b} for a in range(2, 32) for b in range(2, 32)]
NUMBER = re.compile(r"\d+")


def is_right(completions, answer, **columns):
    """1 if the last number is the sum."""
    said = [NUMBER.findall(text)[-1:] for text in completions]
    return [float(numbers == [str(total)]) for numbers, total in zip(said, answer, strict=True)]


def is_short(completions, **columns):
    """1 for a single word, less for each additional word."""
    return [1 / max(1, len(text.split())) for text in completions]


run = treadle.train(MODEL, rewards=[is_right, is_short], reward_weights=[1.0, 0.1], data=ROWS, steps=STEPS, **SETTINGS)

best = max(run.rollouts(limit=50), key=lambda group: max(group.scores))
print(best.prompt, "->", best.completions[best.scores.index(max(best.scores))])
print(run.generate(["What is 40 + 2?", "What is 20 + 22?"], max_tokens=24))
run.plot().save("reward.png")
