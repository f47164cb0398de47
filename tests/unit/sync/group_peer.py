"""Both ends of a broadcast without a model: a trainer's weights, and an engine's end in a process of its own.

python -m tests.unit.sync.group_peer PORT    an engine: the two routes of a broadcast, and GET /weights
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
from treadle.wire.bridge import Joined, JoinGroup, ReceiveWeights

SHAPES = {"embed": (300, 70), "norm": (70,), "bias": (1,), "up": (70, 90), "down": (90, 70)}
ROOT = Path(__file__).parents[3]


@dataclass
class Weights:
    """What a broadcast asks of a trainer's policy."""

    weights: dict[str, torch.Tensor]

    @property
    def dtype(self):
        return next(iter(self.weights.values())).dtype

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
def peer(folder):
    port, log = free_port(), folder / "peer.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.sync.group_peer", str(port)],
            cwd=ROOT, stdout=output, stderr=output, env=environment(),
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(f"{url}/weights", process, log)
        yield Peer(url, process)
    finally:
        process.kill()
        process.wait()


def serve(port):
    weights, receiver = random_weights(0), BroadcastReceiver()

    async def join(http):
        request = msgspec.json.decode(await http.body(), type=JoinGroup)
        await asyncio.to_thread(receiver.join, request, weights)
        return _answer(Joined(status="joined"))

    async def receive(http):
        body = msgspec.json.decode(await http.body(), type=ReceiveWeights)
        return _answer(await asyncio.to_thread(receiver.receive, body.group, weights))

    async def show(_):
        return Response(b"".join(w.view(torch.uint8).numpy().tobytes() for w in weights.values()))

    async def refuse(_, error):
        return JSONResponse({"error": str(error)}, 503)

    routes = [
        Route("/bridge/join", join, methods=["POST"]),
        Route("/bridge/receive", receive, methods=["POST"]),
        Route("/weights", show),
    ]
    uvicorn.run(Starlette(routes=routes, exception_handlers={TreadleError: refuse}), port=port, log_level="warning")


def _answer(struct):
    return Response(msgspec.json.encode(struct), media_type="application/json")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
