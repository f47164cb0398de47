"""Implement the engine interface on top of vLLM's server.

    requests ──> RequestBarrier ──(open: not held, not restarting)──> vLLM
    hold() closes the barrier, and vLLM freezes, finishes or aborts running requests; release(version) resumes both.

While weights change, requests wait at the barrier, not in vLLM. So each is sent under the version it is sampled under,
and vLLM's prefix cache, which `cache_salt` separates by version, never gives it keys and values of another version.

Requests of a wave (Request.wave) are treated like all others: vLLM's results depend on the composition of each batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec

from treadle.engines.interface import (
    HOLD_TIMEOUT_S,
    Adapter,
    CompletionDelta,
    EngineFacts,
    GenerationResult,
    HoldMode,
    Request,
    ServingStatus,
)
from treadle.engines.model_folder import absolute
from treadle.engines.tokenizer import ModelTokenizer
from treadle.engines.vllm.adapters import AdapterLoader, AdapterValidator
from treadle.engines.vllm.client import VllmClient, WeightTransfer
from treadle.engines.vllm.command import MODEL_NAME
from treadle.engines.vllm.completions import (
    VllmLoad,
    VllmRequest,
    build_vllm_request,
    num_samples,
    to_deltas,
    to_result,
)
from treadle.engines.vllm.request_flow import Admission, ChangeQueue, RequestBarrier, RequestCounters, log_failure
from treadle.engines.vllm.server_process import START_TIMEOUT_S, ServerProcess
from treadle.errors import EngineError, RequestError, UserError
from treadle.log import get_logger
from treadle.sync.gate import PublishGate, check_publish_order
from treadle.sync.layout import Layout
from treadle.wire.bridge import Adopt, JoinGroup, Received, ReceiveWeights, Shards

log = get_logger("engine")
ABORT_RETRY_S = 0.1  # interval for aborting requests that reached vLLM after the first abort
CLOSE_S = 30.0  # time for a running change to notice that its server has exited

BeginServer = Callable[[], tuple[ServerProcess, EngineFacts]]  # starts a server; returns while it loads
PrepareServer = Callable[[Path], BeginServer]  # raises UserError for a model that vLLM cannot serve


class VllmEngine:
    """InferenceEngine that forwards requests to a vLLM server process."""

    def __init__(
        self,
        server: ServerProcess,
        facts: EngineFacts,
        tokenizer: ModelTokenizer,
        prepare_server: PrepareServer,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        drain_timeout_s: float = HOLD_TIMEOUT_S,
        gate: Path | None = None,
    ) -> None:
        """`gate`: gate file of an engine that shares its weights (sync/gate.py)."""
        self._server = server
        self._client = VllmClient(server)
        self._facts = facts
        self._prepare_server = prepare_server
        self._start_timeout_s = start_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._gate_file = gate
        self._base_versions = [0]  # versions of the base model's weights, oldest first
        self._adapters = AdapterLoader(self._client, AdapterValidator(facts.folder, facts), server.scratch)
        self._changes = ChangeQueue()
        self._transfer = WeightTransfer()
        self._fingerprinting = asyncio.Lock()  # the worker stores the fingerprints of one request only
        self._held_at: float | None = None  # time.monotonic() of vLLM's process, the same clock as here
        self._is_restarting = False
        self._is_closed = False
        self.tokenizer = tokenizer
        self._counters = RequestCounters()
        self._request_barrier = RequestBarrier(self._counters, self._check_alive)

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def policy_version(self) -> int:
        serving = self._adapters.registry.serving
        by_adapter = serving.policy_version if serving is not None else None
        return self._base_versions[-1] if by_adapter is None else by_adapter

    async def status(self) -> ServingStatus:
        load = VllmLoad() if self._is_restarting else await self._client.load()
        num_running, num_waiting = load.count_sequences(self._counters.num_in_vllm, self._facts.max_num_seqs)
        return ServingStatus(
            policy_version=self.policy_version,
            is_held=not self._request_barrier.is_open,
            num_running=num_running,
            num_waiting=num_waiting + self._counters.num_waiting,
            generated_tokens=self._counters.tokens,
            generating_s=self._counters.seconds(),
            progress_count=self._counters.tokens,
            kv_cache_usage=load.kv_cache_usage,
            failure=None if self._is_restarting else self._transfer.damage or load.failure,
        )

    async def generate(self, request: Request) -> GenerationResult:
        async with self._admit(request) as admission:
            started = time.monotonic()
            answer = await self._client.generate(self._vllm_request(request, admission, stream=False))
            self._counters.tokens += sum(len(choice.token_ids) for choice in answer.choices)
            versions, seconds = admission.versions(self._base_versions), time.monotonic() - started
            return to_result(answer, request, versions, seconds, self.tokenizer.decode_after)

    async def stream(self, request: Request) -> AsyncIterator[CompletionDelta]:
        if request.num_prompt_top is not None:
            raise RequestError("prompt_logprobs cannot be streamed", fix="ask without stream")
        async with self._admit(request) as admission:
            answers = self._client.stream(self._vllm_request(request, admission, stream=True))
            async with aclosing(answers):  # if the client disconnects, vLLM must abort at once
                async for answer in answers:
                    self._counters.tokens += sum(len(choice.token_ids) for choice in answer.choices)
                    for delta in to_deltas(answer, request, admission.versions(self._base_versions)[-1]):
                        yield delta

    async def hold(self, mode: HoldMode, timeout_s: float) -> None:
        await self._changes.run(lambda: self._hold(mode, timeout_s))

    async def release(self, policy_version: int | None) -> float:
        async def release_when_held() -> float:
            if policy_version is not None:
                self._check_held()
            self._transfer.update.check_can_resume(policy_version)
            held_s = await self._release(policy_version)
            self._transfer.update.finish()
            return held_s

        return await self._changes.run(release_when_held)

    async def adopt(self, order: Adopt) -> float:
        return await self._changes.run(lambda: self._adopt(order))

    async def layout(self) -> Layout | None:
        is_split = self._facts.num_workers > 1
        return msgspec.convert(None if is_split else await self._client.rpc("treadle_layout"), Layout | None)

    async def fingerprints(self, policy_version: int, adapter: str | None = None) -> Mapping[str, str]:
        if adapter is not None:
            return await self._client.adapter_fingerprints(self._adapters.registry.served_name(adapter), policy_version)
        async with self._fingerprinting:
            return await self._client.fingerprints(policy_version, self._facts.num_workers)

    async def shards(self) -> Shards:
        answers = [] if self._facts.num_workers == 1 else await self._client.rpc_each("treadle_shards")
        return msgspec.convert({"workers": answers}, Shards)

    async def reload(self, folder: Path, policy_version: int | None) -> float:
        if not any((folder := absolute(folder)).glob("*.safetensors")):
            raise RequestError(f"{folder} holds no *.safetensors weights", fix="give the folder of a saved model")
        return await self._changes.run(lambda: self._reload(folder, policy_version))

    async def join(self, request: JoinGroup) -> None:
        await self._changes.run(lambda: self._transfer.join(self._client, request))

    async def receive(self, body: ReceiveWeights) -> Received:
        async def receive_when_held() -> Received:
            self._check_held()
            return await self._transfer.receive(self._client, body)

        return await self._changes.run(receive_when_held)

    async def restart(self, folder: Path, adapter: Path | None, policy_version: int) -> None:
        model = absolute(folder)
        try:
            begin = await asyncio.to_thread(self._prepare_server, model)
        except UserError as error:
            raise RequestError(error.message, fix=error.fix) from None
        validate = AdapterValidator(model, self._facts)
        if adapter is not None:  # before anything changes; it is checked again when it is loaded
            await asyncio.to_thread(validate, adapter.name, adapter, policy_version)
        await self._changes.run(lambda: self._restart(begin, adapter, policy_version, validate))

    async def load_adapter(self, name: str, path: Path, policy_version: int | None) -> Adapter:
        return await self._changes.run(lambda: self._adapters.load(name, path, policy_version))

    async def unload_adapter(self, name: str) -> None:
        """Make an adapter unavailable at once. vLLM unloads it when no request uses it and no other change runs; this
        waits for that up to the drain timeout."""
        self._adapters.registry.remove(name)
        unloading = self._changes.begin(self._unload_unused)
        await asyncio.wait({unloading}, timeout=self._drain_timeout_s)
        if unloading.done():
            await unloading  # raises its error, if any
        else:
            log.warning("adapter_unloads_later", name=name, reason="another change is running")
            unloading.add_done_callback(log_failure)

    def adapters(self) -> list[Adapter]:
        return self._adapters.registry.loaded()

    @property
    def serving_adapter(self) -> Adapter | None:
        return self._adapters.registry.serving

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.to_thread(self._server.stop)  # first: running requests end with an error that says so
        await self._changes.wait_until_idle(CLOSE_S)  # a running restart stops the server that it has started
        await self._client.close()

    @asynccontextmanager
    async def _admit(self, request: Request) -> AsyncIterator[Admission]:
        await self._request_barrier.wait(num_samples(request))
        self._check_open()
        borrowed = self._adapters.registry.acquire(request.adapter)
        adapter, model = borrowed if borrowed is not None else (None, MODEL_NAME)
        admission = Admission(model, adapter, len(self._base_versions) - 1, cache_salt=f"v{self._base_versions[-1]}")
        self._counters.enter(num_samples(request))
        try:
            yield admission
        finally:
            self._counters.leave(num_samples(request))
            if adapter is not None and self._adapters.registry.release(model):
                self._changes.begin(self._unload_unused).add_done_callback(log_failure)

    def _check_held(self) -> None:
        if self._request_barrier.is_open:
            raise EngineError("weights may change only while the engine is held", fix="POST /bridge/pause first")

    def _check_alive(self) -> None:
        self._check_open()
        exit_reason = None if self._is_restarting else self._client.exit_reason()
        if exit_reason is not None:
            raise EngineError(exit_reason, fix="POST /bridge/restart, or start the engine again")

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is shutting down", fix="start it again")

    def _vllm_request(self, request: Request, admission: Admission, *, stream: bool) -> VllmRequest:
        return build_vllm_request(
            request, model=admission.model, eos_ids=self._facts.eos_ids, cache_salt=admission.cache_salt, stream=stream
        )

    async def _hold(self, mode: HoldMode, timeout_s: float) -> None:
        was_open = self._request_barrier.is_open
        if not was_open and mode == "wait" and self._counters.num_in_vllm:
            raise EngineError("requests are frozen and cannot finish", fix="POST /bridge/resume first")
        self._request_barrier.close()
        try:
            if mode == "wait" and not await self._counters.wait_until_idle(timeout_s):
                raise EngineError(
                    f"{self._counters.num_in_vllm} completions were still running after {timeout_s:.0f} s"
                )
            await self._pause("keep" if mode == "wait" else mode, timeout_s)
        except EngineError:
            if was_open:
                with contextlib.suppress(EngineError):  # vLLM may be frozen nevertheless, or about to be
                    await self._client.call("/treadle/release", {"has_new_weights": False, "stay_held": False})
                self._held_at = None
                self._request_barrier.open()
            raise
        self._counters.pause()

    async def _pause(self, mode: HoldMode, timeout_s: float) -> None:
        order = {"mode": mode, "synchronize": self._facts.device != "cpu"}
        answer = await self._client.call("/treadle/hold", order, timeout_s)
        self._held_at = self._held_at or answer["held_at"]  # a second hold counts from the first
        deadline = time.monotonic() + timeout_s
        while mode == "abort" and not await self._counters.wait_until_idle(ABORT_RETRY_S):
            if time.monotonic() > deadline:
                raise EngineError(f"{self._counters.num_in_vllm} completions did not end within {timeout_s:.0f} s")
            await self._client.call("/treadle/hold", order, timeout_s)  # abort those that arrived since

    async def _release(self, policy_version: int | None, *, stay_held: bool = False) -> float:
        """Returns the seconds held; 0 if it was not held, or stays held."""
        is_new = policy_version is not None
        before = list(self._base_versions)
        if policy_version is not None:
            # Before a token can be sampled under it: a reported version may be too high, never too low.
            self._serve_version(policy_version)
        try:
            order = {"has_new_weights": is_new, "stay_held": stay_held}
            answer = await self._client.call("/treadle/release", order)
        except EngineError:
            self._base_versions = before
            raise
        if stay_held:
            return 0.0
        held_at, self._held_at = self._held_at, None
        self._counters.resume()
        self._request_barrier.open()
        return 0.0 if held_at is None else float(answer["released_at"] - held_at)

    async def _adopt(self, order: Adopt) -> float:
        if self._gate_file is None:
            raise RequestError("this engine shares no weights", fix="start it with --weights-file")
        check_publish_order(order, self.policy_version, PublishGate(self._gate_file))
        was_held, before = not self._request_barrier.is_open, list(self._base_versions)
        self._request_barrier.close()
        self._serve_version(order.policy_version)  # before a token can be sampled under it, as in _release
        try:
            held_s = await self._transfer.wait_for_write(self._client, self._gate_file, order)
        except (RequestError, EngineError) as error:
            self._base_versions = before
            if isinstance(error, RequestError) and not was_held:
                self._request_barrier.open()  # nothing was written
            raise
        if was_held:
            await self._release(None)
        self._request_barrier.open()
        return held_s

    def _serve_version(self, policy_version: int) -> None:
        if policy_version != self._base_versions[-1]:
            self._base_versions.append(policy_version)

    async def _reload(self, folder: Path, policy_version: int | None) -> float:
        version = self.policy_version + 1 if policy_version is None else policy_version
        was_held, repairs = not self._request_barrier.is_open, not self._transfer.update.is_consistent
        if not was_held:
            await self._hold("keep", self._drain_timeout_s)
        started = time.monotonic()
        try:
            loaded = await self._client.rpc(
                "treadle_load_weights",
                folder=str(folder),
                policy_version=self._base_versions[-1],
                must_be_all=repairs,
            )
        except RequestError:  # refused before anything was written
            if not was_held:
                await self._release(None)
            raise
        except EngineError as error:
            self._transfer.mark_damaged(f"weights of {folder} were taken over in part, or may yet be: {error.message}")
            raise
        log.info("reloaded", folder=str(folder), version=version, seconds=time.monotonic() - started, **loaded)
        # A failed publish had left the engine held, and nobody else would release it.
        held_s = await self._release(version, stay_held=was_held and not repairs)
        self._transfer.update.finish()
        return held_s

    async def _restart(
        self, begin: BeginServer, adapter: Path | None, policy_version: int, validate: AdapterValidator
    ) -> None:
        self._is_restarting = True
        try:
            await self._drain()
            await self._replace_server(begin)
            self._adapters = AdapterLoader(self._client, validate, self._server.scratch)
            self._transfer = WeightTransfer()
            if adapter is not None:
                await self._adapters.load(adapter.name, adapter, policy_version)
            self._serve_version(policy_version)
        finally:
            self._is_restarting = False
            self._request_barrier.open()

    async def _drain(self) -> None:
        """Let running requests finish; those that do not in time end with the server."""
        try:
            if self._request_barrier.is_open and self._client.exit_reason() is None:
                await self._hold("wait", self._drain_timeout_s)
        except EngineError as error:
            log.warning("restart_ends_requests", reason=error.message)
        self._request_barrier.close()

    async def _replace_server(self, begin: BeginServer) -> None:
        """`close` interrupts every wait in here by stopping the server that is waited for."""
        self._check_open()
        await asyncio.to_thread(self._server.stop)
        server, facts = await asyncio.to_thread(begin)
        former, self._server, self._client = self._client, server, VllmClient(server)
        self._held_at = None
        await former.close()
        if self._is_closed:
            await asyncio.to_thread(server.stop)
        self._check_open()
        tokenizer = await asyncio.to_thread(ModelTokenizer.load, facts.folder)
        await asyncio.to_thread(server.wait_until_ready, self._start_timeout_s)
        self._facts, self.tokenizer = facts, tokenizer
        self._counters.resume()

    async def _unload_unused(self) -> None:
        await self._adapters.unload_unused()  # looked up when the change runs: the server may have been replaced
