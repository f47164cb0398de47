"""Compare the hub with Atropos' run-api on one machine: python bench/hub.py --run-api .venv-atropos/bin/run-api

Prints a table as Markdown. Both servers get the same bytes from the same clients; nothing else should run meanwhile.
With --store URL: the throughput of our hub on SQLite beside that on the PostgreSQL database, of one hub and of two. The
queue in the database is renamed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop
from hub_load import Connection, Result, group_body, load, register

Rows = list[tuple[str, str, str, str]]  # what, run-api, treadle hub, ratio


@dataclass
class Server:
    port: int
    process: psutil.Process

    def resident_mb(self) -> float:
        """Resident memory of the process and its children."""
        family = [self.process, *self.process.children(recursive=True)]
        return sum(member.memory_info().rss for member in family) / 1e6


@contextlib.contextmanager
def serving(command: list[str]) -> Iterator[Server]:
    """Start a server in an empty folder, wait until it answers, and stop it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="bench-hub-"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], cwd=folder, stdout=log, stderr=subprocess.STDOUT
    )
    try:
        for _ in range(300):
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                if asyncio.run(Connection(port).call("GET", "/status"))[0] == 200:
                    break
            time.sleep(0.1)
        yield Server(port, psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait()
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


# ---- measurements


async def fill(port: int, num_groups: int, make: Callable[[int], bytes], at_once: int = 200) -> None:
    connection = Connection(port)
    for start in range(0, num_groups, at_once):
        count = min(at_once, num_groups - start)
        body = b"[" + b",".join(make(start + i) for i in range(count)) + b"]"
        status, answer = await connection.call("POST", "/scored_data_list", body)
        if status != 200:
            raise RuntimeError(f"{status} {answer[:200]!r}")
    connection.close()


async def register_envs(port: int, minimums: list[float | None]) -> None:
    connection = Connection(port)
    for number, minimum in enumerate(minimums):
        env = {
            "max_token_length": 512, "desired_name": f"env{number}", "weight": 1.0, "group_size": 4,
            "min_batch_allocation": minimum,
        }  # fmt: skip
        await connection.call("POST", "/register-env", json.dumps(env).encode())
    connection.close()


async def timed(port: int, method: str, path: str, body: bytes = b"", times: int = 1) -> list[float]:
    """Milliseconds of each call."""
    connection = Connection(port)
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        status, _ = await connection.call(method, path, body)
        taken.append(1000 * (time.perf_counter() - began))
        if status != 200:
            raise RuntimeError(f"{path}: {status}")
    connection.close()
    return taken


def throughput(command: list[str], seconds: float) -> Result:
    bodies = [group_body(8, 1024, seed) for seed in range(8)]
    with serving(command) as server:
        return uvloop.run(load(server.port, num_clients=16, bodies=bodies, seconds=seconds, batch_size=64))


def growth_mb_per_group(command: list[str], num_groups: int) -> tuple[float, float]:
    """(megabytes per waiting group, megabytes at the end), without a trainer that takes groups."""
    body = group_body(8, 1024)
    with serving(command) as server:
        asyncio.run(register(server.port, 64))
        asyncio.run(fill(server.port, 40, lambda _: body, at_once=8))  # reach the working size first
        before = server.resident_mb()
        asyncio.run(fill(server.port, num_groups, lambda _: body, at_once=8))
        after = server.resident_mb()
    return (after - before) / num_groups, after


def at_depth(command: list[str], depth: int, minimums: list[float | None]) -> tuple[float, float]:
    """(ms of /status-env, ms of the first /batch) with `depth` small groups waiting."""
    bodies = [group_body(4, 32, env_id=number) for number in range(len(minimums))]
    with serving(command) as server:
        asyncio.run(register(server.port, 64))
        asyncio.run(register_envs(server.port, minimums))
        asyncio.run(fill(server.port, depth, lambda i: bodies[i % len(bodies)], at_once=500))
        if minimums[0] is not None:  # a heartbeat, as a live environment sends it ten times a second
            asyncio.run(timed(server.port, "GET", "/status-env", b'{"env_id":0}'))
        status = statistics.median(asyncio.run(timed(server.port, "GET", "/status-env", b'{"env_id":0}', times=9)))
        (batch,) = asyncio.run(timed(server.port, "GET", "/batch"))
    return status, batch


# ---- the table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-api", type=Path, help="the real one, of atroposlib 0.4.0; absent: only ours is measured")
    parser.add_argument(
        "--store", default="", help="compare SQLite with this PostgreSQL database: postgresql://HOST/NAME"
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeat", type=int, default=3, help="throughput runs of each; the median is shown")
    parser.add_argument("--quick", action="store_true", help="small depths, one run: a check that it works")
    options = parser.parse_args()
    ours = [sys.executable, "-m", "treadle", "hub", "--queue-limit-groups", "1000000"]
    theirs = [str(options.run_api.resolve())] if options.run_api else None
    repeat, seconds = (1, 3.0) if options.quick else (options.repeat, options.seconds)
    if options.store:
        print_stores(ours, options.store, seconds, repeat)
        return
    rows: Rows = []
    rows += throughput_rows(ours, theirs, seconds, repeat)
    rows += memory_rows(ours, theirs, 100 if options.quick else 1000)
    depths = (100, 1_000) if options.quick else (100, 1_000, 10_000, 100_000)
    rows += depth_rows(ours, theirs, depths, [None], "", most_theirs=10_000)
    rows += depth_rows(ours, theirs, depths, [0.5, None], ", minimums", most_theirs=3_000)
    print(
        f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n"
    )
    print("| | run-api | treadle hub | |\n|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def print_stores(ours: list[str], store: str, seconds: float, repeat: int) -> None:
    """Runs alternate, so that noise on the machine affects all."""
    results: dict[str, list[Result]] = {"SQLite": [], "PostgreSQL": [], "PostgreSQL, two hubs (sum)": []}
    on_server = [*ours, "--store", store]
    for turn in range(repeat):
        note(f"stores {turn + 1}/{repeat}")
        results["SQLite"].append(throughput(ours, seconds))
        results["PostgreSQL"].append(throughput([*on_server, "--fresh", "true"], seconds))
        results["PostgreSQL, two hubs (sum)"].append(throughput_of_two(on_server, seconds))
    print(
        "| 16 clients, groups of 8 x 1024 tokens | posted groups/s | delivered groups/s | POST p50, ms | POST p99, ms |"
    )
    print("|---|---|---|---|---|")
    for name, runs in results.items():
        figures = (
            [run.posted / run.seconds for run in runs],
            [run.delivered / run.seconds for run in runs],
            [run.percentile_ms(run.post_s, 0.5) for run in runs],
            [run.percentile_ms(run.post_s, 0.99) for run in runs],
        )
        print(f"| {name} | {' | '.join(f'{statistics.median(values):.0f}' for values in figures)} |")


def throughput_of_two(command: list[str], seconds: float) -> Result:
    """Two hubs with half of the clients each, and a trainer at each."""
    bodies = [group_body(8, 1024, seed) for seed in range(8)]

    async def both(ports: list[int]) -> list[Result]:
        calls = [load(port, num_clients=8, bodies=bodies, seconds=seconds, batch_size=64) for port in ports]
        return await asyncio.gather(*calls)

    with serving([*command, "--fresh", "true"]) as first, serving(command) as second:
        one, other = uvloop.run(both([first.port, second.port]))
    return Result(
        seconds=max(one.seconds, other.seconds),
        posted=one.posted + other.posted,
        delivered=one.delivered + other.delivered,
        post_s=one.post_s + other.post_s,
    )


def throughput_rows(ours: list[str], theirs: list[str] | None, seconds: float, repeat: int) -> Rows:
    """Runs alternate, so that noise on the machine affects both."""
    results: dict[str, list[Result]] = {"ours": [], "theirs": []}
    for turn in range(repeat):
        for name, command in (("theirs", theirs), ("ours", ours)):
            if command is not None:
                note(f"throughput {turn + 1}/{repeat}: {name}")
                results[name].append(throughput(command, seconds))
    delivered = {name: [r.delivered / r.seconds for r in runs] for name, runs in results.items()}
    p50 = {name: [r.percentile_ms(r.post_s, 0.5) for r in runs] for name, runs in results.items()}
    p99 = {name: [r.percentile_ms(r.post_s, 0.99) for r in runs] for name, runs in results.items()}
    return [
        compared("delivered groups/s (16 clients, 8 x 1024 tokens)", delivered, "{:.1f}", higher_is_better=True),
        compared("POST p50, ms", p50, "{:.0f}"),
        compared("POST p99, ms", p99, "{:.0f}"),
    ]


def memory_rows(ours: list[str], theirs: list[str] | None, num_groups: int) -> Rows:
    note("memory")
    mine, total = growth_mb_per_group(ours, num_groups)
    text = f"{mine:.3f} ({total:.0f} MB in all, validators included)"
    if theirs is None:
        return [(f"MB per waiting group ({num_groups} waiting)", "", text, "")]
    other, other_total = growth_mb_per_group(theirs, num_groups)
    return [(f"MB per waiting group ({num_groups} waiting)", f"{other:.2f} ({other_total:.0f} MB in all)", text, "")]


def depth_rows(
    ours: list[str], theirs: list[str] | None, depths: tuple[int, ...], minimums: list[float | None], label: str,
    *, most_theirs: int,
) -> Rows:  # fmt: skip
    rows: Rows = []
    for depth in depths:
        note(f"depth {depth}{label}")
        mine = at_depth(ours, depth, minimums)
        other = at_depth(theirs, depth, minimums) if theirs and depth <= most_theirs else None
        for what, index in (("/status-env", 0), ("first /batch", 1)):
            shown = f"{other[index]:.1f}" if other else "not run"
            ratio = f"{other[index] / mine[index]:.0f}x" if other else ""
            rows.append((f"{what}, ms, {depth:,} waiting{label}", shown, f"{mine[index]:.1f}", ratio))
    return rows


def compared(
    what: str, values: dict[str, list[float]], form: str, *, higher_is_better: bool = False
) -> tuple[str, str, str, str]:
    mine, other = statistics.median(values["ours"]), values["theirs"]
    every = " / ".join(form.format(value) for value in values["ours"])
    if not other:
        return what, "", f"**{form.format(mine)}** ({every})", ""
    theirs = statistics.median(other)
    ratio = mine / theirs if higher_is_better else theirs / mine
    shown = f"{form.format(theirs)} ({' / '.join(form.format(value) for value in other)})"
    return what, shown, f"**{form.format(mine)}** ({every})", f"{ratio:.1f}x"


def note(text: str) -> None:
    print(f"-- {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
