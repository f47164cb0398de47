"""Measure the CPU cost of one environment process with rollouts in flight; a stub engine takes one second for each.

    python bench/environment.py                 512 rollouts of two turns in flight, on one core
    python bench/environment.py --rollouts 64   fewer

Engine and hub are stubs in another process, so that only the environment is measured: its share of a core, and the time
of a turn beyond the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import uvloop

from treadle.config.env import EnvConfig, ServerConfig
from treadle.envs.base import Environment, Item, environment, load_environment
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import EngineClient
from treadle.envs.hub_client import HubClient
from treadle.envs.main import open_context
from treadle.envs.serving.runner import run
from treadle.log import set_up_logging

TURNS = 2
GROUP_SIZE = 8
REPLY_TOKENS = 64
ENGINE_S = 1.0


@environment("bench-turns")
class Turns(Environment):
    def train_item(self, index: int) -> Item:
        return Item.ask(f"Question {index}: " + "what is it? " * 10, answer=str(index))

    def eval_items(self) -> list[Item]:
        return []

    async def rollout(self, item: Item, model: object) -> float:
        chat = model.chat(item.messages)  # type: ignore[attr-defined]
        for turn in range(TURNS):
            if turn:
                chat.add({"role": "user", "content": "Go on."})
            await chat.ask()
        return float(len(chat.messages[-1]["content"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=512, help="rollouts in flight")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to measure")
    parser.add_argument("--doubles", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.doubles:
        serve_doubles(given.doubles)
        return
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        doubles = subprocess.Popen([sys.executable, __file__, "--doubles", str(port)])
        try:
            _wait_for(port)
            figures = uvloop.run(measure(port, Path(folder), given.rollouts, given.seconds))
            print(json.dumps(figures, indent=2))
        finally:
            doubles.kill()
            doubles.wait()


async def measure(port: int, folder: Path, num_rollouts: int, seconds: float) -> dict[str, float]:
    os.sched_setaffinity(0, {0})
    set_up_logging("WARNING")
    model = _tokenizer_folder(folder)
    config = EnvConfig(
        name="bench-turns", group_size=GROUP_SIZE, max_token_length=REPLY_TOKENS, num_eval=0, pace="stream",
        max_num_workers=num_rollouts // GROUP_SIZE, max_age=1000, state_dir=folder / "state",
        hub_url=f"http://127.0.0.1:{port}",
    )  # fmt: skip
    server = ServerConfig(base_url=f"http://127.0.0.1:{port}/v1", model=str(model))
    task = load_environment(config)
    async with (
        EngineClient(server) as engine,
        HubClient(config.hub_url) as hub,
        open_context(task, engine, ChatTokenizer.load(model)) as context,
    ):
        running = asyncio.create_task(run(context, hub))
        await asyncio.sleep(8.0)  # until the limit on groups in flight has grown to its maximum
        process = psutil.Process()
        cpu, started = sum(process.cpu_times()[:2]), time.monotonic()
        before = await hub.status()
        await asyncio.sleep(seconds)
        wall_s = time.monotonic() - started
        cpu_s = sum(process.cpu_times()[:2]) - cpu
        delivered = (await hub.status()).queue_size - before.queue_size
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    rollouts_per_s = delivered * GROUP_SIZE / wall_s
    turn_s = num_rollouts / rollouts_per_s / TURNS
    return {
        "rollouts_in_flight": num_rollouts,
        "rollouts_per_s": round(rollouts_per_s, 1),
        "core_share": round(cpu_s / wall_s, 3),
        "seconds_per_turn": round(turn_s, 3),
        "added_to_the_engine": round(turn_s / ENGINE_S - 1, 3),
    }


def serve_doubles(port: int) -> None:
    """Serve a stub engine that takes a second per request, and a stub hub that always needs more groups."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    os.sched_setaffinity(0, {os.cpu_count() - 1 if os.cpu_count() else 0})
    logprobs = [[{"65": -0.5}]] * REPLY_TOKENS
    answer = json.dumps({
        "text": ["A" * REPLY_TOKENS], "prompt": "", "finish_reasons": ["stop"], "token_ids": [[65] * REPLY_TOKENS],
        "prompt_token_ids": [], "policy_version": 0, "logprobs": [logprobs], "seconds": ENGINE_S,
    }).encode()  # fmt: skip
    num_groups = 0

    async def generate(request: Request) -> Response:
        await request.body()
        await asyncio.sleep(ENGINE_S)
        return Response(answer, media_type="application/json")

    async def groups(request: Request) -> Response:
        nonlocal num_groups
        await request.body()
        num_groups += 1
        return JSONResponse({"status": "received", "groups_processed": 1})

    def as_json(value: dict[str, object]) -> object:
        async def answer_it(_: Request) -> Response:
            return JSONResponse(value)

        return answer_it

    async def status(_: Request) -> Response:
        return JSONResponse({"current_step": 1, "queue_size": num_groups})

    registered = {"status": "success", "env_id": 0, "num_steps": 10**6, "groups_accepted": 0}
    standing = {
        "step": 1, "num_steps": 10**6, "batch_size": 4096, "untrained_sequences": 0, "trainer_waits": False,
        "share": 1.0,
    }  # fmt: skip
    health = {"status": "ok", "model": "stub", "policy_version": 0}
    app = Starlette(routes=[
        Route("/generate", generate, methods=["POST"]),
        Route("/v1/groups", groups, methods=["POST"]),
        Route("/register-env", as_json(registered), methods=["POST"]),
        Route("/disconnect-env", as_json({"status": "success"}), methods=["POST"]),
        Route("/info", as_json({"batch_size": 4096, "max_token_len": 0})),
        Route("/v1/envs/0", as_json(standing)),
        Route("/health", as_json(health)),
        Route("/status", status),
    ])  # fmt: skip
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", loop="uvloop", http="httptools")


def _tokenizer_folder(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    model = folder / "model"
    model.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return model


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit("the doubles did not start")


if __name__ == "__main__":
    main()
