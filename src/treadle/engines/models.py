"""A model's name -> a local folder that is safe to load. Also a program: `python -m treadle.engines.models NAME`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from treadle.config import DEFAULT_MODEL
from treadle.config.advice import as_flags_of
from treadle.engines.default_model import prepare_default_model
from treadle.engines.model_folder import check_model_folder
from treadle.errors import ModelError, TreadleError, as_user_error
from treadle.sync.model_folders import find_model

# Weights come as safetensors only: every other format can run code when it is opened.
FETCHED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "*.txt"]


def resolve_model(name: str) -> Path:
    """The local folder of a model: the built-in default, a folder, or a Hugging Face id (fetched when needed)."""
    if name == DEFAULT_MODEL:
        folder = prepare_default_model()
        try:
            check_model_folder(folder)
        except ModelError as error:
            raise ModelError(error.message, fix=f"delete {folder}: it is made again") from None
        return folder
    folder = Path(os.path.expanduser(name))  # leaves ~user where there is no such user
    if not os.path.isdir(folder):  # also where its name is too long
        folder = _fetch(name)
    check_model_folder(folder)
    return folder.resolve()


def _fetch(name: str) -> Path:
    find_model(name)  # refuses a path that is not there
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=FETCHED))
    except Exception as error:  # the hub client's errors have no common base; all mean: no model
        kind = type(error).__name__
        raise ModelError(
            f"there is no folder '{name}', and it could not be fetched from the model hub ({kind})",
            fix=f"check --model (a folder, a Hugging Face id, or {DEFAULT_MODEL}) and the network",
        ) from None


def main(name: str, verb: str = "run", *typed: str) -> int:
    """`verb`: the command that the user called; error messages name its flags, as they were `typed`."""
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
