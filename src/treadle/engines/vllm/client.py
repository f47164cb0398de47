"""Call vLLM's server over HTTP, and send weight updates to its workers.

What vLLM rejects is a RequestError; what it cannot do now, or its exit, is an EngineError.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from treadle.engines.vllm.completions import GENERATE, Answer, Order, decode_answer
from treadle.engines.vllm.server_process import ServerProcess
from treadle.engines.weight_updates import Arrival, refuse_other_group
from treadle.errors import EngineError, RequestError
from treadle.net.client import OK, BadStatus, HttpAnswer, NoAnswer, PooledHttpClient
from treadle.wire.bridge import Adopt, JoinGroup, Received, ReceiveWeights

CALL_TIMEOUT_S = 120.0
HEALTH_TIMEOUT_S = 10.0
_JSON = {"Content-Type": "application/json"}
MARGIN_S = 10.0  # the worker keeps the deadline by itself, a last bucket may take as long again


class VllmClient:
    """The connections to one life of the server."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        # A completion may take as long as it takes; that the server lives is seen by its connection.
        self._http = PooledHttpClient(
            server.url, headers=server.headers, timeout_s=None, connect_timeout_s=CALL_TIMEOUT_S, trust_env=False
        )
        self._is_closed = False

    async def generate(self, order: Order) -> Answer:
        return decode_answer((await self._post(GENERATE, order)).content)

    async def stream(self, order: Order) -> AsyncGenerator[Answer, None]:
        self._refuse_when_closed()
        lines = self._http.stream_lines(GENERATE, body=msgspec.json.encode(order), headers=_JSON)
        try:
            async with aclosing(lines):
                async for line in lines:
                    yield _decode_line(line)
        except BadStatus as refused:
            self._refuse(refused.answer)
        except NoAnswer as error:
            raise self._lost(error) from None

    async def call(self, path: str, body: dict[str, Any], timeout_s: float = CALL_TIMEOUT_S) -> Any:
        answer = await self._post(path, body, timeout_s)
        return msgspec.json.decode(answer.content) if "json" in answer.header("content-type") else answer.text

    async def rpc(self, method: str, *, within_s: float = CALL_TIMEOUT_S, **kwargs: Any) -> Any:
        """Ask the workers; what one refuses (weights that do not fit, a model it cannot map) is a RequestError."""
        return agreed_answer(method, await self.call("/treadle/rpc", {"method": method, "kwargs": kwargs}, within_s))

    async def failure(self) -> str | None:
        """Why it cannot generate; None: it can."""
        death = self._server.death()
        if death is not None:
            return death
        try:
            answer = await self._http.request("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
        except NoAnswer as error:
            return self._server.death() or f"vLLM's server does not answer ({error})"
        return None if answer.status == OK else "vLLM's server lives, but its engine has died"

    def death(self) -> str | None:
        return self._server.death()

    async def close(self) -> None:
        self._is_closed = True
        await self._http.close()

    async def _post(self, path: str, body: dict[str, Any] | Order, timeout_s: float | None = None) -> HttpAnswer:
        self._refuse_when_closed()
        content = msgspec.json.encode(body)
        try:
            answer = await self._http.request("POST", path, body=content, headers=_JSON, timeout_s=timeout_s)
        except NoAnswer as error:
            raise self._lost(error) from None
        if answer.status != OK:
            self._refuse(answer)
        return answer

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise self._lost(NoAnswer("the engine has hung up"))

    def _refuse(self, answer: HttpAnswer) -> NoReturn:
        message = _message(answer)
        if 400 <= answer.status < 500:
            raise RequestError(message)
        raise EngineError(f"vLLM failed: {message}", fix="its log says more")

    def _lost(self, error: NoAnswer) -> EngineError:
        reason = self._server.death() or f"vLLM's server did not answer ({error})"
        return EngineError(reason, fix="its log says why; POST /bridge/restart or start the engine again")


def agreed_answer(method: str, answers: list[Any]) -> Any:
    """One answer for that of every worker, each of which has a part of the model; they are listed by rank.

    >>> agreed_answer("treadle_settle", [None, None])
    """
    refuse_errors(answers)
    if not answers:
        raise EngineError(f"no worker of vLLM answered {method}", fix="its log says more")
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise EngineError(
                f"vLLM's workers 0 and {rank} answer {method} differently: their weights are not those of one model",
                fix="POST /bridge/restart, or start the engine again",
            )
    return answers[0]


def refuse_errors(answers: list[Any]) -> None:
    """What one of the workers refused."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, dict) and "error" in answer:
            where = f"worker {rank} of {len(answers)}: " if len(answers) > 1 else ""
            raise RequestError(where + answer["error"], fix=answer["fix"])


def _decode_line(data: str) -> Answer:
    try:
        return decode_answer(data)
    except msgspec.ValidationError:  # an error in the middle of a stream has no choices
        raise EngineError(f"vLLM failed: {data[:500]}", fix="its log says more") from None


def _message(answer: HttpAnswer) -> str:
    """vLLM's own words, wherever it puts them."""
    try:
        body = msgspec.json.decode(answer.content)
    except msgspec.DecodeError:
        return answer.text[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


class Arrivals:
    """To one life of the server."""

    def __init__(self) -> None:
        self._group: str | None = None
        self.damage: str | None = None  # why its weights can be no version's; a restart mends it
        self._arrival = Arrival()

    async def join(self, client: VllmClient, request: JoinGroup) -> None:
        plain = msgspec.to_builtins(request)
        await client.rpc("treadle_join", within_s=2 * request.timeout_s + MARGIN_S, request=plain)
        self._group = request.group

    async def receive(self, client: VllmClient, body: ReceiveWeights) -> Received:
        refuse_other_group(self._group, body.group)  # nothing is written yet
        self._arrival.begin()
        try:
            plain = await client.rpc("treadle_receive", within_s=2 * body.timeout_s + MARGIN_S, group=body.group)
        except RequestError as error:  # the worker's own: it has stopped receiving
            self._arrival.broke_off(error.message)
            raise EngineError(error.message, fix=error.fix) from None
        except EngineError as error:
            self.damaged(f"weights of a broadcast were taken over in part, or may yet be: {error.message}")
            raise
        self._arrival.came()
        return msgspec.convert(plain, Received)

    async def stand_still(self, client: VllmClient, gate: Path, order: Adopt) -> float:
        """Until the trainer has written the shared weights. A RequestError: nothing was."""
        body = {"gate": str(gate), "number": order.number, "timeout_s": order.timeout_s}
        try:
            answers = await client.call("/treadle/adopt", body, order.timeout_s + MARGIN_S)
        except EngineError as error:
            self._arrival.broke_off(error.message)
            raise
        refuse_errors(answers)
        self._arrival.named()
        return max(float(answer["held_s"]) for answer in answers)

    @property
    def are_settled(self) -> bool:
        return self._arrival.is_settled

    def damaged(self, reason: str) -> None:
        """The worker may be writing yet: nothing that comes later mends that."""
        self.damage = reason
        self._arrival.broke_off(reason)

    def refuse_going_on(self, policy_version: int | None) -> None:
        self._arrival.refuse_going_on(policy_version)

    def named(self) -> None:
        self._arrival.named()
