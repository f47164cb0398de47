"""HTTP API of the engine process, written against engines/interface.py only."""
