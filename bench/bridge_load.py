"""Keep requests in flight against an engine, in a separate process that shares no thread with the measured code.

    python bench/bridge_load.py --url URL --prompts FILE --requests 128    tokens a second over this number of answers
    python bench/bridge_load.py --url URL --prompts FILE                   until its standard input ends

With --requests, the measured interval starts after as many answers as there are clients, and ends while all clients are
still busy, so that most of the first wave and the last requests are excluded. A request that overlaps the interval
counts in proportion. Without --requests, it answers commands on standard input: "answers 4" prints the newest four,
"count" their number.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

GENERATE, STOCK = "/generate", "/v1/completions"


@dataclass(frozen=True)
class Made:
    begin: float
    end: float
    num_tokens: int

    def share_between(self, begin: float, end: float) -> float:
        """
        >>> Made(1.0, 5.0, 100).share_between(4.0, 8.0), Made(1.0, 5.0, 100).share_between(6.0, 8.0)
        (0.25, 0.0)
        """
        return max(0.0, min(end, self.end) - max(begin, self.begin)) / (self.end - self.begin)


class Load:
    """Keeps `clients` requests in flight, each for `group` completions of one length. Lengths differ between requests,
    with `max_tokens` as their mean, so that requests do not end at the same time."""

    def __init__(self, known: argparse.Namespace) -> None:
        self._known = known
        self._prompts: list[list[int]] = json.loads(known.prompts.read_text())
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self.answers: list[bytes] = []
        self._begun: list[float] = []
        self._made: list[Made] = []
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(known.clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def counted(self) -> dict[str, Any]:
        return {"requests": len(self.answers), "failed": self.failed}

    def speed(self) -> dict[str, Any]:
        first, last = self._known.clients - 1, self._known.clients - 1 + self._known.requests
        self._wait_for(lambda: len(self._made) > last)
        if self.failed:
            return {"failed": self.failed}
        ends = sorted(made.end for made in self._made)
        begin, end = ends[first], ends[last]
        num_begun = sum(moment < end for moment in self._begun)
        self._wait_for(lambda: sum(made.begin < end for made in self._made) >= num_begun)
        if self.failed:
            return {"failed": self.failed}
        tokens = sum(made.num_tokens * made.share_between(begin, end) for made in self._made)
        return {"tokens_per_s": tokens / (end - begin), "failed": []}

    def _wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait while all clients stay busy."""
        while not is_so() and not self.failed:
            time.sleep(0.01)

    def _ask(self) -> None:
        with httpx.Client(base_url=self._known.url, timeout=300, trust_env=False) as client:
            while not self._stop.is_set():
                number, begin = next(self._numbers), time.monotonic()
                self._begun.append(begin)
                try:
                    answer = client.post(self._known.route, json=self._body(number))
                except httpx.HTTPError as error:
                    self.failed.append(f"{type(error).__name__}: {error}")
                    continue
                if answer.status_code == httpx.codes.OK:
                    self.answers.append(answer.content)
                    self._made.append(Made(begin, time.monotonic(), self._known.group * self._length(number)))
                else:
                    self.failed.append(answer.text[:200])

    def _length(self, number: int) -> int:
        return int(self._known.max_tokens) * (4 + number * 7 % 9) // 8

    def _body(self, number: int) -> dict[str, Any]:
        known = self._known
        prompt = self._prompts[number % len(self._prompts)]
        same = {"n": known.group, "max_tokens": self._length(number), "temperature": 1.0, "logprobs": 0}
        same |= {"ignore_eos": True}
        if known.route == GENERATE:
            return {"prompt": {"prompt_token_ids": prompt}, **same}
        return {"model": "policy", "prompt": prompt, "return_token_ids": True, **same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--route", choices=(GENERATE, STOCK), default=GENERATE)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON: lists of token ids")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=0)
    known = parser.parse_args()
    load = Load(known)
    if known.requests:
        print(json.dumps(load.speed()), flush=True)
        return
    for line in sys.stdin:
        if line.startswith("answers"):
            newest = load.answers[-int(line.split()[1]) :]
            print(json.dumps([json.loads(answer) for answer in newest]), flush=True)
        else:
            print(json.dumps(load.counted()), flush=True)
    load.stop()


if __name__ == "__main__":
    main()
