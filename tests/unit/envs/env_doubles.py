"""Doubles at the ports of an environment: a hub, an engine and a network that really speak HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from treadle.net.client import HttpAnswer, NoAnswer
from treadle.wire.generate import EngineHealth, GenerateAnswer, GenerateRequest
from treadle.wire.groups import ScoredGroup, split_groups, unpack_group

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path, template: str | None = CHAT_TEMPLATE) -> Path:
    """A byte-level tokenizer without merges: one token a byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.enable_truncation(4)  # as a careless checkpoint has it; must not cut our prompts
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


class EngineDouble:
    """Answers with the texts that `write(prompt, request)` gives; holds a wave until all of it is there."""

    def __init__(self, folder: Path, write: Callable[[str, GenerateRequest], list[str]]) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.write = write
        self.requests: list[GenerateRequest] = []
        self.authorizations: list[str | None] = []
        self.policy_version: Callable[[], int] = lambda: 0
        self.engine_id = ""
        self.health_values: dict[str, Any] = {}  # of EngineHealth
        self._arrived: dict[str, int] = {}
        self._complete: dict[str, asyncio.Event] = {}
        self.app = Starlette(
            routes=[Route("/health", self._health), Route("/generate", self._generate, methods=["POST"])]
        )

    async def _health(self, _: Request) -> Response:
        health = EngineHealth(
            status="ok", model=str(self.folder), policy_version=self.policy_version(), **self.health_values
        )
        return JSONResponse(msgspec.to_builtins(health))

    async def _generate(self, http: Request) -> Response:
        request = msgspec.json.decode(await http.body(), type=GenerateRequest)
        self.requests.append(request)
        self.authorizations.append(http.headers.get("Authorization"))
        if request.wave is not None:
            complete = self._complete.setdefault(request.wave.id, asyncio.Event())
            self._arrived[request.wave.id] = self._arrived.get(request.wave.id, 0) + 1
            if self._arrived[request.wave.id] == request.wave.size:
                complete.set()
            await asyncio.wait_for(complete.wait(), 30)
        if request.input_ids is None:
            assert isinstance(request.prompt, dict)
            prompt_ids = request.prompt["prompt_token_ids"]
        else:
            prompt_ids = request.input_ids
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        texts = self.write(prompt, request)
        tokens = [self.tokenizer.encode(text).ids[: request.max_tokens] for text in texts]
        answer = GenerateAnswer(
            text=texts,
            prompt=prompt,
            finish_reasons=["length" if len(ids) == request.max_tokens else "stop" for ids in tokens],
            token_ids=tokens,
            prompt_token_ids=prompt_ids,
            policy_version=self.policy_version(),
            logprobs=[[[{str(token): -0.5}] for token in ids] for ids in tokens],
            seconds=0.25,
            engine_id=self.engine_id,
        )
        return Response(msgspec.json.encode(answer), media_type="application/json")


class HubDouble:
    """Keeps every delivery; `steps_at_once` lets the (absent) trainer take a step for each delivery."""

    def __init__(self, *, batch_size: int = 8, num_steps: int = 3, max_token_len: int = 512) -> None:
        self.info = {"batch_size": batch_size, "max_token_len": max_token_len}
        self.num_steps = num_steps
        self.groups_accepted = 0
        self.run_id = "run"
        self.trackers: tuple[str, ...] = ()  # of the (absent) trainer
        self.share = 1.0  # of a batch, for the environment
        self.num_present = 1
        self.current_step = 0
        self.steps_at_once = True
        self.max_age = 0  # step v is taken when the wave of step v + this is there, as our trainer does
        self.num_register_waits = 0
        self.failures: list[Response] = []  # given out first, one per delivery
        self.deliveries: list[tuple[str, list[ScoredGroup]]] = []
        self.registrations: list[tuple[dict, str | None]] = []
        self.encodings: list[str | None] = []
        self.disconnected: list[int] = []
        self.app = Starlette(
            routes=[
                Route("/register-env", self._register, methods=["POST"]),
                Route("/info", self._info),
                Route("/status", self._status),
                Route("/v1/envs/{env_id}", self._standing),
                Route("/v1/groups", self._deliver, methods=["POST"]),
                Route("/disconnect-env", self._disconnect, methods=["POST"]),
            ]
        )

    async def _register(self, http: Request) -> Response:
        if self.num_register_waits:
            self.num_register_waits -= 1
            return JSONResponse({"status": "wait for trainer to start"})
        self.registrations.append((await http.json(), http.headers.get("Treadle-Resume")))
        return JSONResponse(
            {
                "status": "success",
                "env_id": 7,
                "wandb_name": "arithmetic_0",
                "num_steps": self.num_steps,
                "groups_accepted": self.groups_accepted,
                "run_id": self.run_id,
                "trackers": {"sinks": self.trackers, "project": "sums", "group": "night"},
            }
        )

    async def _info(self, _: Request) -> Response:
        return JSONResponse(self.info)

    async def _status(self, _: Request) -> Response:
        return JSONResponse({"current_step": self.current_step, "queue_size": 0})

    async def _standing(self, _: Request) -> Response:
        standing = {"step": self.current_step, "num_steps": self.num_steps, "batch_size": self.info["batch_size"]}
        return JSONResponse({**standing, "untrained_sequences": 0, "trainer_waits": False, "share": self.share,
                             "num_present": self.num_present})  # fmt: skip

    async def _deliver(self, http: Request) -> Response:
        body = await http.body()
        self.encodings.append(http.headers.get("Content-Encoding"))
        if self.encodings[-1] == "gzip":
            body = gzip.decompress(body)
        if self.failures:
            return self.failures.pop(0)
        groups = [unpack_group(packed) for packed in split_groups(body)]
        self.deliveries.append((http.headers["Idempotency-Key"], groups))
        if self.steps_at_once and len(self.deliveries) > self.max_age:
            self.current_step += 1
        if self.steps_at_once and len(self.deliveries) == self.num_steps:
            self.current_step = self.num_steps
        return JSONResponse({"status": "received", "groups_processed": len(groups)})

    async def _disconnect(self, http: Request) -> Response:
        self.disconnected.append((await http.json())["env_id"])
        return JSONResponse({"status": "success"})


class FlakyNetwork:
    """Loses the first calls of chosen paths: `FlakyNetwork(app, {"/generate": 2})`."""

    def __init__(self, app: Starlette, losses: dict[str, int] | None = None) -> None:
        self._inner = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://double")
        self.losses = losses or {}

    async def request(
        self, method: str, path: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        if self.losses.get(path, 0) > 0:
            self.losses[path] -= 1
            raise NoAnswer("ConnectError: connection refused")
        answer = await self._inner.request(method, path, content=body, headers=dict(headers or {}))
        return HttpAnswer(answer.status_code, answer.content, dict(answer.headers))

    async def close(self) -> None:
        await self._inner.aclose()
