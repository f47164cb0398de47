"""Rewards that misbehave in every way, each on command: the completion's text says how. Workers import this file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

from treadle.envs.rewards import Reward, RewardInput, reward

HOARD: list[bytearray] = []


@reward
def shaped(completion: RewardInput) -> dict[str, object]:
    """Points for any text, and an own verdict on whether it is right."""
    return {"score": 0.3, "correct": completion.text == completion.answer}


@reward
def half(completion: RewardInput) -> float:
    return 0.5


@reward
def misbehave(completion: RewardInput) -> float:
    return MISDEEDS.get(completion.text, float)(completion.text)


def loop_for_ever(text):
    while True:
        pass


def hold_the_interpreter(text):
    """One call into C that takes years and lets no other thread run."""
    return re.match(r"(a+)+$", "a" * 60 + "b")


def recurse_for_ever(text):
    return recurse_for_ever(text) + 1


def take_memory(text):
    return float(len(bytearray(4 * 2**30)))


def leave_a_child(text):
    child = subprocess.Popen(["sleep", "1000"])
    with open(os.environ["CHILD_PID_FILE"], "w") as file:
        file.write(str(child.pid))
    loop_for_ever(text)


def take_a_nap(text):
    time.sleep(0.5)
    return 0.5


def raise_an_error(text):
    raise KeyError("no such answer")


MISDEEDS = {
    "loop": loop_for_ever,
    "regex": hold_the_interpreter,
    "recurse": recurse_for_ever,
    "memory": take_memory,
    "child": leave_a_child,
    "nap": take_a_nap,
    "raise": raise_an_error,
    "sys.exit": lambda text: sys.exit(3),
    "os._exit": lambda text: os._exit(4),
    "abort": lambda text: os.abort(),
    "nan": lambda text: float("nan"),
    "none": lambda text: None,
    "words": lambda text: "plenty",
    "verdict": lambda text: {"score": 1.0, "correct": "yes"},
}


@reward
def hoarding(completion: RewardInput) -> float:
    """Keeps 60 MB at every call."""
    HOARD.append(bytearray(60 * 2**20))
    return float(completion.text)


@reward(group=True)
def rank(group, step: float = 1.0):
    """The longer the better, compared with the others."""
    lengths = sorted({len(completion.text) for completion in group})
    if "loop" in [completion.text for completion in group]:
        loop_for_ever("")
    return [lengths.index(len(completion.text)) * step for completion in group]


@reward
class SleepyReward(Reward):
    """Takes the given time to load, and no time to score."""

    load_s: float = 0.0

    def warm_up(self) -> None:
        time.sleep(self.load_s)

    def score(self, completion: RewardInput) -> float:
        return 1.0


@reward
class BrokenReward(Reward):
    """Cannot be made ready."""

    def warm_up(self) -> None:
        raise ImportError("no module named 'verifier'")


@reward
class CrashingReward(Reward):
    """Takes the worker with it while it loads."""

    def warm_up(self) -> None:
        os._exit(9)
