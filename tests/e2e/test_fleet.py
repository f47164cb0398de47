"""Three real engines, one killed again and again while two join and leave: no group is lost, trained twice, or sampled
by an engine that had not proved its version. One that joins does not see the folder of the run."""

from __future__ import annotations

import json
import math
import re
import signal
import sqlite3
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.processes import end_of, environment, free_port, running, without_folder
from tests.e2e.runs import command, metrics_of, newest_run
from tests.tiny_model import write_tiny_model
from treadle import faults

# Strictly on-policy (max_age 0): the trainer computes the logprob of every trained token under the weights that it
# published last, so a token of any other weights shows as a difference.
SETTINGS = (
    "--env.name", "echo", "--env.task", "", "--env.group-size", "16", "--env.max-token-length", "2",
    "--env.num-eval", "0",
    "--train.batch-size", "160", "--train.lr", "2e-3", "--train.checkpoint-interval", "0",
    "--engine.dtype", "float32", "--engine.max-num-seqs", "16", "--max-age", "0", "--plain",
    "--steps", "100000", "--engines", "3",
)  # fmt: skip
BROADCAST = ("--train.use-shared-memory", "true")
LARGEST_DIFFERENCE = 1e-3  # of logprobs in float32
# As on machines of their own: an engine takes one group at a time, and computing leaves the processors idle.
SLOW_ENGINES = "engine:step:0.1:slow"
OWN = frozenset({"engine", "engine-1", "engine-2"})  # that the run starts
READY_S = 300.0
BUSY_S = 60.0
LONG_S = 60.0  # enough to measure a rate
OUTPUT = "launcher.log"


@dataclass
class Fleet:
    """A run with three engines, as seen from outside."""

    hub_url: str
    folder: Path
    process: subprocess.Popen[bytes]
    seen: list[tuple[float, int, int]] = field(default_factory=list)  # (seconds, engines that serve, steps)
    serving: frozenset[str] = frozenset()  # names of engines, when they were seen last
    served: set[str] = field(default_factory=set)  # names of engines, and ids, that ever served
    killed: list[str] = field(default_factory=list)
    num_killed_busy: int = 0  # while they had requests

    def engines(self) -> list[dict[str, Any]]:
        return httpx.get(f"{self.hub_url}/v1/engines", timeout=60).json()["engines"]

    def look(self) -> list[dict[str, Any]]:
        """The engines that serve."""
        assert self.process.poll() is None, end_of(self.folder / OUTPUT)
        serving = [row for row in self.engines() if row["state"] == "serving"]
        self.serving = frozenset(row["name"] for row in serving)
        self.served |= {row[key] for row in serving for key in ("name", "engine_id")}
        step = httpx.get(f"{self.hub_url}/v1/status", timeout=60).json()["step"]
        self.seen.append((time.monotonic(), len(serving), step))
        return serving

    def watch(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look()
            time.sleep(0.5)

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + READY_S
        while not is_so():
            log = newest_run(self.folder) / "logs" / "trainer.log"
            assert time.monotonic() < deadline, f"no {what} within {READY_S} s:\n{end_of(log)}"
            try:
                self.watch(0.5)
            except httpx.TransportError:  # the hub starts
                time.sleep(0.5)

    def kill_one(self) -> None:
        """kill -9 of one of the engines that the run started and that serve, in turn, while it generates."""
        self.wait_until(lambda: len(self.serving) >= 2 and not OWN.isdisjoint(self.serving), "two engines that serve")
        serving = {row["name"]: row["url"] for row in self.look()}  # its id counts among those that served
        name = min((name for name in serving if name.startswith("engine")), key=self.killed.count)
        self.num_killed_busy += is_soon_busy(serving[name])
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):  # one that was killed, and is not started again yet
                words = child.cmdline()
                if "--name" in words and words[words.index("--name") + 1] == name:
                    child.kill()
                    self.killed.append(name)

    def rates(self) -> dict[int, tuple[float, float]]:
        """By the number of engines that served: seconds, and steps per second."""
        seconds: dict[int, float] = defaultdict(float)
        steps: dict[int, int] = defaultdict(int)
        for (began, serving, step), (ended, _, later) in zip(self.seen, self.seen[1:], strict=False):
            seconds[serving] += ended - began
            steps[serving] += later - step
        return {number: (seconds[number], steps[number] / seconds[number]) for number in sorted(seconds)}


def is_soon_busy(url: str) -> bool:
    """Return as soon as the engine has requests, but within BUSY_S."""
    deadline = time.monotonic() + BUSY_S
    with httpx.Client(timeout=60) as client:
        while time.monotonic() < deadline:
            if re.search(r"engine_requests_running [1-9]", client.get(f"{url}/metrics").text):
                return True
            time.sleep(0.01)
    return False


def join(fleet: Fleet, name: str, stack: ExitStack, *, sees_run: bool) -> ExitStack:
    """Another engine on this machine, which leaves when the returned stack is closed."""
    leaving, flags = stack.enter_context(ExitStack()), ["--join", fleet.hub_url, "--name", name]
    flags += ["--port", str(free_port())]
    hidden = None if sees_run else without_folder(fleet.folder)
    if not sees_run and hidden is None:
        flags += ["--adapter-root", str(fleet.folder.parent / "tiny")]
    leaving.enter_context(running("engine", *flags, log=fleet.folder / f"{name}.log", inside=hidden or ()))
    return leaving


def disturb(folder: Path, flags: Sequence[str], *, num_kills: int, every_s: float) -> Fleet:
    """Run a fleet, kill one engine after the other, let two more join and leave, and end with Ctrl-C."""
    model, hub_port = write_tiny_model(folder / "tiny"), free_port()
    # A port of its own: other runs take the default ones while an engine is dead.
    ports = ("--hub.port", str(hub_port), "--engine.port", str(free_port()))
    words = command(folder / "runs", "--model", str(model), *SETTINGS, *flags, *ports)
    (folder / "runs").mkdir()
    with (folder / "runs" / OUTPUT).open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, env=environment())
    fleet = Fleet(f"http://127.0.0.1:{hub_port}", folder / "runs", process)
    try:
        with ExitStack() as stack:
            fleet.wait_until(lambda: fleet.serving == OWN, "three engines that serve")
            joined = [join(fleet, name, stack, sees_run=name == "joined-1") for name in ("joined-1", "joined-2")]
            for number in range(num_kills):
                fleet.kill_one()
                fleet.watch(every_s)
                if "joined-1" in fleet.served and number >= num_kills // 2:
                    joined[0].close()
            fleet.wait_until(lambda: {"joined-1", "joined-2"} <= fleet.served, "engines that have joined")
            joined[0].close()
            stays = OWN | {"joined-2"}
            fleet.wait_until(lambda: fleet.serving == stays, "return of all three, beside the one that has stayed")
            joined[1].close()
            fleet.watch(3.0)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 130, end_of(folder / "runs" / OUTPUT)
    finally:
        process.kill()
        process.wait()
    return fleet


def assert_nothing_lost_or_doubled(run: Path) -> None:
    with closing(sqlite3.connect(run / "hub.sqlite")) as store:
        states = dict(store.execute("SELECT state, count(*) FROM groups GROUP BY state"))
        items = Counter(item for (item,) in store.execute("SELECT item FROM groups"))
        batches = store.execute("SELECT step, group_ids FROM batches WHERE state = 'trained'").fetchall()
    trained = Counter(number for _, numbers in batches for number in json.loads(numbers))
    print(f"groups {states}, batches trained {len(batches)}")
    assert set(states) <= {"trained", "queued", "leased"}
    assert max(items.values()) == 1, "no item was scored twice"
    assert set(items) == set(range(len(items))), "and none was left out"
    assert max(trained.values()) == 1
    assert sorted(step for step, _ in batches) == list(range(1, len(batches) + 1))
    assert len(trained) == states["trained"] == 10 * len(batches)


def assert_all_sampled_from_proved_weights(run: Path) -> None:
    found = [row.get("sampling/sampling_logp_difference/max") for row in metrics_of(run)]
    differences = [value for value in found if value is not None and not math.isnan(value)]  # steps with a signal
    print(f"largest difference of a logprob in {len(differences)} steps: {max(differences):.2g}")
    assert len(differences) >= 5
    assert max(differences) < LARGEST_DIFFERENCE


@pytest.mark.parametrize(
    ("flags", "num_kills", "every_s", "num_rates"),
    [
        pytest.param((), 3, 2.0, 0, id="one minute"),
        pytest.param(BROADCAST, 3, 2.0, 0, marks=pytest.mark.full, id="one minute, broadcast"),
        pytest.param((), 20, 30.0, 2, marks=pytest.mark.full, id="ten minutes"),
    ],
)
def test_a_fleet_loses_no_group_while_engines_die_and_join(tmp_path, monkeypatch, flags, num_kills, every_s, num_rates):
    """`num_rates`: for how many numbers of engines the throughput is compared, at least; 0: not at all."""
    monkeypatch.setenv(faults.VARIABLE, SLOW_ENGINES)
    fleet = disturb(tmp_path, flags, num_kills=num_kills, every_s=every_s)
    run = newest_run(fleet.folder)
    num_starts = len({name for name in fleet.served if len(name) == 16})
    print(f"killed {fleet.killed}, {fleet.num_killed_busy} with requests; {num_starts} starts served")
    rates = fleet.rates()
    for number, (seconds, rate) in rates.items():
        print(f"{number} engines for {seconds:.0f} s: {rate:.2f} steps/s")
    assert len(fleet.killed) == num_kills
    assert fleet.num_killed_busy >= num_kills / 2
    assert num_starts == 3 + 2 + num_kills, "each that was killed has served again"
    way = " group_formed " if flags else " files_sent "  # to the engine that does not see the run
    sent = [line for line in (run / "logs" / "trainer.log").read_text().splitlines() if way in line]
    print(f"{len(sent)} times{way}, the last: {sent[-1:]}")
    assert sent
    if num_rates:
        seen_long = [rate for seconds, rate in rates.values() if seconds >= LONG_S]
        assert len(seen_long) >= num_rates, "numbers of engines with a rate"
        assert seen_long == sorted(seen_long), "more engines, more steps"
    assert_nothing_lost_or_doubled(run)
    assert_all_sampled_from_proved_weights(run)
