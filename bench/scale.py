"""Measure the limits of a hub under many environments: python bench/scale.py --envs 1000 --groups-per-s 50

Every simulated environment has a connection of its own, asks for its standing as often as a real one does and posts its
part of the groups, in binary form. One trainer leases and acknowledges batches without computing. Load and hub share
the machine. Prints a line for each number of environments, as Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import uvloop
from hub import serving
from hub_load import Connection, register

from treadle.envs.serving.stream import poll_interval
from treadle.wire.groups import BINARY_TYPE, ScoredGroup, join_groups, pack_group
from treadle.wire.hub import EnvState

GROUP_SIZE, TOKENS = 8, 256
GROUPS_PER_BATCH = 64
WARM_UP_S = 3.0
OURS = ["-m", "treadle", "hub", "--queue-limit-groups", "1000000"]


@dataclass
class Counts:
    standing_s: list[float] = field(default_factory=list)
    post_s: list[float] = field(default_factory=list)
    lease_s: list[float] = field(default_factory=list)
    num_trained: int = 0


def packed_groups(env_ids: Sequence[int]) -> dict[int, bytes]:
    chance = random.Random(0)
    tokens = [[chance.randrange(128_000) for _ in range(TOKENS)] for _ in range(GROUP_SIZE)]
    half = TOKENS // 2
    group = ScoredGroup(
        tokens=tokens,
        masks=[[-100] * half + row[half:] for row in tokens],
        scores=[float(i % 2) for i in range(GROUP_SIZE)],
        inference_logprobs=[[1.0] * half + [-chance.expovariate(1.0) for _ in row[half:]] for row in tokens],
    )
    return {env_id: pack_group(msgspec.structs.replace(group, env_id=env_id)) for env_id in env_ids}


async def environment(port: int, env_id: int, group: bytes, group_every_s: float, until: float, counts: Counts) -> None:
    chance = random.Random(env_id)
    connection = Connection(port)
    number, interval_s = 0, chance.random()  # they do not ask all at once
    next_post = time.perf_counter() + chance.random() * group_every_s
    while True:
        await asyncio.sleep(interval_s)
        if time.perf_counter() >= until:
            break
        began = time.perf_counter()
        status, answer = await connection.call("GET", f"/v1/envs/{env_id}")
        counts.standing_s.append(time.perf_counter() - began)
        if status != 200:
            raise RuntimeError(f"standing: {status} {answer[:200]!r}")
        interval_s = poll_interval(msgspec.json.decode(answer, type=EnvState))
        if time.perf_counter() >= next_post:
            next_post += group_every_s
            began, number = time.perf_counter(), number + 1
            headers = f"Idempotency-Key: {env_id}-{number}\r\nContent-Type: {BINARY_TYPE}\r\n"
            status, answer = await connection.call("POST", "/v1/groups", join_groups([group]), headers)
            counts.post_s.append(time.perf_counter() - began)
            if status != 200:
                raise RuntimeError(f"post: {status} {answer[:200]!r}")
    connection.close()


async def trainer(port: int, first_step: int, until: float, counts: Counts) -> int:
    connection = Connection(port)
    step = first_step
    while time.perf_counter() < until:
        began = time.perf_counter()
        ask = json.dumps({"step": step, "holder": "bench", "wait_s": 0.5}).encode()
        status, answer = await connection.call("POST", "/v1/lease", ask)
        if status != 200:
            raise RuntimeError(f"lease: {status} {answer[:200]!r}")
        batch = json.loads(answer)["batch"]
        if batch is None:
            continue
        counts.lease_s.append(time.perf_counter() - began)
        counts.num_trained += len(batch["groups"])
        done = json.dumps({"token": batch["token"]}).encode()
        await connection.call("POST", f"/v1/batches/{step}/ack", done)
        step += 1
    connection.close()
    return step


async def register_environments(port: int, num_envs: int) -> list[int]:
    connection = Connection(port)
    ids = []
    for number in range(num_envs):
        env = {"max_token_length": TOKENS, "desired_name": f"env{number}", "weight": 1.0, "group_size": GROUP_SIZE}
        _, answer = await connection.call("POST", "/register-env", json.dumps(env).encode())
        ids.append(json.loads(answer)["env_id"])
    connection.close()
    return ids


async def measure(port: int, num_envs: int, groups_per_s: float, seconds: float) -> tuple[float, Counts]:
    """Seconds until all environments were registered, and the counts after the warm-up."""
    await register(port, GROUPS_PER_BATCH * GROUP_SIZE)
    began = time.perf_counter()
    ids = await register_environments(port, num_envs)
    registered_s = time.perf_counter() - began
    bodies = packed_groups(ids)
    step, counts = 0, Counts()
    for span_s in (WARM_UP_S, seconds):
        counts, until = Counts(), time.perf_counter() + span_s
        environments = [
            environment(port, env_id, group, num_envs / groups_per_s, until, counts) for env_id, group in bodies.items()
        ]
        step, *_ = await asyncio.gather(trainer(port, step, until, counts), *environments)
    return registered_s, counts


def milliseconds(values: Sequence[float], share: float) -> str:
    ordered = sorted(values)
    return f"{1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]:.0f}" if ordered else "-"


def main() -> None:
    import sys

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--groups-per-s", type=float, default=50.0, help="of all environments together")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--store", help="as of treadle hub; default: SQLite in a temporary folder")
    options = parser.parse_args()
    store = ["--store", options.store] if options.store else []
    names = (
        "environments",
        "registered in",
        "standings/s",
        "p50, p99 ms",
        "posts/s",
        "p50, p99 ms",
        "trained groups/s",
    )
    names += ("hub's CPU", "MB")
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for num_envs in options.envs:
        with serving([sys.executable, *OURS, *store]) as server:
            cpu = server.process.cpu_times
            registered_s, counts = uvloop.run(measure(server.port, num_envs, options.groups_per_s, options.seconds))
            used = cpu()
            share = (used.user + used.system) / (time.time() - server.process.create_time())
            rates = (len(counts.standing_s), len(counts.post_s), counts.num_trained)
            standing, posted, trained = (count / options.seconds for count in rates)
            print(
                f"| {num_envs} | {registered_s:.1f} s | {standing:.0f} "
                f"| {milliseconds(counts.standing_s, 0.5)}, {milliseconds(counts.standing_s, 0.99)} | {posted:.1f} "
                f"| {milliseconds(counts.post_s, 0.5)}, {milliseconds(counts.post_s, 0.99)} | {trained:.1f} "
                f"| {share:.0%} | {server.resident_mb():.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
