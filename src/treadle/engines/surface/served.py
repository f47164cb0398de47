"""What every route works with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from treadle.engines.port import Engine
from treadle.engines.text import Text
from treadle.wire.exposition import Histogram

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
    text: Text
    model_name: str  # as it was asked for at the start
    pause_timeout_s: float
    ledger: Ledger = field(default_factory=Ledger)
