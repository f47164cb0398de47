"""The rollout API process: environments post scored groups, a trainer takes them in batches."""

from treadle.hub.process import serve

__all__ = ["serve"]
