"""Resolve a model name to a local folder that is safe to load, and inspect models on disk for `treadle doctor`.

Also a program, so that the launcher never loads torch: `python -m treadle.engines.models NAME` prints the folder,
`python -m treadle.engines.models --inspect NAME` prints one line of JSON and downloads nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from treadle.config import DEFAULT_MODEL
from treadle.config.advice import as_flags_of
from treadle.engines.default_model import cache_folder, default_model_folder, prepare_default_model
from treadle.engines.model_folder import check_model_folder, missing_weights, refuse_code
from treadle.errors import ModelError, TreadleError, as_user_error
from treadle.sync.model_folders import find_model, is_path

# Only safetensors weights are downloaded: every other format can run code when it is opened.
FETCHED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "*.txt"]


def resolve_model(name: str) -> Path:
    """The local folder of a model: the built-in default, a folder, or a Hugging Face id (downloaded when needed)."""
    if name == DEFAULT_MODEL:
        folder = prepare_default_model()
        try:
            check_model_folder(folder)
        except ModelError as error:
            raise ModelError(error.message, fix=f"delete {folder}: it is made again") from None
        return folder
    folder = Path(os.path.expanduser(name))  # leaves ~user where there is no such user
    if not os.path.isdir(folder):  # False also for a name that is too long
        folder = _fetch(name)
    check_model_folder(folder)
    return folder.resolve()


def _fetch(name: str) -> Path:
    find_model(name)  # refuses a path that does not exist
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=FETCHED))
    except Exception as error:  # errors of huggingface_hub have no common base class; all mean that there is no model
        kind = type(error).__name__
        raise ModelError(
            f"there is no folder '{name}', and it could not be fetched from the model hub ({kind})",
            fix=f"check --model (a folder, a Hugging Face id, or {DEFAULT_MODEL}) and the network",
        ) from None


def main(name: str, verb: str = "run", *typed: str) -> int:
    """Print the folder of the model `name`. `verb` is the user's command; error messages name its flags as `typed`."""
    failure: TreadleError
    try:
        print(resolve_model(name))
        return 0
    except TreadleError as error:
        failure = error
    except OSError as error:
        known = as_user_error(error)
        if known is None:
            raise
        failure = known
    sys.stderr.write(f"treadle: {as_flags_of(verb, str(failure), typed=typed)}\n")
    return failure.exit_code


def inspect_model(name: str) -> dict[str, Any]:
    """Where a model is on this disk, if it is, and what is wrong with it."""
    path = Path(os.path.expanduser(name))
    if name == DEFAULT_MODEL:
        kind = "built-in"
        folder: Path | None = default_model_folder()
    elif os.path.isdir(path) or is_path(name):
        kind, folder = "folder", path
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
    with contextlib.suppress(Exception):  # errors of huggingface_hub have no common base class; all mean: not cached
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=FETCHED, local_files_only=True))
    return None


def _missing_files(folder: Path) -> list[str]:
    """Weight files named by the index, and a tokenizer, that an interrupted download did not fetch."""
    missing = missing_weights(folder)
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return missing if has_tokenizer else [*missing, "tokenizer.json"]


if __name__ == "__main__":
    if sys.argv[1] == "--inspect":
        print(json.dumps({"cache": str(cache_folder()), "model": inspect_model(sys.argv[2])}))
    else:
        sys.exit(main(*sys.argv[1:]))
