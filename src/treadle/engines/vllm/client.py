"""Calls to vLLM's server. What it refuses is a RequestError; what it cannot do, or its death, an EngineError."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from treadle.engines.vllm.completions import Completions, decode_answer
from treadle.engines.vllm.server_process import ServerProcess
from treadle.errors import EngineError, RequestError

CALL_TIMEOUT_S = 120.0
HEALTH_TIMEOUT_S = 10.0
_EVENT = "data: "
_END_OF_EVENTS = "[DONE]"


class VllmClient:
    """The connections to one life of the server."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._http = httpx.AsyncClient(
            base_url=server.url,
            headers=server.headers,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            # A completion may take as long as it takes; that the server lives is seen by its connection.
            timeout=httpx.Timeout(CALL_TIMEOUT_S, read=None, pool=None),
        )

    async def complete(self, body: dict[str, Any]) -> Completions:
        answer = await self._post("/v1/completions", body)
        return decode_answer(answer.content)

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[Completions]:
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    await answer.aread()
                    self._refuse(answer)
                async for line in answer.aiter_lines():
                    data = line.removeprefix(_EVENT)
                    if data in (line, _END_OF_EVENTS):
                        continue
                    yield _decode_event(data)
        except httpx.TransportError as error:
            raise self._lost(error) from None

    async def call(self, path: str, body: dict[str, Any], timeout_s: float = CALL_TIMEOUT_S) -> Any:
        answer = await self._post(path, body, timeout_s)
        return msgspec.json.decode(answer.content) if "json" in answer.headers.get("content-type", "") else answer.text

    async def rpc(self, method: str, **kwargs: Any) -> Any:
        """Ask the worker; what it refuses (weights that do not fit, a model it cannot map) is a RequestError."""
        (answer,) = await self.call("/treadle/rpc", {"method": method, "kwargs": kwargs})
        if isinstance(answer, dict) and "error" in answer:
            raise RequestError(answer["error"], fix=answer["fix"])
        return answer

    async def failure(self) -> str | None:
        """Why it cannot generate; None: it can."""
        death = self._server.death()
        if death is not None:
            return death
        try:
            answer = await self._http.get("/health", timeout=HEALTH_TIMEOUT_S)
        except httpx.TransportError as error:
            return self._server.death() or f"vLLM's server does not answer ({type(error).__name__})"
        return None if answer.status_code == httpx.codes.OK else "vLLM's server lives, but its engine has died"

    def death(self) -> str | None:
        return self._server.death()

    async def close(self) -> None:
        await self._http.aclose()

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> httpx.Response:
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        try:
            answer = await self._http.post(path, json=body, timeout=timeout)
        except httpx.TransportError as error:
            raise self._lost(error) from None
        if answer.status_code != httpx.codes.OK:
            self._refuse(answer)
        return answer

    def _refuse(self, answer: httpx.Response) -> None:
        message = _message(answer)
        if httpx.codes.is_client_error(answer.status_code):
            raise RequestError(message)
        raise EngineError(f"vLLM failed: {message}", fix="its log says more")

    def _lost(self, error: httpx.TransportError) -> EngineError:
        reason = self._server.death() or f"vLLM's server did not answer ({type(error).__name__})"
        return EngineError(reason, fix="its log says why; POST /bridge/restart or start the engine again")


def _decode_event(data: str) -> Completions:
    try:
        return decode_answer(data)
    except msgspec.ValidationError:  # an error in the middle of a stream has no choices
        raise EngineError(f"vLLM failed: {data[:500]}", fix="its log says more") from None


def _message(answer: httpx.Response) -> str:
    """vLLM's own words, wherever it puts them."""
    try:
        body = answer.json()
    except ValueError:
        return answer.text[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
