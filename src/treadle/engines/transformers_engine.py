"""The transformers engine behind the port: the surface's coroutines on one side, the generation thread on the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import transformers

from treadle.config import EngineConfig
from treadle.engines.interface import (
    Adapter,
    Delta,
    EngineFacts,
    EngineState,
    Generation,
    HoldMode,
    Request,
    find_loaded,
)
from treadle.engines.model_folder import check_model_folder
from treadle.engines.model_runner import TransformersEngine
from treadle.engines.scheduler import Scheduler
from treadle.engines.tokenizer import Text, has_tokenizer
from treadle.engines.weight_updates import REPUBLISH_FIX, Arrival, Receiver, read_weights, write_weights
from treadle.errors import EngineError, ModelError, RequestError, SyncError
from treadle.faults import reach
from treadle.log import get_logger
from treadle.sync.background import in_background
from treadle.sync.fingerprint import fingerprints
from treadle.sync.gate import Gate, is_written, refuse_misled
from treadle.sync.layout import Layout
from treadle.wire.bridge import Adopt, JoinGroup, Received, ReceiveWeights

if TYPE_CHECKING:
    from treadle.engines.lora import AdapterFiles

log = get_logger("engine")
T = TypeVar("T")


class TransformersServer:
    """`TransformersServer(config, folder)` loads the model and serves until `close`."""

    def __init__(self, config: EngineConfig, folder: Path, *, on_failure: Callable[[], None] = lambda: None) -> None:
        self._config = config
        self._scheduler = Scheduler(TransformersEngine(config, folder), config.max_num_seqs, on_failure=on_failure)
        self._receiver = Receiver()
        self._arrival = Arrival()
        self._changing = asyncio.Lock()  # one change of weights or adapters at a time

    @property
    def text(self) -> Text:
        return self._engine.text

    @property
    def facts(self) -> EngineFacts:
        engine = self._engine
        return EngineFacts(
            kind="transformers",
            version=transformers.__version__,
            folder=engine.folder,
            device=str(engine.device),
            dtype=str(engine.model.dtype).removeprefix("torch."),
            max_model_len=engine.max_model_len,
            vocab_size=engine.model.config.vocab_size,
            eos_ids=engine.eos_ids,
            logprobs_mode=self._config.logprobs_mode,
            max_num_seqs=self._config.max_num_seqs,
            has_lora=self._config.enable_lora,
            max_lora_rank=self._config.max_lora_rank if self._config.enable_lora else None,
            quantization=self._config.quantization,
        )

    @property
    def _engine(self) -> TransformersEngine:
        return self._scheduler.engine

    @property
    def policy_version(self) -> int:
        return self._scheduler.policy_version

    async def state(self) -> EngineState:
        scheduler = self._scheduler
        return EngineState(
            policy_version=scheduler.policy_version,
            is_held=scheduler.is_held,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            generated_tokens=scheduler.generated_tokens,
            generating_s=scheduler.generating_s,
            num_moves=scheduler.num_steps,
            failure=scheduler.failure,
        )

    async def generate(self, request: Request) -> Generation:
        return await asyncio.wrap_future(self._scheduler.submit(request))  # cancelled with us

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        news: asyncio.Queue[list[Delta] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(deltas: list[Delta] | None) -> None:
            loop.call_soon_threadsafe(news.put_nowait, deltas)

        def end(done: Future[Generation]) -> None:
            if not done.cancelled():
                tell(None)

        future = self._scheduler.submit(request, tell)
        future.add_done_callback(end)
        try:
            while (deltas := await news.get()) is not None:
                for delta in deltas:
                    yield delta
            future.result()  # an error, if it ended in one
        finally:
            future.cancel()

    async def hold(self, mode: HoldMode, timeout_s: float) -> None:
        await asyncio.to_thread(self._scheduler.hold, mode, timeout_s)

    async def release(self, policy_version: int | None) -> float:
        def let_go() -> float:
            reach("engine:release")
            self._arrival.refuse_going_on(policy_version)
            held_s = self._scheduler.release(policy_version)
            self._arrival.named()
            return held_s

        return await asyncio.to_thread(let_go)

    async def adopt(self, order: Adopt) -> float:
        async def in_its_turn() -> float:
            async with self._changing:
                return await self._adopt(order)

        return await asyncio.shield(in_its_turn())  # whoever asked may leave: somebody must look after the trainer

    async def _adopt(self, order: Adopt) -> float:
        layout = self._engine.layout
        if layout is None:
            raise RequestError("this engine shares no weights", fix="start it with --weights-file")
        gate = Gate(Path(layout.gate))
        refuse_misled(order, self.policy_version, gate)
        # In a thread that nobody has to wait for: an engine that is told to end does not wait for a trainer.
        standing = asyncio.wrap_future(in_background("at the gate", lambda: self._stand_still(gate, order)))
        try:
            if not await is_written(standing, gate, order.number, order.timeout_s):
                gate.give_up(order.number)
            return await standing
        except BaseException:
            gate.give_up(order.number)
            raise

    def _stand_still(self, gate: Gate, order: Adopt) -> float:
        self._scheduler.hold("keep", self._config.pause_timeout_s)
        self._arrival.begin()
        try:
            gate.stand_still(order.number)
        except SyncError as error:  # the weights may be half written: it stays held
            self._arrival.broke_off(error.message)
            raise EngineError(error.message, fix=error.fix) from None
        reach("engine:release")
        held_s = self._scheduler.release(order.policy_version)
        self._arrival.named()
        return held_s

    async def layout(self) -> Layout | None:
        return self._engine.layout

    async def fingerprints(self, policy_version: int, adapter: str | None = None) -> Mapping[str, str]:
        def read() -> dict[str, str]:
            if adapter is None:
                return fingerprints(self._engine.weights.items(), policy_version)
            if adapter not in self._scheduler.adapters:
                raise RequestError(f"no adapter '{adapter}' is loaded", fix="GET /lora/status lists what is")
            return fingerprints(self._engine.adapters.matrices(adapter, self._engine.model.dtype), policy_version)

        return await self._between_tokens(read)

    async def reload(self, folder: Path, policy_version: int | None) -> float:
        def write() -> float:
            started = time.monotonic()
            try:
                write_weights(found, self._engine.named_weights)
            except Exception as error:
                self._arrival.broke_off(f"weights of {folder} were taken over in part: {error}")
                self._scheduler.stay_still()
                raise EngineError(f"weights of {folder} were taken over in part: {error}", fix=REPUBLISH_FIX) from error
            following = self._scheduler.policy_version + 1
            self._scheduler.weights_changed(following if policy_version is None else policy_version)
            self._arrival.named()
            return time.monotonic() - started

        async with self._changing:
            version, mends = self._scheduler.policy_version, not self._arrival.is_settled
            found = await asyncio.to_thread(
                read_weights, folder, self._engine.named_weights, version, must_be_all=mends
            )
            held_s = await self._between_tokens(write)
            if mends:  # what was held because a publish broke off goes on: nobody else would let it
                await asyncio.to_thread(self._scheduler.release, None)
            return held_s

    async def join(self, request: JoinGroup) -> None:
        async with self._changing:
            await asyncio.to_thread(self._receiver.join, request, self._engine.weights)

    async def receive(self, body: ReceiveWeights) -> Received:
        def write() -> Received:
            self._scheduler.refuse_unless_still()
            self._receiver.refuse_other(body.group)
            self._arrival.begin()
            try:
                received = self._receiver.receive(body.group, self._engine.weights)
            except SyncError as error:
                self._arrival.broke_off(error.message)
                raise
            self._arrival.came()
            return received

        async with self._changing:
            return await self._between_tokens(write)

    async def restart(self, folder: Path, adapter: Path | None, policy_version: int) -> None:
        if adapter is not None:
            self._refuse_adapters()
        async with self._changing:
            files = None if adapter is None else await asyncio.to_thread(_read_adapter, adapter)
            try:
                await asyncio.to_thread(check_model_folder, folder)
                await self._between_tokens(lambda: self._replace_engine(folder, files, policy_version))
            except ModelError as error:
                raise RequestError(error.message, fix=error.fix) from None
            self._receiver.leave()
            self._receiver, self._arrival = Receiver(), Arrival()
            await asyncio.to_thread(self._scheduler.release, None)  # what a publish that failed had held

    def _replace_engine(self, folder: Path, files: AdapterFiles | None, policy_version: int) -> None:
        """One errand: no token comes from the new model without its adapter, and a misfit changes nothing."""
        engine = TransformersEngine(self._config, folder, None if has_tokenizer(folder) else self._engine.text)
        if files is None:
            self._scheduler.replace_engine(engine, policy_version)
            return
        from treadle.engines.lora import check_adapter

        check_adapter(files, engine.model, folder, self._config.max_lora_rank)
        name = files.path.name
        engine.adapters.add(name, files)
        self._scheduler.replace_engine(engine, policy_version)
        self._scheduler.add_adapter(Adapter(name, files.path, files.rank, policy_version))
        self._scheduler.go_on_with(name)

    async def load_adapter(self, name: str, path: Path, policy_version: int | None) -> Adapter:
        self._refuse_adapters()
        async with self._changing:
            known = find_loaded(self.adapters(), name, path, policy_version)
            return known or await self._load(name, path, policy_version)

    async def unload_adapter(self, name: str) -> None:
        async with self._changing:
            await asyncio.to_thread(self._scheduler.remove_adapter, name, self._config.pause_timeout_s)
            await self._between_tokens(lambda: self._scheduler.forget_adapter(name))

    def adapters(self) -> list[Adapter]:
        return list(self._scheduler.adapters.values())

    @property
    def serving_adapter(self) -> Adapter | None:
        return self._scheduler.policy_adapter

    async def close(self) -> None:
        self._scheduler.stop()
        await asyncio.to_thread(self._scheduler.join)

    def _refuse_adapters(self) -> None:
        if not self._config.enable_lora:
            raise EngineError("this engine takes no adapters", fix="start it with --enable-lora")

    async def _load(self, name: str, path: Path, policy_version: int | None) -> Adapter:
        from treadle.engines.lora import BaseWeightsChanged, check_adapter, read_adapter

        files = await asyncio.to_thread(read_adapter, path)
        check_adapter(files, self._engine.model, self._engine.folder, self._config.max_lora_rank)
        adapter = Adapter(name, path, files.rank, policy_version)

        def add() -> None:
            try:
                self._engine.adapters.add(name, files)
            except BaseWeightsChanged as error:  # nothing may be sampled from weights that nobody published
                self._arrival.broke_off(error.message)
                self._scheduler.stay_still()
                log.error("base_weights_changed", adapter=str(path), reason=error.message)
                raise
            self._scheduler.add_adapter(adapter)

        await self._between_tokens(add)
        return adapter

    async def _between_tokens(self, work: Callable[[], T]) -> T:
        """Whoever asked may leave; what was begun is finished, so that nothing stays half done."""
        return await asyncio.shield(asyncio.wrap_future(self._scheduler.between_tokens(work)))


def _read_adapter(path: Path) -> AdapterFiles:
    from treadle.engines.lora import read_adapter  # PEFT takes a while to load, and few engines need it

    return read_adapter(path)
