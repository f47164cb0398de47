"""Treadle: generate -> score -> train -> publish, turn after turn."""

__version__ = "0.1.0"
