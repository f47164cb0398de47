"""The page of a run: charts, rollouts, processes. The hub serves it; this package knows nothing of the hub."""

from treadle.dash.routes import open_pages

__all__ = ["open_pages"]
