"""What every route works with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from treadle.engines.port import Engine
from treadle.engines.text import Text
from treadle.errors import EngineError
from treadle.log import get_logger
from treadle.sync.bridge_file import remove_bridge_file, write_bridge_file
from treadle.sync.layout import Layout
from treadle.wire.exposition import Histogram

log = get_logger("engine")
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
    bridge_file: Path | None = None  # where a trainer can read which weights are shared
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def text(self) -> Text:
        return self.engine.text

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
