"""Publish new weights to an engine. Each mode implements `attach` and `publish` (protocol.py)."""
