"""`treadle export`: write what a run has trained as a model folder, as a GGUF file, or into a repository of the Hub.

Adapters are merged into the weights. What would be refused is refused before weights are read.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined] # of its own HTTP client
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from peft import PeftModel
from transformers import AutoModelForCausalLM

from treadle.engines.model_folder import base_model_name, is_adapter, read_adapter_settings
from treadle.engines.models import resolve_model
from treadle.errors import ConfigError, UserError
from treadle.launch.folder import is_run, result_of
from treadle.train.lora import merged_weights, original_weights
from treadle.train.model_files import FULL, write_folder, write_model


def export_merged(source: Path, target: Path) -> None:
    """Write the model of `source` (the folder of a run, an adapter or a model) to the new folder `target`."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty folder", fix="name another one with --merged")
    _write(_result(source), target)


def export_gguf(source: Path, target: Path) -> None:
    """Write the model of `source` as the new GGUF file `target`."""
    from treadle.gguf_file import read_model, write_gguf

    source = source.resolve()  # the name of ".." is that of the folder
    if target.exists():
        raise ConfigError(f"{target} exists", fix="name another file with --gguf, or delete it")
    result = _result(source)
    read_model(_base(result))  # refused before weights are merged
    target.parent.mkdir(parents=True, exist_ok=True)
    if not is_adapter(result):
        write_gguf(read_model(_base(result)), target)
        return
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        _write(result, Path(folder) / source.name)
        write_gguf(read_model(Path(folder) / source.name), target)


def push(source: Path, name: str) -> str:
    """Upload the model of `source` to the repository `name` of the Hugging Face Hub; returns its URL.

    A repository that does not exist is made, a private one; one that exists gets a commit.
    """
    api, owner = _signed_in(name)
    repo_id = name if "/" in name else f"{owner}/{name}"
    result = _result(source)
    with tempfile.TemporaryDirectory(dir=result.parent, prefix=".push-") as folder:
        model = _base(result)
        if is_adapter(result):
            model = Path(folder) / "model"
            _write(result, model)
        try:
            url = api.create_repo(repo_id, private=True, exist_ok=True)
            api.upload_folder(
                repo_id=repo_id,
                folder_path=model,
                allow_patterns=[file.name for file in _model_files(model)],  # a pattern would match in subfolders too
                commit_message=f"Upload the result of {source.resolve().name}",
            )
        except TransportError as error:
            raise UserError(
                f"{api.endpoint} did not take the model as {repo_id}: {_first_line(error)}",
                fix="check that the token may write there (hf auth whoami), and push again: what was uploaded is kept",
            ) from error
    return str(url)


def _signed_in(name: str) -> tuple[HfApi, str]:
    """The Hub as the user who owns the token, and the user's name."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--push '{name}' is no name of a repository: {error}", fix="--push USER/NAME") from None
    token = get_token()
    if token is None:
        raise ConfigError(
            "--push needs a token of the Hugging Face Hub, and none was found",
            fix="hf auth login, or set HF_TOKEN to a token that may write",
        )
    api = HfApi(token=token)
    try:
        return api, str(api.whoami()["name"])
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise ConfigError(
                f"{api.endpoint} refuses the token that was found (HF_TOKEN, or of hf auth login)",
                fix="hf auth login, or set HF_TOKEN to a token that may write",
            ) from None
        raise UserError(f"{api.endpoint} answers: {_first_line(error)}", fix="try again later") from error
    except (TransportError, OSError) as error:
        raise UserError(
            f"{api.endpoint} cannot be reached: {_first_line(error)}",
            fix="check the network and HF_ENDPOINT; HF_HUB_OFFLINE must not be set",
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _result(source: Path) -> Path:
    """The folder of the model or the adapter that `source` means."""
    return result_of(source) if is_run(source) else source


def _base(result: Path) -> Path:
    """The model itself, or the one that the adapter belongs to."""
    name = base_model_name(result, read_adapter_settings(result)) if is_adapter(result) else str(result)
    return resolve_model(name)


def _write(result: Path, target: Path) -> None:
    fill = _merged(_base(result), result) if is_adapter(result) else _copied(_base(result))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_folder(target.parent, target.name, fill)


def _merged(base: Path, adapter: Path) -> Callable[[Path], None]:
    """The sum is computed in fp32 and saved in the model's own number format, as the trainer's merge_final does."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    adapted = PeftModel.from_pretrained(model, adapter)
    weights = {name: weight.detach() for name, weight in original_weights(adapted).items()}
    weights |= dict(merged_weights(adapted))
    return lambda folder: write_model(folder, weights.items(), weights, base)


def _copied(model: Path) -> Callable[[Path], None]:
    """Copy the model's files only; other files, such as the trainer's state in a checkpoint, are left out."""

    def fill(folder: Path) -> None:
        for file in _model_files(model):
            shutil.copyfile(file, folder / file.name)

    return fill


def _model_files(model: Path) -> list[Path]:
    weights = (".safetensors", ".safetensors.index.json")
    return [file for file in model.iterdir() if file.name in FULL.copied or file.name.endswith(weights)]
