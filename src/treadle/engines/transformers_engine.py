"""Implement the engine interface with transformers: coroutines of the HTTP API on top of the generation thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import transformers

from treadle.background import in_background
from treadle.config import EngineConfig
from treadle.engines.interface import (
    HOLD_TIMEOUT_S,
    Adapter,
    CompletionDelta,
    EngineFacts,
    GenerationResult,
    HoldMode,
    Request,
    ServingStatus,
    check_takes_adapters,
    find_loaded_adapter,
)
from treadle.engines.model_folder import check_model_folder
from treadle.engines.model_runner import ModelRunner
from treadle.engines.scheduler import Scheduler
from treadle.engines.tokenizer import ModelTokenizer, has_tokenizer
from treadle.engines.weight_updates import (
    REPUBLISH_FIX,
    BroadcastReceiver,
    WeightUpdateState,
    check_group,
    read_weights,
    write_weights,
)
from treadle.errors import EngineError, ModelError, RequestError, SyncError
from treadle.faults import reach
from treadle.log import get_logger
from treadle.sync.fingerprint import fingerprints
from treadle.sync.gate import PublishGate, check_publish_order, wait_for_trainer
from treadle.sync.layout import Layout
from treadle.wire.bridge import Adopt, JoinGroup, Received, ReceiveWeights, Shards

if TYPE_CHECKING:
    from treadle.engines.lora import AdapterFiles

log = get_logger("engine")
T = TypeVar("T")


class TransformersEngine:
    """`TransformersEngine(config, folder)` loads the model and serves until `close`."""

    def __init__(self, config: EngineConfig, folder: Path, *, on_failure: Callable[[], None] = lambda: None) -> None:
        self._config = config
        self._scheduler = Scheduler(ModelRunner(config, folder), config.max_num_seqs, on_failure=on_failure)
        self._receiver = BroadcastReceiver()
        self._update = WeightUpdateState()
        self._changing = asyncio.Lock()  # serializes changes of weights and adapters

    @property
    def tokenizer(self) -> ModelTokenizer:
        return self._runner.tokenizer

    @property
    def facts(self) -> EngineFacts:
        runner = self._runner
        return EngineFacts(
            kind="transformers",
            version=transformers.__version__,
            folder=runner.folder,
            device=str(runner.device),
            dtype=str(runner.model.dtype).removeprefix("torch."),
            max_model_len=runner.max_model_len,
            vocab_size=runner.model.config.vocab_size,
            eos_ids=runner.eos_ids,
            max_num_seqs=self._config.max_num_seqs,
            has_lora=self._config.enable_lora,
            max_lora_rank=self._config.max_lora_rank if self._config.enable_lora else None,
            quantization=self._config.quantization,
        )

    @property
    def _runner(self) -> ModelRunner:
        return self._scheduler.runner

    @property
    def policy_version(self) -> int:
        return self._scheduler.policy_version

    async def status(self) -> ServingStatus:
        return self._scheduler.status()

    async def generate(self, request: Request) -> GenerationResult:
        return await asyncio.wrap_future(self._scheduler.submit(request))  # cancelled with this coroutine

    async def stream(self, request: Request) -> AsyncIterator[CompletionDelta]:
        queue: asyncio.Queue[list[CompletionDelta] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(deltas: list[CompletionDelta] | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, deltas)

        def end(done: Future[GenerationResult]) -> None:
            if not done.cancelled():
                put(None)

        future = self._scheduler.submit(request, put)
        future.add_done_callback(end)
        try:
            while (deltas := await queue.get()) is not None:
                for delta in deltas:
                    yield delta
            future.result()  # raises its error, if any
        finally:
            future.cancel()

    async def hold(self, mode: HoldMode, timeout_s: float) -> None:
        await asyncio.to_thread(self._scheduler.hold, mode, timeout_s)

    async def release(self, policy_version: int | None) -> float:
        def resume() -> float:
            reach("engine:release")
            self._update.check_can_resume(policy_version)
            held_s = self._scheduler.release(policy_version)
            self._update.finish()
            return held_s

        return await asyncio.to_thread(resume)

    async def adopt(self, order: Adopt) -> float:
        return await asyncio.shield(self._adopt(order))  # continues if the client disconnects: the trainer is writing

    async def _adopt(self, order: Adopt) -> float:
        async with self._changing:
            layout = self._runner.layout
            if layout is None:
                raise RequestError("this engine shares no weights", fix="start it with --weights-file")
            gate = PublishGate(Path(layout.gate))
            check_publish_order(order, self.policy_version, gate)
            # In a daemon thread: an engine that shuts down does not wait for a trainer.
            waiting = asyncio.wrap_future(in_background("at the gate", lambda: self._wait_for_write(gate, order)))
            try:
                if not await wait_for_trainer(waiting, gate, order.number, order.timeout_s):
                    gate.abandon(order.number)
                return await waiting
            except BaseException:
                gate.abandon(order.number)
                raise

    def _wait_for_write(self, gate: PublishGate, order: Adopt) -> float:
        self._scheduler.hold("keep", HOLD_TIMEOUT_S)
        self._update.begin()
        try:
            gate.wait_for_write(order.number)
        except SyncError as error:  # the weights may be half written: it stays held
            self._update.fail(error.message)
            raise EngineError(error.message, fix=error.fix) from None
        reach("engine:release")
        held_s = self._scheduler.release(order.policy_version)
        self._update.finish()
        return held_s

    async def layout(self) -> Layout | None:
        return self._runner.layout

    async def fingerprints(self, policy_version: int, adapter: str | None = None) -> Mapping[str, str]:
        def read() -> dict[str, str]:
            if adapter is None:
                return fingerprints(self._runner.weights.items(), policy_version)
            if adapter not in self._scheduler.adapters:
                raise RequestError(f"no adapter '{adapter}' is loaded", fix="GET /lora/status lists what is")
            return fingerprints(self._runner.adapters.matrices(adapter, self._runner.model.dtype), policy_version)

        return await self._between_tokens(read)

    async def shards(self) -> Shards:
        return Shards(workers=[])

    async def reload(self, folder: Path, policy_version: int | None) -> float:
        def write() -> float:
            started = time.monotonic()
            try:
                write_weights(found, self._runner.named_weights)
            except Exception as error:
                self._update.fail(f"weights of {folder} were taken over in part: {error}")
                self._scheduler.hold_now()
                raise EngineError(f"weights of {folder} were taken over in part: {error}", fix=REPUBLISH_FIX) from error
            following = self._scheduler.policy_version + 1
            self._scheduler.weights_changed(following if policy_version is None else policy_version)
            self._update.finish()
            return time.monotonic() - started

        async with self._changing:
            version, repairs = self._scheduler.policy_version, not self._update.is_consistent
            found = await asyncio.to_thread(
                read_weights, folder, self._runner.named_weights, version, must_be_all=repairs
            )
            held_s = await self._between_tokens(write)
            if repairs:  # a failed publish had left the engine held, and nobody else would release it
                await asyncio.to_thread(self._scheduler.release, None)
            return held_s

    async def join(self, request: JoinGroup) -> None:
        async with self._changing:
            await asyncio.to_thread(self._receiver.join, request, self._runner.weights)

    async def receive(self, body: ReceiveWeights) -> Received:
        def write() -> Received:
            self._scheduler.check_held()
            check_group(self._receiver.name, body.group)
            self._update.begin()
            try:
                received = self._receiver.receive(body.group, self._runner.weights)
            except SyncError as error:
                self._update.fail(error.message)
                raise
            self._update.received()
            return received

        async with self._changing:
            return await self._between_tokens(write)

    async def restart(self, folder: Path, adapter: Path | None, policy_version: int) -> None:
        if adapter is not None:
            check_takes_adapters(self.facts)
        async with self._changing:
            files = None
            if adapter is not None:
                from treadle.engines.lora import read_adapter  # imports PEFT, which is slow and rarely needed

                files = await asyncio.to_thread(read_adapter, adapter)
            try:
                await asyncio.to_thread(check_model_folder, folder)
                await self._between_tokens(lambda: self._replace_runner(folder, files, policy_version))
            except ModelError as error:
                raise RequestError(error.message, fix=error.fix) from None
            self._receiver.leave()
            self._receiver, self._update = BroadcastReceiver(), WeightUpdateState()
            await asyncio.to_thread(self._scheduler.release, None)  # a failed publish may have left it held

    def _replace_runner(self, folder: Path, files: AdapterFiles | None, policy_version: int) -> None:
        """One task, so that no token comes from the new model without its adapter; a misfit changes nothing."""
        runner = ModelRunner(self._config, folder, None if has_tokenizer(folder) else self._runner.tokenizer)
        if files is None:
            self._scheduler.replace_runner(runner, policy_version)
            return
        from treadle.engines.lora import check_adapter

        check_adapter(files, runner.model, folder, self._config.max_lora_rank)
        name = files.path.name
        runner.adapters.add(name, files)
        self._scheduler.replace_runner(runner, policy_version)
        self._scheduler.add_adapter(Adapter(name, files.path, files.settings.rank, policy_version))
        self._scheduler.move_running_to(name)

    async def load_adapter(self, name: str, path: Path, policy_version: int | None) -> Adapter:
        check_takes_adapters(self.facts)
        async with self._changing:
            known = find_loaded_adapter(self.adapters(), name, path, policy_version)
            return known or await self._load(name, path, policy_version)

    async def unload_adapter(self, name: str) -> None:
        async with self._changing:
            await asyncio.to_thread(self._scheduler.remove_adapter, name, HOLD_TIMEOUT_S)
            await self._between_tokens(lambda: self._scheduler.drop_adapter(name))

    def adapters(self) -> list[Adapter]:
        return list(self._scheduler.adapters.values())

    @property
    def serving_adapter(self) -> Adapter | None:
        return self._scheduler.policy_adapter

    async def close(self) -> None:
        self._scheduler.stop()  # not in a thread: all of them may wait for the scheduler
        await asyncio.to_thread(self._scheduler.join)

    async def _load(self, name: str, path: Path, policy_version: int | None) -> Adapter:
        from treadle.engines.lora import BaseWeightsChanged, check_adapter, read_adapter

        files = await asyncio.to_thread(read_adapter, path)
        check_adapter(files, self._runner.model, self._runner.folder, self._config.max_lora_rank)
        adapter = Adapter(name, path, files.settings.rank, policy_version)

        def add() -> None:
            try:
                self._runner.adapters.add(name, files)
            except BaseWeightsChanged as error:  # nothing may be sampled from weights that were never published
                self._update.fail(error.message)
                self._scheduler.hold_now()
                log.error("base_weights_changed", adapter=str(path), reason=error.message)
                raise
            self._scheduler.add_adapter(adapter)

        await self._between_tokens(add)
        return adapter

    async def _between_tokens(self, work: Callable[[], T]) -> T:
        """Run `work` on the generation thread; it is finished even if the client disconnects."""
        return await asyncio.shield(asyncio.wrap_future(self._scheduler.between_tokens(work)))
