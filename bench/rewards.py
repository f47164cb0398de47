"""Measure mathematical rewards in worker processes: python bench/rewards.py [--calls 10000] [--workers 2] [--load 2]

The mix: 70 % plain numbers, 20 % LaTeX fractions and expressions, 10 % garbage; half of the answers are right. Prints
a table as Markdown. `--load N` runs N busy processes at the same time; `--alone` scores in this process instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import platform
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from treadle.envs.rewards import BoxedMath, RewardInput, RewardResult, make_scorer

GROUP_SIZE = 8
THOUGHT = "<think>" + "Let us go through this step by step, and check each of them. " * 20 + "</think>"


@dataclass(frozen=True)
class Case:
    answer: str
    right: str
    wrong: str


def plain_case(rng: random.Random) -> Case:
    number = rng.randrange(-500, 2_000_000)
    right = rng.choice([f"{number}", f"{number:,}", f"{number}.0", rf"{number}\text{{ apples}}", rf"\${number:,}"])
    return Case(answer=str(number), right=right, wrong=f"{number + rng.randrange(1, 50):,}")


def latex_case(rng: random.Random) -> Case:
    top, bottom, scale = rng.randrange(1, 99), rng.randrange(2, 99), rng.randrange(2, 9)
    fraction = rf"\frac{{{top * scale}}}{{{bottom * scale}}}"
    root = rf"{scale}\sqrt{{{bottom}}}"
    power = rf"{top}x^{{2}} + {bottom}x"
    return rng.choice(
        [
            Case(answer=f"{top}/{bottom}", right=fraction, wrong=rf"\frac{{{top}}}{{{bottom + 1}}}"),
            Case(
                answer=rf"\frac{{{top}}}{{{bottom}}}",
                right=f"x = {fraction}",
                wrong=rf"x = \frac{{{bottom}}}{{{top}}} + 1",
            ),
            Case(answer=root, right=rf"\sqrt{{{scale * scale * bottom}}}", wrong=rf"{scale + 1}\sqrt{{{bottom}}}"),
            Case(answer=power, right=rf"x({top}x + {bottom})", wrong=rf"{top}x^{{2}} - {bottom}x"),
        ]
    )


def garbage(rng: random.Random) -> str:
    noise = "".join(rng.choices("abcxyz 0123456789{}\\$^_+-=,.", k=rng.randrange(1, 200)))
    return rng.choice(
        [noise, rf"\boxed{{{noise}", r"\boxed{\frac{}{}}", "", "I think the answer is about ten.", r"\boxed{NaN}"]
    )


def make_groups(num_calls: int, seed: int = 0) -> list[list[RewardInput]]:
    """Each group has one answer, as the completions of one prompt do."""
    rng = random.Random(seed)
    groups = []
    for _ in range(num_calls // GROUP_SIZE):
        kind = "plain" if rng.random() < 7 / 9 else "latex"
        case = plain_case(rng) if kind == "plain" else latex_case(rng)
        group = []
        for _ in range(GROUP_SIZE):
            is_right, is_garbage = rng.random() < 0.5, rng.random() < 0.1
            said = rf"So it is \boxed{{{case.right if is_right else case.wrong}}}."
            text = garbage(rng) if is_garbage else said
            metadata = {"is_right": is_right and not is_garbage}
            group.append(RewardInput(THOUGHT + text, answer=case.answer, metadata=metadata))
        groups.append(group)
    return groups


@contextlib.contextmanager
def busy(num_processes: int) -> Iterator[None]:
    """Other load on the machine."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


async def measure(groups: list[list[RewardInput]], *, workers: int, alone: bool) -> tuple[float, list[RewardResult]]:
    """Score all groups, 64 at a time; the time includes the workers' start."""
    started = time.perf_counter()
    gate = asyncio.Semaphore(64)
    scorer = make_scorer("inline") if alone else make_scorer("process", num_workers=workers, time_limit_s=10)

    async def score(group: list[RewardInput]) -> list[RewardResult]:
        async with gate:
            return await scorer.score(BoxedMath(), group)

    async with scorer:
        results = await asyncio.gather(*map(score, groups))
    return time.perf_counter() - started, [result for group in results for result in group]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--load", type=int, default=0, metavar="N", help="other busy processes")
    parser.add_argument("--alone", action="store_true", help="in this process, without workers")
    flags = parser.parse_args()
    groups = make_groups(flags.calls)
    with busy(flags.load):
        seconds, results = asyncio.run(measure(groups, workers=flags.workers, alone=flags.alone))
    inputs = [completion for group in groups for completion in group]
    judged = list(zip(inputs, results, strict=True))
    num_missed = sum(i.metadata["is_right"] and r.score != 1.0 for i, r in judged)
    num_mistaken = sum(not i.metadata["is_right"] and r.score == 1.0 for i, r in judged)
    slowest = sorted(result.seconds for result in results)
    print(
        f"{platform.machine()}, Python {platform.python_version()}, {flags.workers} workers, {flags.load} others busy\n"
    )
    print("| what | value |\n|---|---|")
    print(f"| calls | {len(results)} |")
    print(f"| seconds, with the start of the workers | {seconds:.2f} |")
    print(f"| calls a second | {len(results) / seconds:.0f} |")
    print(f"| outcomes | {dict(Counter(result.outcome for result in results))} |")
    print(f"| right answers | {sum(r.score == 1.0 for r in results)}, missed {num_missed}, mistaken {num_mistaken} |")
    print(f"| seconds in the reward, all calls | {sum(slowest):.2f} |")
    print(f"| longest call, ms | {slowest[-1] * 1e3:.0f} |")


if __name__ == "__main__":
    main()
