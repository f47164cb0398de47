"""What every route works with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.chat_template import TemplateWorker
from treadle.engines.port import Engine
from treadle.engines.surface.publishing import Publishing
from treadle.engines.text import Text
from treadle.errors import EngineError, RequestError
from treadle.log import get_logger
from treadle.net.exposition import Histogram
from treadle.sync.layout import Layout
from treadle.sync.shared_memory import remove_bridge_file, write_bridge_file

log = get_logger("engine")
MIN_CHARS_ENCODED = 1 << 18  # this much is always encoded: a word that a tokenizer does not know may be one token
LATENCY_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass
class Ledger:
    """What the surface counts. All of it belongs to the event loop."""

    started: float = field(default_factory=time.time)
    last_update_time: float | None = None  # seconds since 1970, of the last change of weights
    adapter_ids: dict[str, int] = field(default_factory=dict)
    num_adapter_loads: int = 0
    requests: dict[tuple[str, int], int] = field(default_factory=dict)  # by route and status
    seconds: dict[str, Histogram] = field(default_factory=dict)  # by route
    told_layout: Layout | None = None  # what the bridge file says

    def count(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] = self.requests.get((route, status), 0) + 1
        self.seconds.setdefault(route, Histogram(LATENCY_BOUNDS_S)).observe(seconds)

    def weights_changed(self) -> None:
        self.last_update_time = time.time()

    def adapter_loaded(self, name: str) -> int:
        """Its number; a load that was repeated keeps it."""
        if name not in self.adapter_ids:
            self.num_adapter_loads += 1
            self.adapter_ids[name] = self.num_adapter_loads
        return self.adapter_ids[name]


@dataclass(frozen=True)
class Served:
    """One engine, and what the surface knows beside it."""

    engine: Engine
    model_name: str  # as it was asked for at the start
    pause_timeout_s: float
    adapter_root: Path  # the folder from which adapters and weights are loaded, resolved
    model_folder: Path  # what the engine was started with, which is always loaded again
    bridge_file: Path | None = None  # where a trainer can read which weights are shared
    ledger: Ledger = field(default_factory=Ledger)
    templates: TemplateWorker = field(default_factory=TemplateWorker)
    publishing: Publishing = field(default_factory=Publishing)

    @property
    def text(self) -> Text:
        return self.engine.text

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any] | None,
    ) -> list[int]:
        """Token ids of a conversation, as the model's own chat template writes it."""
        text = self.text
        if not text.is_chat_loaded:
            await asyncio.to_thread(text.load_chat)
        source, values = text.chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, options=options
        )
        rendered = await self.templates.render_async(source, values)
        self._refuse_longer(rendered)
        return text.encode_rendered(rendered)

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt."""
        self._refuse_longer(prompt)
        return self.text.encode(prompt)

    def _refuse_longer(self, prompt: str) -> None:
        """Encoding megabytes of text takes seconds, in which no other request is answered."""
        max_tokens = self.engine.facts.max_model_len
        if len(prompt) > MIN_CHARS_ENCODED and len(prompt) > max_tokens * self.text.longest_token:
            raise RequestError(f"a prompt of {len(prompt):,} characters is longer than --max-model-len {max_tokens}")

    async def write_bridge_file(self) -> None:
        if self.bridge_file is None:
            return
        try:
            layout = await self.engine.layout()
        except EngineError as error:  # whoever asks for the layout is told the same
            log.error("bridge_file_not_written", reason=str(error))
            return
        if layout is not None:
            write_bridge_file(self.bridge_file, layout)
            self.ledger.told_layout = layout

    def remove_bridge_file(self) -> None:
        if self.bridge_file is not None and self.ledger.told_layout is not None:
            remove_bridge_file(self.bridge_file, self.ledger.told_layout)
