"""The engine's port, spoken to vLLM's server.

    requests ──> door ──(open: not held, not restarting)──> vLLM
                  ^
    hold(): the door closes and vLLM freezes (or finishes, or drops) what runs. release(version): both go on.

Requests wait at our door, not in vLLM, while weights change: so each is sent under the version it is sampled under,
and vLLM's prefix cache (kept apart by version through `cache_salt`) never gives it another version's keys and values.

A wave (port.Request.wave) asks for the same bits for the same seed. vLLM's numbers depend on what else is in a batch,
which no order of arrival can fix; requests of a wave are generated like all others.
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
    Adapter,
    Delta,
    EngineFacts,
    EngineState,
    Generation,
    HoldMode,
    Request,
)
from treadle.engines.model_folder import absolute, folder_of_weights
from treadle.engines.tokenizer import Text
from treadle.engines.vllm.adapters import AdapterLoading, CheckAdapter, check_for
from treadle.engines.vllm.admission import ChangeLine, Door, Meter, Pass, tell_failure
from treadle.engines.vllm.client import Arrivals, VllmClient, agreed_answer
from treadle.engines.vllm.command import MODEL_NAME
from treadle.engines.vllm.completions import Order, as_deltas, as_generation, num_asked, order_of
from treadle.engines.vllm.server_process import ServerProcess
from treadle.errors import EngineError, RequestError, UserError
from treadle.log import get_logger
from treadle.sync.gate import PublishGate, check_publish_order
from treadle.sync.layout import Layout
from treadle.wire.bridge import Adopt, JoinGroup, Received, ReceiveWeights

log = get_logger("engine")
ABORT_AGAIN_S = 0.1  # a request that reached vLLM after the others were dropped is dropped then

CLOSE_S = 30.0  # for a change that was under way to see that its server is gone

BeginServer = Callable[[], tuple[ServerProcess, EngineFacts]]  # one that loads now, and what it will serve
PrepareServer = Callable[[Path], BeginServer]  # for a model; a UserError where it cannot serve that


class VllmEngine:
    def __init__(
        self,
        server: ServerProcess,
        facts: EngineFacts,
        text: Text,
        prepare_server: PrepareServer,
        *,
        start_timeout_s: float,
        drain_timeout_s: float,
        gate: Path | None = None,
    ) -> None:
        """`gate`: of an engine that shares its weights (sync/gate.py)."""
        self._server = server
        self._client = VllmClient(server)
        self._facts = facts
        self._prepare_server = prepare_server
        self._start_timeout_s = start_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._gate = gate
        self._base_versions = [0]  # that the base model's weights have been, oldest first
        self._adapters = AdapterLoading(self._client, check_for(facts.folder, facts), server.scratch)
        self._changes = ChangeLine()
        self._arrivals = Arrivals()
        self._fingerprinting = asyncio.Lock()  # the worker keeps those of one question
        self._held_at: float | None = None  # by vLLM's clock, which is the machine's
        self._is_restarting = False
        self._is_closed = False
        self.text = text
        self._meter = Meter()
        self._door = Door(self._meter, self._refuse_when_dead)

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def policy_version(self) -> int:
        serving = self._adapters.book.serving
        by_adapter = serving.policy_version if serving is not None else None
        return self._base_versions[-1] if by_adapter is None else by_adapter

    async def state(self) -> EngineState:
        failure = None if self._is_restarting else self._arrivals.damage or await self._client.failure()
        return EngineState(
            policy_version=self.policy_version,
            is_held=not self._door.is_open,
            num_running=min(self._meter.in_vllm, self._facts.max_num_seqs),
            num_waiting=max(self._meter.in_vllm - self._facts.max_num_seqs, 0) + self._meter.at_door,
            generated_tokens=self._meter.tokens,
            generating_s=self._meter.seconds(),
            num_moves=self._meter.tokens,
            failure=failure,
        )

    async def generate(self, request: Request) -> Generation:
        async with self._through_door(request) as way:
            started = time.monotonic()
            answer = await self._client.generate(self._order(request, way, stream=False))
            self._meter.tokens += sum(len(choice.token_ids) for choice in answer.choices)
            versions, seconds = way.versions(self._base_versions), time.monotonic() - started
            return as_generation(answer, request, versions, seconds, self.text.decode_after)

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        if request.num_prompt_top is not None:
            raise RequestError("prompt_logprobs cannot be streamed", fix="ask without stream")
        async with self._through_door(request) as way:
            answers = self._client.stream(self._order(request, way, stream=True))
            async with aclosing(answers):  # a client that leaves: vLLM must hear of it at once
                async for answer in answers:
                    self._meter.tokens += sum(len(choice.token_ids) for choice in answer.choices)
                    for delta in as_deltas(answer, request, way.versions(self._base_versions)[-1]):
                        yield delta

    async def hold(self, mode: HoldMode, timeout_s: float) -> None:
        await self._changes.make(self._hold(mode, timeout_s))

    async def release(self, policy_version: int | None) -> float:
        async def release_when_held() -> float:
            if policy_version is not None:
                self._refuse_unless_held()
            self._arrivals.refuse_going_on(policy_version)
            held_s = await self._release(policy_version)
            self._arrivals.named()
            return held_s

        return await self._changes.make(release_when_held())

    async def adopt(self, order: Adopt) -> float:
        return await self._changes.make(self._adopt(order))

    async def layout(self) -> Layout | None:
        plain = await self._client.rpc("treadle_layout")
        return None if plain is None else msgspec.convert(plain, Layout)

    async def fingerprints(self, policy_version: int, adapter: str | None = None) -> Mapping[str, str]:
        if adapter is not None:
            order = {"name": self._adapters.book.served_name(adapter), "policy_version": policy_version}
            answers = await self._client.call("/treadle/adapter", order)
            return msgspec.convert(agreed_answer("treadle_adapter_fingerprints", answers), dict[str, str])
        async with self._fingerprinting:
            await self._client.rpc("treadle_begin_fingerprints", policy_version=policy_version)
            found = await self._client.rpc("treadle_read_fingerprints", policy_version=policy_version)
        return msgspec.convert(found, dict[str, str])

    async def reload(self, folder: Path, policy_version: int | None) -> float:
        return await self._changes.make(self._reload(folder_of_weights(folder), policy_version))

    async def join(self, request: JoinGroup) -> None:
        async def join_now() -> None:
            await self._arrivals.join(self._client, request)

        await self._changes.make(join_now())

    async def receive(self, body: ReceiveWeights) -> Received:
        async def receive_when_held() -> Received:
            self._refuse_unless_held()
            return await self._arrivals.receive(self._client, body)

        return await self._changes.make(receive_when_held())

    async def restart(self, folder: Path, adapter: Path | None, policy_version: int) -> None:
        model = absolute(folder)
        try:
            begin = await asyncio.to_thread(self._prepare_server, model)
        except UserError as error:
            raise RequestError(error.message, fix=error.fix) from None
        check = check_for(model, self._facts)
        on_top = None
        if adapter is not None:
            on_top = await asyncio.to_thread(check, adapter.name, adapter, policy_version)
        await self._changes.make(self._restart(begin, on_top, policy_version, check))

    async def load_adapter(self, name: str, path: Path, policy_version: int | None) -> Adapter:
        async def load() -> Adapter:
            return await self._adapters.check_and_load(name, path, policy_version)

        return await self._changes.make(load())

    async def unload_adapter(self, name: str) -> None:
        """Nobody can ask for it from here on. vLLM drops it as soon as nothing runs with it and nothing else changes:
        that is waited for, but not for ever."""
        self._adapters.book.remove(name)
        dropping = self._changes.begin(self._unload_unused())
        await asyncio.wait({dropping}, timeout=self._drain_timeout_s)
        if dropping.done():
            await dropping  # what went wrong, if anything did
        else:
            log.warning("adapter_goes_later", name=name, reason="another change is under way")
            dropping.add_done_callback(tell_failure)

    def adapters(self) -> list[Adapter]:
        return self._adapters.book.listed()

    @property
    def serving_adapter(self) -> Adapter | None:
        return self._adapters.book.serving

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.to_thread(self._server.stop)  # first: what runs ends with an error that says so
        await self._changes.wait_until_idle(CLOSE_S)  # a restart among them ends the server that it has begun
        await self._client.close()

    @asynccontextmanager
    async def _through_door(self, request: Request) -> AsyncIterator[Pass]:
        await self._door.wait(num_asked(request))
        self._refuse_when_closed()
        borrowed = self._adapters.book.borrow(request.adapter)
        adapter, model = borrowed if borrowed is not None else (None, MODEL_NAME)
        way = Pass(model, adapter, len(self._base_versions) - 1, cache_salt=f"v{self._base_versions[-1]}")
        self._meter.enter(num_asked(request))
        try:
            yield way
        finally:
            self._meter.leave(num_asked(request))
            if adapter is not None and self._adapters.book.give_back(model):
                self._changes.begin(self._unload_unused()).add_done_callback(tell_failure)

    def _refuse_unless_held(self) -> None:
        if self._door.is_open:
            raise EngineError("weights may change only while the engine is held", fix="POST /bridge/pause first")

    def _refuse_when_dead(self) -> None:
        self._refuse_when_closed()
        death = None if self._is_restarting else self._client.death()
        if death is not None:
            raise EngineError(death, fix="POST /bridge/restart, or start the engine again")

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is shutting down", fix="start it again")

    def _order(self, request: Request, way: Pass, *, stream: bool) -> Order:
        return order_of(request, model=way.model, eos_ids=self._facts.eos_ids, cache_salt=way.cache_salt, stream=stream)

    async def _hold(self, mode: HoldMode, timeout_s: float) -> None:
        was_open = self._door.is_open
        if not was_open and mode == "wait" and self._meter.in_vllm:
            raise EngineError("requests are frozen and cannot finish", fix="POST /bridge/resume first")
        self._door.close()
        try:
            if mode == "wait" and not await self._meter.wait_until_idle(timeout_s):
                raise EngineError(f"{self._meter.in_vllm} completions were still running after {timeout_s:.0f} s")
            await self._pause("keep" if mode == "wait" else mode, timeout_s)
        except EngineError:
            if was_open:
                await self._open_again()
            raise
        self._meter.stop()

    async def _open_again(self) -> None:
        """After a hold that failed: vLLM may have been frozen all the same, or be about to."""
        with contextlib.suppress(EngineError):
            await self._client.call("/treadle/release", {"has_new_weights": False, "stay_held": False})
        self._held_at = None
        self._door.open()

    async def _pause(self, mode: HoldMode, timeout_s: float) -> None:
        order = {"mode": mode, "settles": self._facts.device != "cpu"}
        answer = await self._client.call("/treadle/hold", order, timeout_s)
        self._held_at = self._held_at or answer["held_at"]  # asked twice, it was still from the first time on
        deadline = time.monotonic() + timeout_s
        while mode == "abort" and not await self._meter.wait_until_idle(ABORT_AGAIN_S):
            if time.monotonic() > deadline:
                raise EngineError(f"{self._meter.in_vllm} completions did not end within {timeout_s:.0f} s")
            await self._client.call("/treadle/hold", order, timeout_s)  # one was on its way there

    async def _release(self, policy_version: int | None, *, stay_held: bool = False) -> float:
        """Seconds that it stood still; 0 where it did not, or still does."""
        is_new = policy_version is not None
        before = list(self._base_versions)
        if policy_version is not None:
            # Before a token can be sampled under it: a token's version may be said too high, never too low.
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
        self._meter.go_on()
        self._door.open()
        return 0.0 if held_at is None else float(answer["released_at"] - held_at)

    async def _adopt(self, order: Adopt) -> float:
        if self._gate is None:
            raise RequestError("this engine shares no weights", fix="start it with --weights-file")
        check_publish_order(order, self.policy_version, PublishGate(self._gate))
        was_held, before = not self._door.is_open, list(self._base_versions)
        self._door.close()
        self._serve_version(order.policy_version)  # before a token can be sampled under it, as in _release
        try:
            held_s = await self._arrivals.stand_still(self._client, self._gate, order)
        except (RequestError, EngineError) as error:
            self._base_versions = before
            if isinstance(error, RequestError) and not was_held:
                self._door.open()  # nothing was written
            raise
        if was_held:
            await self._release(None)
        self._door.open()
        return held_s

    def _serve_version(self, policy_version: int) -> None:
        if policy_version != self._base_versions[-1]:
            self._base_versions.append(policy_version)

    async def _reload(self, folder: Path, policy_version: int | None) -> float:
        version = self.policy_version + 1 if policy_version is None else policy_version
        was_held, mends = not self._door.is_open, not self._arrivals.are_settled
        if not was_held:
            await self._hold("keep", self._drain_timeout_s)
        started = time.monotonic()
        try:
            loaded = await self._client.rpc(
                "treadle_load_weights",
                folder=str(folder),
                policy_version=self._base_versions[-1],
                must_be_all=mends,
            )
        except RequestError:  # refused before anything was written
            if not was_held:
                await self._release(None)
            raise
        except EngineError as error:
            self._arrivals.damaged(f"weights of {folder} were taken over in part, or may yet be: {error.message}")
            raise
        log.info("reloaded", folder=str(folder), version=version, seconds=time.monotonic() - started, **loaded)
        # What was held because a publish broke off goes on: nobody else would let it.
        held_s = await self._release(version, stay_held=was_held and not mends)
        self._arrivals.named()
        return held_s

    async def _restart(
        self, begin: BeginServer, adapter: Adapter | None, policy_version: int, check: CheckAdapter
    ) -> None:
        self._is_restarting = True
        try:
            await self._drain()
            await self._replace_server(begin)
            self._adapters = AdapterLoading(self._client, check, self._server.scratch)
            self._arrivals = Arrivals()
            if adapter is not None:
                await self._adapters.load(adapter)
            self._serve_version(policy_version)
        finally:
            self._is_restarting = False
            self._door.open()

    async def _drain(self) -> None:
        """Let what runs finish; what does not in time, or cannot, ends with the server."""
        try:
            if self._door.is_open and self._client.death() is None:
                await self._hold("wait", self._drain_timeout_s)
        except EngineError as error:
            log.warning("restart_ends_requests", reason=error.message)
        self._door.close()

    async def _replace_server(self, begin: BeginServer) -> None:
        """Whatever it waits for, `close` ends: by ending the server that it waits for."""
        self._refuse_when_closed()
        await asyncio.to_thread(self._server.stop)
        server, facts = await asyncio.to_thread(begin)
        former, self._server, self._client = self._client, server, VllmClient(server)
        self._held_at = None
        await former.close()
        if self._is_closed:
            await asyncio.to_thread(server.stop)
        self._refuse_when_closed()
        text = await asyncio.to_thread(Text.load, facts.folder)
        await asyncio.to_thread(server.wait_until_it_generates, self._start_timeout_s)
        self._facts, self.text = facts, text
        self._meter.go_on()

    async def _unload_unused(self) -> None:
        await self._adapters.unload_unused()  # of the server that is there when it is this change's turn
