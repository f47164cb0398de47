"""Shared state of the HTTP routes: the engine, request statistics, and which trainer may publish.

Versions are numbers of a run. Two runs that publish to one engine would give one number to two sets of weights, and
environments of both would sample from them. So an engine belongs to the run that published to it first, until it is
restarted (`PublisherCheck`):

    a trainer of another run                                     is refused
    a second trainer of the same run, the first still running    is refused
    the same, the first has ended or cannot be checked           takes over; later requests of the first are refused
    a request without a publisher header (curl, Atropos)         is accepted while no trainer has published
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from treadle.chat_template import TemplateWorker
from treadle.engines.interface import InferenceEngine
from treadle.engines.tokenizer import ModelTokenizer
from treadle.errors import EngineError, RequestError
from treadle.log import get_logger
from treadle.net.exposition import Histogram
from treadle.sync.layout import Layout
from treadle.sync.process_identity import PUBLISHER_HEADER, Publisher, read_publisher
from treadle.sync.shared_memory import remove_bridge_file, write_bridge_file

_FIX = "let one trainer publish to one engine; for another run, start the engine again or POST /bridge/restart by hand"
log = get_logger("engine")
MIN_CHARS_ENCODED = 1 << 18  # shorter prompts are always encoded: an unknown word may become a single token
LATENCY_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class PublisherCheck:
    """Decides which trainer may change the weights. Used only on the event loop."""

    def __init__(self) -> None:
        self._publisher: Publisher | None = None
        self._replaced: list[Publisher] = []

    @contextmanager
    def authorize(self, http: HttpRequest, *, allow_anonymous: bool = False) -> Iterator[None]:
        """Wrap every change of weights or of their version; raises RequestError for other publishers.

        `allow_anonymous`: also accept a request without a publisher header although a trainer publishes.
        """
        asking, before = _publisher_of(http), self._publisher
        if asking is None:
            if before is not None and not allow_anonymous:
                raise RequestError(f"the trainer of {before.run} publishes to this engine", fix=_FIX)
            yield
            return
        self._refuse_other(asking)
        self._publisher = asking
        if before is not None and not before.is_same_process(asking):
            self._replaced.append(before)
        try:
            yield
        except RequestError:  # nothing has changed
            if before is None:
                self._publisher = None
            raise

    def reset(self, http: HttpRequest) -> None:
        """After a restart that was requested by hand, any run may publish."""
        if _publisher_of(http) is None:
            self._publisher, self._replaced = None, []

    def _refuse_other(self, asking: Publisher) -> None:
        if any(asking.is_same_process(former) for former in self._replaced):
            raise RequestError(f"another trainer of {asking.run} publishes to this engine now", fix=_FIX)
        known = self._publisher
        if known is None or known.is_same_process(asking):
            return
        if known.run != asking.run:
            raise RequestError(f"this engine serves versions of {known.run}, not of {asking.run}", fix=_FIX)
        if not known.may_be_gone:
            raise RequestError(
                f"another trainer of {asking.run} publishes to this engine (process {known.process.pid})", fix=_FIX
            )


def _publisher_of(http: HttpRequest) -> Publisher | None:
    header = http.headers.get(PUBLISHER_HEADER)
    if header is None:
        return None
    try:
        return read_publisher(header)
    except msgspec.DecodeError as error:
        raise RequestError(f"the header {PUBLISHER_HEADER} cannot be read: {error}") from None


@dataclass
class RequestStats:
    """Counters of the HTTP API. Used only on the event loop."""

    started: float = field(default_factory=time.time)
    last_update_time: float | None = None  # Unix time of the last weight update
    adapter_ids: dict[str, int] = field(default_factory=dict)
    num_adapter_loads: int = 0
    requests: dict[tuple[str, int], int] = field(default_factory=dict)  # by route and status
    seconds: dict[str, Histogram] = field(default_factory=dict)  # by route
    bridge_layout: Layout | None = None  # contents of the bridge file

    def count(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] = self.requests.get((route, status), 0) + 1
        self.seconds.setdefault(route, Histogram(LATENCY_BOUNDS_S)).observe(seconds)

    def weights_changed(self) -> None:
        self.last_update_time = time.time()

    def adapter_loaded(self, name: str) -> int:
        """The adapter's id; a repeated load keeps it."""
        if name not in self.adapter_ids:
            self.num_adapter_loads += 1
            self.adapter_ids[name] = self.num_adapter_loads
        return self.adapter_ids[name]


@dataclass(frozen=True)
class ApiContext:
    """The engine, and what all routes share."""

    engine: InferenceEngine
    model_name: str  # as given at start
    pause_timeout_s: float
    adapter_root: Path  # adapters and weights are loaded only from this folder (resolved)
    model_folder: Path  # that the engine was started with; it may always be loaded again
    bridge_file: Path | None = None  # tells trainers where the shared weights are
    stats: RequestStats = field(default_factory=RequestStats)
    templates: TemplateWorker = field(default_factory=TemplateWorker)
    publishers: PublisherCheck = field(default_factory=PublisherCheck)

    @property
    def tokenizer(self) -> ModelTokenizer:
        return self.engine.tokenizer

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any] | None,
    ) -> list[int]:
        """Token ids of a conversation, rendered with the model's chat template."""
        tokenizer = self.tokenizer
        if not tokenizer.is_chat_loaded:
            await asyncio.to_thread(tokenizer.load_chat)
        source, values = tokenizer.chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, options=options
        )
        rendered = await self.templates.render_async(source, values)
        self._check_length(rendered)
        return tokenizer.encode_rendered(rendered)

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt; refuses one that cannot fit."""
        self._check_length(prompt)
        return self.tokenizer.encode(prompt)

    def _check_length(self, prompt: str) -> None:
        """Encoding megabytes of text takes seconds, and blocks all other requests."""
        max_tokens = self.engine.facts.max_model_len
        if len(prompt) > MIN_CHARS_ENCODED and len(prompt) > max_tokens * self.tokenizer.longest_token:
            raise RequestError(f"a prompt of {len(prompt):,} characters is longer than --max-model-len {max_tokens}")

    async def write_bridge_file(self) -> None:
        if self.bridge_file is None:
            return
        try:
            layout = await self.engine.layout()
        except EngineError as error:  # GET /bridge/state_dict_info reports the same error
            log.error("bridge_file_not_written", reason=str(error))
            return
        if layout is not None:
            write_bridge_file(self.bridge_file, layout)
            self.stats.bridge_layout = layout

    def remove_bridge_file(self) -> None:
        if self.bridge_file is not None and self.stats.bridge_layout is not None:
            remove_bridge_file(self.bridge_file, self.stats.bridge_layout)
