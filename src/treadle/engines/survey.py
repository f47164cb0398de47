"""A model as it lies on this disk, and where ours are kept: `python -m treadle.engines.survey MODEL`.

One line of JSON for `treadle doctor`, which never loads torch itself; neither does this. Nothing is fetched.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from treadle.config import DEFAULT_MODEL
from treadle.engines.default_model import cache_folder, default_model_folder
from treadle.engines.model_folder import check_model_folder, missing_weights, refuse_code
from treadle.engines.models import FETCHED
from treadle.errors import TreadleError
from treadle.sync.model_folders import is_path


def survey_model(name: str) -> dict[str, Any]:
    """Where it lies on this disk, if it does, and what is wrong with it."""
    place = Path(os.path.expanduser(name))
    if name == DEFAULT_MODEL:
        kind = "built-in"
        folder: Path | None = default_model_folder()
    elif os.path.isdir(place) or is_path(name):
        kind, folder = "folder", place
    else:
        kind, folder = "hub", _cached(name)
    found: dict[str, Any] = {"kind": kind, "folder": str(folder) if folder else ""}
    if folder is None or not os.path.isdir(folder):
        return found | {"is_here": False}
    try:
        missing = _missing_files(folder)
        if missing:
            refuse_code(folder)
        else:
            check_model_folder(folder)
    except TreadleError as error:
        return found | {"is_here": True, "error": error.message, "fix": error.fix}
    return found | {"is_here": True, "missing": missing}


def _cached(name: str) -> Path | None:
    with contextlib.suppress(Exception):  # the hub client's errors have no common base; all mean: it is not here
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=FETCHED, local_files_only=True))
    return None


def _missing_files(folder: Path) -> list[str]:
    """Parts that the index of the weights names, and a tokenizer: what a download that broke off has left out."""
    missing = missing_weights(folder)
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return missing if has_tokenizer else [*missing, "tokenizer.json"]


if __name__ == "__main__":
    print(json.dumps({"cache": str(cache_folder()), "model": survey_model(sys.argv[1])}))
