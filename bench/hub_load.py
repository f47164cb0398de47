"""Generate load for a rollout API: clients that post groups without pauses, and one trainer that polls /batch.

It uses plain sockets and prepared bodies, so that the load itself costs little CPU time.
Both servers (`treadle hub`, Atropos' `run-api`) get the same bytes and the same polling.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field


@dataclass
class Result:
    seconds: float = 0.0
    posted: int = 0
    refused: int = 0
    delivered: int = 0
    batches: int = 0
    post_s: list[float] = field(default_factory=list)
    batch_s: list[float] = field(default_factory=list)

    def percentile_ms(self, values: list[float], share: float) -> float:
        ordered = sorted(values)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def group_body(num_sequences: int, num_tokens: int, seed: int = 0, env_id: int | None = None) -> bytes:
    """A group as posted by an Atropos environment: ids of a 128k vocabulary, half of each sequence trained."""
    rng = random.Random(seed)
    tokens = [[rng.randrange(128_000) for _ in range(num_tokens)] for _ in range(num_sequences)]
    half = num_tokens // 2
    group = {
        "tokens": tokens,
        "masks": [[-100] * half + row[half:] for row in tokens],
        "scores": [float(i % 2) for i in range(num_sequences)],
        "inference_logprobs": [[1.0] * half + [-rng.expovariate(1.0) for _ in row[half:]] for row in tokens],
        "ref_logprobs": None,
        "overrides": None,
        "group_overrides": {},
        "env_id": env_id,
    }
    return json.dumps(group).encode()


KEEP_ALIVE_S = 3.0  # servers hang up after 5 s


class Connection:
    """One kept-alive HTTP/1.1 connection; opened again after a pause, as our clients do."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._used_s = 0.0

    async def call(self, method: str, path: str, body: bytes = b"", headers: str = "") -> tuple[int, bytes]:
        if time.monotonic() - self._used_s > KEEP_ALIVE_S:
            self.close()
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**26)
        assert self._reader is not None
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n{headers}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._writer.write(head.encode() + b"\r\n" + body)
        await self._writer.drain()
        answer_head = await self._reader.readuntil(b"\r\n\r\n")
        lines = answer_head.decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        fields = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        answer = await self._reader.readexactly(int(fields.get("content-length", "0")))
        if fields.get("connection", "").lower() == "close":
            self.close()
        self._used_s = time.monotonic()
        return status, answer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def post_for(port: int, bodies: list[bytes], until: float, result: Result) -> None:
    connection = Connection(port)
    turn = 0
    while time.perf_counter() < until:
        began = time.perf_counter()
        status, _ = await connection.call("POST", "/scored_data", bodies[turn % len(bodies)])
        if status == 200:
            result.post_s.append(time.perf_counter() - began)
            result.posted += 1
        else:
            result.refused += 1
            await asyncio.sleep(0.05)
        turn += 1
    connection.close()


async def poll_for(port: int, until: float, result: Result, pause_s: float = 0.01) -> None:
    """The trainer: takes available batches, and waits briefly if there is none."""
    connection = Connection(port)
    while time.perf_counter() < until:
        began = time.perf_counter()
        _, answer = await connection.call("GET", "/batch")
        if time.perf_counter() > until:
            break  # delivered after the end of the measurement: not counted, for either server
        num_groups = answer.count(b'"tokens"')
        if num_groups:
            result.batch_s.append(time.perf_counter() - began)
            result.batches += 1
            result.delivered += num_groups
        else:
            await asyncio.sleep(pause_s)
    connection.close()


async def register(port: int, batch_size: int) -> None:
    connection = Connection(port)
    trainer = {
        "wandb_group": "", "wandb_project": "", "batch_size": batch_size, "max_token_len": 4096,
        "checkpoint_dir": "", "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 1000,
    }  # fmt: skip
    await connection.call("POST", "/register", json.dumps(trainer).encode())
    await connection.call("GET", "/batch")
    connection.close()


async def load(
    port: int, *, num_clients: int, bodies: list[bytes], seconds: float, batch_size: int, warm_up_s: float = 2.0
) -> Result:
    """Run the load. The first seconds are discarded as a warm-up."""
    await register(port, batch_size)
    result = Result()
    for result, span_s in ((Result(seconds=warm_up_s), warm_up_s), (Result(seconds=seconds), seconds)):
        until = time.perf_counter() + span_s
        await asyncio.gather(
            *(post_for(port, bodies, until, result) for _ in range(num_clients)), poll_for(port, until, result)
        )
    return result
