"""The page of a run: charts, rollouts, processes. Served by the hub, or exported into one file."""

from treadle.dash.routes import open_pages

__all__ = ["open_pages"]
