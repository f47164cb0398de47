"""Client of an engine for environments: token ids in; token ids, logprobs and policy version out."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from treadle.config.env import ServerConfig
from treadle.envs.transport import Peer
from treadle.errors import ConfigError, EngineError
from treadle.net.address import shown_url
from treadle.net.client import HttpClient, RetryPolicy
from treadle.watch.waits import Waits, WaitSpec
from treadle.wire.bridge import TOKEN_VARIABLE
from treadle.wire.generate import EngineHealth, GenerateAnswer, GenerateRequest, Wave

T = TypeVar("T")

COMPLETION_LATE_S = 900.0  # without any finished completion the watchdog reports the engine
ROUTING_KEY_HEADER = "X-SMG-Routing-Key"  # a router sends requests with the same key to the same engine
_NOT_FOUND = 404


@dataclass(frozen=True)
class Completion:
    """One sampled completion: `token_ids[t]` was sampled with `logprobs[t]`."""

    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str  # "stop" or "length"
    policy_version: int


@dataclass(frozen=True)
class EngineResult:
    """The completions of one request, and the engine's time for them."""

    completions: list[Completion]
    seconds: float
    engine_id: str = ""  # of the engine, which has another after every start; "": it says none
    newest_version: int = 0  # that a token was sampled under; completions name the oldest


class EngineAway(EngineError):
    """The engine gave no usable answer within the retries."""


class ServedModel(msgspec.Struct, kw_only=True):
    """One entry of GET /v1/models."""

    id: str
    root: str | None = None  # the folder or name it was loaded from; not all servers send it

    def is_called(self, name: str) -> bool:
        """Compares the last part of paths and names: "org/model", "/models/model" and "model" are the same."""
        names = {self.id, self.root or self.id}
        return name in names or _last_part(name) in map(_last_part, names)


def _last_part(name: str) -> str:
    """ "model" for /models/model, org/model, and the cache's .../models--org--model/snapshots/1f3a."""
    cached = re.search(r"models--(?:[^/]*--)?([^/]+)/snapshots/", name)
    return (cached[1] if cached else name.rstrip("/").rpartition("/")[2]).lower()


class _ModelList(msgspec.Struct):
    data: list[ServedModel]


class EngineClient(AbstractAsyncContextManager["EngineClient"]):
    """`await engine.generate([1, 2, 3], n=8, max_tokens=24, temperature=1.0)`."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        retry_policy: RetryPolicy | None = None,
        transport: HttpClient | None = None,
        waits: Waits | None = None,
        is_router: bool = False,
    ) -> None:
        """`is_router`: the URL is that of a router in front of engines, which reads the prompt to choose one."""
        if config.server_type != "vllm":
            raise ConfigError(
                f"server type '{config.server_type}' returns no token ids, which training needs",
                fix="pass --openai.server-type vllm and the URL of an engine",
            )
        (url,) = config.base_url
        self.url = shown_url(url)
        self._is_router = is_router
        self._retry_policy = retry_policy or RetryPolicy(give_up_after_s=config.timeout)
        self._waits = waits or Waits()
        self._completion = WaitSpec(
            f"the engine at {self.url} to finish a completion",
            of="engine",
            deadline_s=COMPLETION_LATE_S,
        )
        self._peer = Peer(
            "engine",
            url.rstrip("/").removesuffix("/v1"),
            error=EngineError,
            away=EngineAway,
            timeout_s=config.timeout,
            api_key=config.api_key or os.environ.get(TOKEN_VARIABLE, ""),
            transport=transport,
            waits=self._waits,
            how_to_start="start it with `treadle engine`, or name another with --openai.base-url",
        )

    async def __aexit__(self, *_: object) -> None:
        await self._peer.close()

    async def health(self, retry_policy: RetryPolicy | None = None) -> EngineHealth:
        answer = await self._peer.send("GET", "/health", retry_policy=retry_policy or self._retry_policy)
        return self._peer.read(answer, EngineHealth)

    async def served_models(self) -> list[ServedModel]:
        """The models of /v1/models; for a server without that route, the model of /health."""
        answer = await self._peer.send("GET", "/v1/models", retry_policy=self._retry_policy)
        if answer.http.status == _NOT_FOUND:
            return [ServedModel(id=(await self.health()).model)]
        return self._peer.read(answer, _ModelList).data

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        n: int = 1,
        max_tokens: int,
        temperature: float,
        seed: int | None = None,
        stop: Sequence[str] = (),
        conversation: str = "",
        wave: Wave | None = None,
    ) -> EngineResult:
        """Sample `n` completions of one prompt. `conversation` is for a choice among several engines."""
        ids = list(prompt_token_ids)
        request = GenerateRequest(
            prompt=None if self._is_router else {"prompt_token_ids": ids},
            input_ids=ids if self._is_router else None,
            n=n,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop=list(stop) or None,
            logprobs=0,  # of the sampled tokens only
            wave=wave,
        )
        body = msgspec.json.encode(request)
        headers = {ROUTING_KEY_HEADER: conversation} if self._is_router and conversation else {}
        with self._waits.waiting(self._completion):
            response = await self._peer.send(
                "POST", "/generate", body=body, retry_policy=self._retry_policy, headers=headers
            )
        answer = self._peer.read(response, GenerateAnswer)
        newest = max((version for each in answer.policy_versions for version in each), default=answer.policy_version)
        return EngineResult(_completions(answer, n), answer.seconds, answer.engine_id, newest)

    async def generate_wave(
        self,
        wave_id: str,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        seeds: Sequence[int] | None = None,
    ) -> list[EngineResult]:
        """Send all prompts at once, as one wave. If one of them fails, the others are cancelled."""
        return await all_together(
            self.generate(
                prompt,
                n=n,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=None if seeds is None else seeds[index],
                wave=Wave(id=wave_id, size=len(prompts), index=index),
            )
            for index, prompt in enumerate(prompts)
        )


async def all_together(requests: Iterable[Awaitable[T]]) -> list[T]:
    """The results in order. If one fails, or the caller is cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _completions(answer: GenerateAnswer, num_expected: int) -> list[Completion]:
    logprobs = answer.logprobs or []
    lengths = {len(answer.token_ids), len(answer.text), len(answer.finish_reasons), len(logprobs)}
    if lengths != {num_expected}:
        raise EngineError(f"asked for {num_expected} completions with logprobs, the engine sent {sorted(lengths)}")
    try:
        sampled = [
            [entry[0][str(token)] for token, entry in zip(token_ids, positions, strict=True)]
            for token_ids, positions in zip(answer.token_ids, logprobs, strict=True)
        ]
    except (ValueError, KeyError, IndexError):
        raise EngineError("the engine's logprobs do not belong to its token ids") from None
    fields = zip(answer.token_ids, sampled, answer.text, answer.finish_reasons, strict=True)
    return [Completion(*each, policy_version=answer.policy_version) for each in fields]
