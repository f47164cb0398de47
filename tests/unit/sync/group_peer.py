"""Both ends of a broadcast without a model: a trainer's weights, and an engine's end in a process of its own.

python -m tests.unit.sync.group_peer PORT [split]    an engine: the two routes of a broadcast, and GET /weights
    split: two workers, in threads of this process; POST /silence makes the second one ignore calls from then on
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.e2e.processes import environment, free_port, wait_until_healthy
from treadle.engines.weight_updates import BroadcastReceiver
from treadle.errors import TreadleError
from treadle.sync.shards import HeldWeight, cut, whole_part
from treadle.wire.bridge import Joined, JoinGroup, ReceiveWeights, WeightPart

SHAPES = {"embed": (300, 70), "norm": (70,), "bias": (1,), "up": (70, 90), "down": (90, 70)}
ROOT = Path(__file__).parents[3]


@dataclass
class Weights:
    """What a broadcast asks of a trainer's policy."""

    weights: dict[str, torch.Tensor]

    @property
    def dtype(self):
        return next(iter(self.weights.values())).dtype

    @property
    def device(self):
        return next(iter(self.weights.values())).device

    def served_shapes(self):
        return [(name, tuple(weight.shape)) for name, weight in self.weights.items()]

    def served_weights(self):
        yield from self.weights.items()


def random_weights(seed, dtype=torch.bfloat16, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Peer:
    url: str
    process: subprocess.Popen

    def weights(self):
        """What it has now."""
        raw = httpx.get(f"{self.url}/weights", timeout=30).content
        expected = random_weights(0)
        parts = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).split([w.numel() for w in expected.values()])
        return {name: part.view(w.shape) for (name, w), part in zip(expected.items(), parts, strict=True)}


@contextmanager
def peer(folder, *words):
    port, log = free_port(), folder / "peer.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.sync.group_peer", str(port), *words],
            cwd=ROOT, stdout=output, stderr=output, env=environment(),
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(f"{url}/weights", process, log)
        yield Peer(url, process)
    finally:
        process.kill()
        process.wait()


# Rows or columns of each weight that the first worker has.
SPLITS = {"embed": (0, 192), "norm": None, "bias": None, "up": (0, 35), "down": (1, 35)}


def parts_of(weights):
    """What each of two workers has of each weight, with memory of its own."""
    workers = [{}, {}]
    for name, weight in weights.items():
        for rank, held in enumerate(workers):
            part = whole_part(weight.shape)
            if SPLITS[name] is not None:
                dim, first = SPLITS[name]
                part = WeightPart(dim, rank * first, first if rank == 0 else weight.shape[dim] - first)
            held[name] = HeldWeight(cut(weight, part).clone(), tuple(weight.shape), part)
    return workers


def put_together(workers):
    """The full weights."""
    full = random_weights(0)
    for held in workers:
        for name, own in held.items():
            cut(full[name], own.part).copy_(own.tensor)
    return full


def serve(port, *, is_split):
    workers = parts_of(random_weights(0)) if is_split else [random_weights(0)]
    receivers = [BroadcastReceiver() for _ in workers]
    silent = []

    async def in_all(call):
        """Of a worker that hangs, no answer comes."""
        doing = [asyncio.to_thread(call, rank) for rank in range(len(workers)) if rank not in silent]
        done = await asyncio.gather(*doing)
        while silent:
            await asyncio.sleep(0.05)
        return done[0]

    async def join(http):
        request = msgspec.json.decode(await http.body(), type=JoinGroup)
        await in_all(lambda rank: receivers[rank].join(request, workers[rank], worker=rank))
        return _answer(Joined(status="joined"))

    async def receive(http):
        body = msgspec.json.decode(await http.body(), type=ReceiveWeights)
        return _answer(await in_all(lambda rank: receivers[rank].receive(body.group, workers[rank])))

    async def silence(_):
        silent.append(1)
        return Response()

    async def show(_):
        weights = put_together(workers) if is_split else workers[0]
        return Response(b"".join(w.view(torch.uint8).numpy().tobytes() for w in weights.values()))

    async def refuse(_, error):
        return JSONResponse({"error": str(error)}, 503)

    routes = [
        Route("/bridge/join", join, methods=["POST"]),
        Route("/bridge/receive", receive, methods=["POST"]),
        Route("/weights", show),
        Route("/silence", silence, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes, exception_handlers={TreadleError: refuse}), port=port, log_level="warning")


def _answer(struct):
    return Response(msgspec.json.encode(struct), media_type="application/json")


if __name__ == "__main__":
    serve(int(sys.argv[1]), is_split="split" in sys.argv[2:])
