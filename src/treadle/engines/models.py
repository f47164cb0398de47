"""A model's name -> a local folder that is safe to load. Also a program: `python -m treadle.engines.models NAME`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from treadle.config import DEFAULT_MODEL
from treadle.engines.default_model import prepare_default_model
from treadle.errors import ModelError, TreadleError, as_user_error

# Weights come as safetensors only: every other format can run code when it is opened.
FETCHED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "*.txt"]
REFUSED_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".py"}


def resolve_model(name: str) -> Path:
    """The local folder of a model: the built-in default, a folder, or a Hugging Face id (fetched when needed)."""
    if name == DEFAULT_MODEL:
        return prepare_default_model()
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _fetch(name)
    _refuse_unsafe(folder)
    return folder.resolve()


def _fetch(name: str) -> Path:
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"there is no model folder '{name}'", fix="check --model-name")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=FETCHED))
    except Exception as error:  # the hub client's errors have no common base; all mean: no model
        kind = type(error).__name__
        raise ModelError(
            f"there is no folder '{name}', and it could not be fetched from the model hub ({kind})",
            fix=f"check --model-name (a folder, a Hugging Face id, or {DEFAULT_MODEL}) and the network",
        ) from None


def _refuse_unsafe(folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder} holds no config.json", fix="--model-name takes a folder saved by save_pretrained")
    try:
        settings = json.loads(config.read_text())
    except ValueError:
        raise ModelError(f"{config} is damaged: it cannot be parsed", fix="fetch or save the model again") from None
    if "auto_map" in settings:
        raise ModelError(f"{folder} asks to run its own code (auto_map)", fix="use a model that transformers knows")
    unsafe = sorted(p.name for p in folder.iterdir() if p.suffix in REFUSED_SUFFIXES)
    if unsafe:
        raise ModelError(f"{folder} holds {unsafe[0]}, which can run code", fix="keep safetensors weights only")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} holds no *.safetensors weights", fix="save the model with save_pretrained")


if __name__ == "__main__":
    try:
        print(resolve_model(sys.argv[1]))
    except TreadleError as error:
        sys.stderr.write(f"treadle: {error}\n")
        sys.exit(error.exit_code)
    except OSError as error:
        if (known := as_user_error(error)) is None:
            raise
        sys.stderr.write(f"treadle: {known}\n")
        sys.exit(known.exit_code)
