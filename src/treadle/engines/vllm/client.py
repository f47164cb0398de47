"""Call vLLM's server over HTTP, and send weight updates to its workers.

What vLLM rejects is a RequestError; what it cannot do now, or its exit, is an EngineError.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from treadle.engines.vllm.completions import GENERATE, LOAD, VllmLoad, VllmOutput, VllmRequest, decode_output
from treadle.engines.vllm.server_process import ServerProcess
from treadle.engines.weight_updates import WeightUpdateState, check_group
from treadle.errors import EngineError, RequestError
from treadle.net.client import OK, BadStatus, HttpAnswer, NoAnswer, PooledHttpClient
from treadle.sync.shards import shard_name, worker_name
from treadle.wire.bridge import Adopt, JoinGroup, Received, ReceiveWeights

CALL_TIMEOUT_S = 120.0
HEALTH_TIMEOUT_S = 10.0
_JSON = {"Content-Type": "application/json"}
MARGIN_S = 10.0  # the worker enforces the deadline itself, and a last bucket may take as long again


class VllmClient:
    """HTTP client of one vLLM server process."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        # No timeout: completions may take arbitrarily long, and a dead server closes its connections.
        self._http = PooledHttpClient(
            server.url, headers=server.headers, timeout_s=None, connect_timeout_s=CALL_TIMEOUT_S, trust_env=False
        )
        self._is_closed = False

    async def generate(self, order: VllmRequest) -> VllmOutput:
        return decode_output((await self._post(GENERATE, order)).content)

    async def stream(self, order: VllmRequest) -> AsyncGenerator[VllmOutput, None]:
        self._check_open()
        lines = self._http.stream_lines(GENERATE, body=msgspec.json.encode(order), headers=_JSON)
        try:
            async with aclosing(lines):
                async for line in lines:
                    try:
                        output = decode_output(line)
                    except msgspec.ValidationError:  # an error line in the middle of a stream
                        raise EngineError(f"vLLM failed: {line[:500]}", fix="its log says more") from None
                    yield output
        except BadStatus as refused:
            self._refuse(refused.answer)
        except NoAnswer as error:
            raise self._lost(error) from None

    async def call(self, path: str, body: dict[str, Any], timeout_s: float = CALL_TIMEOUT_S) -> Any:
        answer = await self._post(path, body, timeout_s)
        return msgspec.json.decode(answer.content) if "json" in answer.header("content-type") else answer.text

    async def rpc(self, method: str, *, within_s: float = CALL_TIMEOUT_S, **kwargs: Any) -> Any:
        """Call a method of all workers, which must answer alike; a refusal (weights that do not fit, for example) is a
        RequestError."""
        return common_answer(method, await self._call_workers(method, within_s, kwargs))

    async def rpc_each(self, method: str, *, within_s: float = CALL_TIMEOUT_S, **kwargs: Any) -> list[Any]:
        """The same, for a method about each worker's part of the weights; the answers are listed by rank."""
        return checked_answers(method, await self._call_workers(method, within_s, kwargs))

    async def _call_workers(self, method: str, within_s: float, kwargs: dict[str, Any]) -> list[Any]:
        answers: list[Any] = await self.call("/treadle/rpc", {"method": method, "kwargs": kwargs}, within_s)
        return answers

    async def fingerprints(self, policy_version: int, num_workers: int) -> dict[str, str]:
        """Of all weights, or of each worker's part of each. One call at a time: the workers store those of one."""
        method = "treadle_read_fingerprints"
        await self.rpc("treadle_begin_fingerprints", policy_version=policy_version)
        answers = msgspec.convert(await self.rpc_each(method, policy_version=policy_version), list[dict[str, str]])
        if num_workers == 1:
            return msgspec.convert(common_answer(method, answers), dict[str, str])
        return {
            shard_name(name, rank, len(answers)): fingerprint
            for rank, own in enumerate(answers)
            for name, fingerprint in own.items()
        }

    async def adapter_fingerprints(self, served_name: str, policy_version: int) -> dict[str, str]:
        """The same from all workers: each stores the whole adapter, and cuts its part when it computes with it."""
        answers = await self.call("/treadle/adapter", {"name": served_name, "policy_version": policy_version})
        return msgspec.convert(common_answer("treadle_adapter_fingerprints", answers), dict[str, str])

    async def load(self) -> VllmLoad:
        """How busy vLLM is, or why it cannot generate."""
        exit_reason = self._server.exit_reason()
        if exit_reason is not None:
            return VllmLoad(failure=exit_reason)
        try:
            answer = await self._http.request("POST", LOAD, body=b"{}", headers=_JSON, timeout_s=HEALTH_TIMEOUT_S)
        except NoAnswer as error:
            return VllmLoad(failure=self._server.exit_reason() or f"vLLM's server does not answer ({error})")
        if answer.status != OK:
            return VllmLoad(failure="vLLM's server runs, but its engine has died")
        return msgspec.json.decode(answer.content, type=VllmLoad)

    def exit_reason(self) -> str | None:
        return self._server.exit_reason()

    async def close(self) -> None:
        self._is_closed = True
        await self._http.close()

    async def _post(self, path: str, body: dict[str, Any] | VllmRequest, timeout_s: float | None = None) -> HttpAnswer:
        self._check_open()
        content = msgspec.json.encode(body)
        try:
            answer = await self._http.request("POST", path, body=content, headers=_JSON, timeout_s=timeout_s)
        except NoAnswer as error:
            raise self._lost(error) from None
        if answer.status != OK:
            self._refuse(answer)
        return answer

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._lost(NoAnswer("the connection was closed by the engine"))

    def _refuse(self, answer: HttpAnswer) -> NoReturn:
        message = answer.message
        if 400 <= answer.status < 500:
            raise RequestError(message)
        raise EngineError(f"vLLM failed: {message}", fix="its log says more")

    def _lost(self, error: NoAnswer) -> EngineError:
        reason = self._server.exit_reason() or f"vLLM's server did not answer ({error})"
        return EngineError(reason, fix="its log says why; POST /bridge/restart or start the engine again")


def checked_answers(method: str, answers: list[Any]) -> list[Any]:
    raise_worker_errors(answers)
    if not answers:
        raise EngineError(f"no worker of vLLM answered {method}", fix="its log says more")
    return answers


def common_answer(method: str, answers: list[Any]) -> Any:
    """The common answer of all workers, listed by rank.

    >>> common_answer("treadle_synchronize", [None, None])
    """
    checked_answers(method, answers)
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise EngineError(
                f"vLLM's workers 0 and {rank} answer {method} differently: their weights are not those of one model",
                fix="POST /bridge/restart, or start the engine again",
            )
    return answers[0]


def raise_worker_errors(answers: list[Any]) -> None:
    """Raise the refusal of any worker as a RequestError."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, dict) and "error" in answer:
            where = f"{worker_name(rank, len(answers))}: " if len(answers) > 1 else ""
            raise RequestError(where + answer["error"], fix=answer["fix"])


class WeightTransfer:
    """Weight updates to the workers of one vLLM server process, through the gate or by broadcast."""

    def __init__(self) -> None:
        self._group: str | None = None
        self.damage: str | None = None  # why the weights belong to no version; only a restart repairs them
        self.update = WeightUpdateState()

    async def join(self, client: VllmClient, request: JoinGroup) -> None:
        plain = msgspec.to_builtins(request)
        await client.rpc("treadle_join", within_s=2 * request.timeout_s + MARGIN_S, request=plain)
        self._group = request.group

    async def receive(self, client: VllmClient, body: ReceiveWeights) -> Received:
        check_group(self._group, body.group)  # nothing is written yet
        self.update.begin()
        try:
            within_s = 2 * body.timeout_s + MARGIN_S
            plain = await client.rpc_each("treadle_receive", within_s=within_s, group=body.group)
        except RequestError as error:  # from the worker: it has stopped receiving
            self.update.fail(error.message)
            raise EngineError(error.message, fix=error.fix) from None
        except EngineError as error:
            self.mark_damaged(f"weights of a broadcast were taken over in part, or may yet be: {error.message}")
            raise
        self.update.received()
        received = msgspec.convert(plain, list[Received])
        return max(received, key=lambda answer: answer.seconds)  # all received the same buckets

    async def wait_for_write(self, client: VllmClient, gate: Path, order: Adopt) -> float:
        """Wait until the trainer has written the shared weights. After a RequestError, nothing was written."""
        body = {"gate": str(gate), "number": order.number, "timeout_s": order.timeout_s}
        try:
            answers = await client.call("/treadle/adopt", body, order.timeout_s + MARGIN_S)
        except EngineError as error:
            self.update.fail(error.message)
            raise
        raise_worker_errors(answers)
        self.update.finish()
        return max(float(answer["held_s"]) for answer in answers)

    def mark_damaged(self, reason: str) -> None:
        """The worker may still be writing, so no later update repairs the weights."""
        self.damage = reason
        self.update.fail(reason)
