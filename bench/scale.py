"""Measure the limits of a hub under many environments and engines: python bench/scale.py --envs 1000 --engines 64

Every simulated environment has three connections, as a real one: for its status polls and its groups, for its reports,
and for the table of engines, which it reads as often as a real one. Every simulated engine reports to the hub. One
trainer leases and acknowledges batches without computing; after each it posts verdicts on all engines, as a real one
that publishes to them. Load and hubs share the machine. Prints a line for each number of environments, as Markdown.

    python bench/scale.py --envs 1000 --engines 64 --hubs 2 --store postgresql://USER@HOST/DATABASE

--hubs: environments and engines are divided among the hubs; the trainer uses the first. The queue is renamed.
--per-call: instead, the CPU time of the hub for a call of each kind. It hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import uvloop
from hub import Server, serving
from hub_load import Connection, register

from treadle.envs.engine_fleet import PROOF_POLL_S
from treadle.envs.serving.stream import poll_interval
from treadle.sync.fleet import REFRESH_EVERY_S
from treadle.watch.watchdog import REPORT_EVERY_S
from treadle.wire.engines import (
    TABLE_POLL_S,
    Engines,
    EngineVerdict,
    EngineVerdicts,
    ServedEngine,
    table_interval,
)
from treadle.wire.groups import BINARY_TYPE, ScoredGroup, join_groups, pack_group
from treadle.wire.hub import EnvState, ProcessReport, WaitReport

GROUP_SIZE, TOKENS = 8, 256
GROUPS_PER_BATCH = 64
WARM_UP_S = 6.0
CALLS = 2000  # of a kind, with --per-call
PROOFS_S = 1.0  # from the verification of a version in the first engine to that in the last one
OURS = ["-m", "treadle", "hub", "--queue-limit-groups", "1000000"]
LIKE_AIOHTTP = "Accept-Encoding: gzip, deflate\r\n"


@dataclass
class Counts:
    status_s: list[float] = field(default_factory=list)
    post_s: list[float] = field(default_factory=list)
    report_s: list[float] = field(default_factory=list)
    table_s: list[float] = field(default_factory=list)
    lease_s: list[float] = field(default_factory=list)
    verdict_s: list[float] = field(default_factory=list)
    num_trained: int = 0


@dataclass
class Load:
    """What all simulated processes of one measurement share."""

    until: float
    group_every_s: float  # of each environment
    num_engines: int
    counts: Counts = field(default_factory=Counts)
    version: int = 0  # that the trainer published last
    proved: dict[int, int] = field(default_factory=dict)  # version by engine

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self.until

    def verdicts(self) -> bytes:
        engines = [
            EngineVerdict(
                engine_id=f"start-{engine}", url=engine_url(engine), state="serving", proved_since=0,
                proved_version=self.proved.get(engine, 0), proved_at=1.8e9,
            )
            for engine in range(self.num_engines)
        ]  # fmt: skip
        return msgspec.json.encode(EngineVerdicts(engines=engines))


def engine_url(engine: int) -> str:
    return f"http://10.0.{engine // 8}.{engine % 8}:9001"


async def timed(
    connection: Connection, spent_s: list[float], method: str, path: str, body: bytes = b"", headers: str = ""
) -> bytes:
    began = time.perf_counter()
    try:
        status, answer = await connection.call(method, path, body, headers)
    except (asyncio.IncompleteReadError, ConnectionError):  # the hub hung up: the load was late
        connection.close()
        status, answer = await connection.call(method, path, body, headers)
    spent_s.append(time.perf_counter() - began)
    if status != 200:
        raise RuntimeError(f"{method} {path}: {status} {answer[:200]!r}")
    return answer


# ---- simulated processes


class Environment:
    def __init__(self, load: Load, port: int, env_id: int, group: bytes) -> None:
        self._load = load
        self._port = port
        self._env_id = env_id
        self._body = join_groups([group])
        self._chance = random.Random(env_id)
        self._num_present = 1
        self._table = Connection(port)
        self._read_s, self._is_reading = -1e9, False
        self._seen: dict[int, int] = {}  # verified versions, as the table had them at the last read

    async def run(self) -> None:
        await asyncio.gather(self._work(), self._report(), self._watch_table())

    async def _work(self) -> None:
        load, connection = self._load, Connection(self._port)
        number, interval_s = 0, self._chance.random()  # they do not ask all at once
        next_post = time.perf_counter() + self._chance.random() * load.group_every_s
        while True:
            await asyncio.sleep(interval_s)
            if load.is_over:
                break
            answer = await timed(connection, load.counts.status_s, "GET", f"/v1/envs/{self._env_id}")
            status = msgspec.json.decode(answer, type=EnvState)
            self._num_present, interval_s = status.num_present, poll_interval(status)
            if time.perf_counter() >= next_post:
                next_post += load.group_every_s
                await self._wait_for_proof(self._chance.randrange(max(1, load.num_engines)))
                number += 1
                headers = f"Idempotency-Key: {self._env_id}-{number}\r\nContent-Type: {BINARY_TYPE}\r\n"
                await timed(connection, load.counts.post_s, "POST", "/v1/groups", self._body, headers)
        connection.close()

    async def _wait_for_proof(self, engine: int) -> None:
        """An answer of an engine is used when the table says that the published version is verified in it."""
        load = self._load
        while load.num_engines and self._seen.get(engine, 0) < load.version and not load.is_over:
            await asyncio.sleep(PROOF_POLL_S)
            await self._read_table(PROOF_POLL_S)

    async def _watch_table(self) -> None:
        """As with requests in flight all the time."""
        await asyncio.sleep(self._chance.random())
        while self._load.num_engines and not self._load.is_over:
            await self._read_table(TABLE_POLL_S)
            await asyncio.sleep(TABLE_POLL_S)
        self._table.close()

    async def _read_table(self, wanted_s: float) -> None:
        now_s = time.perf_counter()
        if self._is_reading or now_s - self._read_s < table_interval(wanted_s, self._num_present):
            return
        self._is_reading = True
        await timed(self._table, self._load.counts.table_s, "GET", "/v1/engines", headers=LIKE_AIOHTTP)
        self._read_s, self._is_reading, self._seen = time.perf_counter(), False, dict(self._load.proved)

    async def _report(self) -> None:
        await send_reports(self._load, self._port, lambda: env_report(self._env_id))


def env_report(env_id: int) -> ProcessReport:
    flights = [
        WaitReport(what=f"item {item} to be sampled and scored", seconds=4.2, holding="1 group") for item in range(4)
    ]
    counts = ("finished", "sent", "equal", "all_right", "all_wrong", "asked_again", "in_flight", "undelivered")
    return ProcessReport(
        kind="env", name=f"env{env_id}", machine="m", pid=env_id, env_id=env_id,
        state="engine 38 % busy (14.2k tokens/s): 4 groups in flight, limited by max_age 1", memory_bytes=10**8,
        counts={f"groups_{name}": 12.0 for name in counts}, waits=flights,
    )  # fmt: skip


def engine_report(number: int, version: int) -> ProcessReport:
    served = ServedEngine(
        engine_id=f"start-{number}", url=engine_url(number), model="/shared/models/Qwen2.5-72B-Instruct",
        dtype="bfloat16", max_model_len=8192, max_num_seqs=128, adapter_root="/shared/runs/run-1",
    )  # fmt: skip
    counts = {"generated_tokens": 1e9, "running": 96.0, "waiting": 4.0}
    return ProcessReport(
        kind="engine", name=f"engine-{number}", machine=f"m{number // 8}", pid=10_000 + number, state="generating",
        policy_version=version, memory_bytes=10**10, counts=counts, serves=served,
    )  # fmt: skip


async def send_reports(load: Load, port: int, report: Callable[[], ProcessReport]) -> None:
    """As the watchdog of a process does."""
    connection = Connection(port)
    await asyncio.sleep(random.random() * REPORT_EVERY_S)
    while not load.is_over:
        await timed(connection, load.counts.report_s, "POST", "/v1/reports", msgspec.json.encode(report()))
        await asyncio.sleep(REPORT_EVERY_S)
    connection.close()


class Trainer:
    def __init__(self, load: Load, port: int) -> None:
        self._load = load
        self._port = port
        self._verdicts = Connection(port)
        self._posting = asyncio.Lock()

    async def run(self) -> None:
        report = ProcessReport(kind="trainer", name="trainer", machine="m", pid=9_999, state="training step 17")
        await asyncio.gather(self._work(), self._judge_engines(), send_reports(self._load, self._port, lambda: report))

    async def _work(self) -> None:
        load, connection, step = self._load, Connection(self._port), 0
        while not load.is_over:
            ask = json.dumps({"step": step, "holder": "bench", "wait_s": 0.5}).encode()
            spent_s: list[float] = []
            answer = await timed(connection, spent_s, "POST", "/v1/lease", ask)
            batch = json.loads(answer)["batch"]
            if batch is None:
                continue
            load.counts.lease_s += spent_s
            load.counts.num_trained += len(batch["groups"])
            await self._publish()
            done = json.dumps({"token": batch["token"]}).encode()
            await timed(connection, [], "POST", f"/v1/batches/{step}/ack", done)
            step += 1
        connection.close()

    async def _publish(self) -> None:
        """The new version is verified in one engine after the other, and verdicts are posted after each."""
        load = self._load
        load.version += 1
        for number in range(load.num_engines):
            await asyncio.sleep(PROOFS_S / load.num_engines)
            load.proved[number] = load.version
            await self._post_verdicts()

    async def _judge_engines(self) -> None:
        while self._load.num_engines and not self._load.is_over:
            await self._post_verdicts()
            await asyncio.sleep(REFRESH_EVERY_S)

    async def _post_verdicts(self) -> None:
        load = self._load
        async with self._posting:
            await timed(self._verdicts, load.counts.verdict_s, "POST", "/v1/engines/verdicts", load.verdicts())


# ---- measurement


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


async def register_environments(port: int, num_envs: int) -> list[int]:
    connection = Connection(port)
    ids = []
    for number in range(num_envs):
        env = {"max_token_length": TOKENS, "desired_name": f"env{number}", "weight": 1.0, "group_size": GROUP_SIZE}
        answer = await timed(connection, [], "POST", "/register-env", json.dumps(env).encode())
        ids.append(json.loads(answer)["env_id"])
    connection.close()
    return ids


async def serving_engines(port: int) -> int:
    """How many engines the environments of this hub may ask."""
    connection = Connection(port)
    answer = await timed(connection, [], "GET", "/v1/engines")
    connection.close()
    return sum(entry.state == "serving" for entry in msgspec.json.decode(answer, type=Engines).engines)


@dataclass
class Measured:
    registered_s: float
    counts: Counts
    cpu: list[float]  # cores that each hub's process used
    workers_cpu: list[float]  # and its validation workers
    num_serving: list[int]  # engines in the table of each hub


async def measure(servers: Sequence[Server], options: argparse.Namespace, num_envs: int) -> Measured:
    await register(servers[0].port, GROUPS_PER_BATCH * GROUP_SIZE)
    began = time.perf_counter()
    ids = await register_environments(servers[0].port, num_envs)
    registered_s = time.perf_counter() - began
    load = Load(
        until=time.perf_counter() + WARM_UP_S + options.seconds,
        group_every_s=num_envs / options.groups_per_s,
        num_engines=options.engines,
    )
    ports = [server.port for server in servers]
    environments = [
        Environment(load, ports[place % len(ports)], env_id, group).run()
        for place, (env_id, group) in enumerate(packed_groups(ids).items())
    ]
    engines = [
        send_reports(load, ports[number % len(ports)], lambda number=number: engine_report(number, load.version))
        for number in range(options.engines)
    ]

    async def read_cpu() -> tuple[list[float], list[float]]:
        await asyncio.sleep(WARM_UP_S)
        load.counts = Counts()
        before = [cpu_s(server) for server in servers]
        await asyncio.sleep(options.seconds - 1.0)
        after = [cpu_s(server) for server in servers]
        used = [
            ((b[0] - a[0]) / (options.seconds - 1.0), (b[1] - a[1]) / (options.seconds - 1.0))
            for a, b in zip(before, after, strict=True)
        ]
        return [own for own, _ in used], [workers for _, workers in used]

    (cpu, workers_cpu), *_ = await asyncio.gather(read_cpu(), Trainer(load, ports[0]).run(), *environments, *engines)
    num_serving = [await serving_engines(port) for port in ports]
    return Measured(registered_s, load.counts, cpu, workers_cpu, num_serving)


async def cpu_per_call(server: Server, num_envs: int, num_engines: int) -> dict[str, float]:
    """Milliseconds of the hub's CPU time for a call of each kind, when all environments and engines have reported."""
    await register(server.port, GROUPS_PER_BATCH * GROUP_SIZE)
    ids = await register_environments(server.port, num_envs)
    load = Load(until=time.perf_counter() + 1e9, group_every_s=1.0, num_engines=num_engines)
    connection = Connection(server.port)
    reports = [env_report(env_id) for env_id in ids] + [engine_report(number, 0) for number in range(num_engines)]
    bodies = [msgspec.json.encode(report) for report in reports]
    group = join_groups([packed_groups(ids[:1])[ids[0]]])
    binary = f"Content-Type: {BINARY_TYPE}\r\n"
    found = {}
    for name, method, path, sent, headers in (
        ("report", "POST", "/v1/reports", bodies, ""),
        ("status poll", "GET", f"/v1/envs/{ids[0]}", [b""] * CALLS, ""),
        ("table", "GET", "/v1/engines", [b""] * CALLS, LIKE_AIOHTTP),
        ("verdicts", "POST", "/v1/engines/verdicts", [load.verdicts()] * 200, ""),
        ("post of a group", "POST", "/v1/groups", [group] * 200, binary),
    ):
        for _ in range(2):  # the first time as a warm-up
            before, _ = cpu_s(server)
            for body in sent:
                await timed(connection, [], method, path, body, headers)
            found[name] = 1000 * (cpu_s(server)[0] - before) / len(sent)
    connection.close()
    return found


def cpu_s(server: Server) -> tuple[float, float]:
    """Seconds of CPU time of the hub's process, and of its children."""
    times = [member.cpu_times() for member in (server.process, *server.process.children(recursive=True))]
    own, *others = [one.user + one.system for one in times]
    return own, sum(others)


def rate_and_times(values_s: Sequence[float], seconds: float) -> str:
    """ "498: 4, 78": calls per second, and milliseconds at 50 and 99 %."""
    if not values_s:
        return "-"
    ordered = sorted(values_s)
    middle, late = (1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99))
    return f"{len(ordered) / seconds:.0f}: {middle:.0f}, {late:.0f}"


COLUMNS = (
    "environments", "registered in", "status polls/s: p50, p99 ms", "reports/s", "table reads/s", "verdicts/s",
    "posts/s", "trained groups/s", "cores of each hub", "of its workers", "MB", "engines that serve",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--engines", type=int, default=0, help="0: environments read no table")
    parser.add_argument("--groups-per-s", type=float, default=20.0, help="of all environments together")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--store", help="as of treadle hub; default: SQLite in a temporary folder")
    parser.add_argument("--per-call", action="store_true")
    parser.add_argument("--hubs", type=int, default=1, help="several need --store postgresql://...")
    options = parser.parse_args()
    if options.hubs > 1 and not options.store:
        parser.error("--hubs needs a --store that several hubs can use")
    store = ["--store", options.store] if options.store else []
    if options.per_call:
        for num_envs in options.envs:
            with serving([sys.executable, *OURS, *store, *(["--fresh", "true"] if store else [])]) as server:
                found = uvloop.run(cpu_per_call(server, num_envs, options.engines))
            shown = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
            print(f"{num_envs} environments: ms of CPU per {shown}", flush=True)
        return
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for num_envs in options.envs:
        with contextlib.ExitStack() as stack:
            servers = []
            for number in range(options.hubs):
                fresh = ["--fresh", "true"] if store and number == 0 else []
                servers.append(stack.enter_context(serving([sys.executable, *OURS, *store, *fresh])))
            found = uvloop.run(measure(servers, options, num_envs))
            counts = found.counts
            calls = (counts.status_s, counts.report_s, counts.table_s, counts.verdict_s, counts.post_s)
            cells = [
                str(num_envs),
                f"{found.registered_s:.1f} s",
                *(rate_and_times(values_s, options.seconds) for values_s in calls),
                f"{counts.num_trained / options.seconds:.1f}",
                ", ".join(f"{share:.2f}" for share in found.cpu),
                ", ".join(f"{share:.2f}" for share in found.workers_cpu),
                ", ".join(f"{server.resident_mb():.0f}" for server in servers),
                ", ".join(map(str, found.num_serving)),
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
