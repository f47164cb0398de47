"""What a run would fail on is found before its first process starts and before its folder is made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny_model import write_tiny_model
from tests.written_run import write_run
from treadle.config import load_run, save_run
from treadle.errors import ConfigError, MissingExtra, ModelError, PortInUse, SeveralProblems, UserError
from treadle.launch import resume, start
from treadle.launch.matrix import load_settings, start_matrix
from treadle.launch.preflight import resolve_environment


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "my-model")


@pytest.fixture(autouse=True)
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine's user counts."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def refusal(folder: Path, **settings: Any) -> UserError:
    """Why `treadle run` with these settings is refused; nothing was started or written."""
    output = folder / "runs"
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    before = psutil.Process().children()
    with pytest.raises(UserError) as caught:
        start(load_run(None, {"output": str(output), **flags}), plain=True)
    assert not output.exists()
    assert psutil.Process().children() == before
    return caught.value


def test_all_problems_of_a_run_are_reported_at_once(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    found = refusal(
        tmp_path, model=str(model), env__name="jsonl", env__data="nowhere.jsonl", train__track="tensorboard,wandb",
        train__train_layer_indices="0,50", hub__port="8123", engine__port="8123", engine__engine="vllm",
    )  # fmt: skip
    assert isinstance(found, SeveralProblems)
    kinds = [type(problem) for problem in found.problems]
    assert kinds == [ConfigError, MissingExtra, MissingExtra, ConfigError, ConfigError, PortInUse]
    assert all(problem.fix for problem in found.problems)
    lines = str(found).splitlines()
    assert lines[0] == "6 problems:"
    assert lines[1:3] == [
        "1. there is no file or folder nowhere.jsonl", "     -> check --env.data and --env.eval-data",
    ]  # fmt: skip
    assert "3. --track tensorboard needs tensorboard" in lines
    assert "     -> pip install 'treadle[trackers]'" in lines
    assert "5. there is no layer 50: the model has 3 layers, 0 to 2" in lines


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"train__track": "wandb"}, ConfigError, "W&B has no API key"),
        ({"train__use_wandb": "true"}, ConfigError, "W&B has no API key"),
        ({"train__train_layer_indices": "2-3"}, ConfigError, "there is no layer 3: the model has 3 layers"),
        ({"train__lora": "true", "train__train_layer_indices": "9"}, ConfigError, "there is no layer 9"),
        ({"train__fused_kernels": "liger"}, MissingExtra, "liger-kernel"),
        ({"engine__vllm_python": "/nowhere/python"}, MissingExtra, "/nowhere/python cannot be run"),
        ({"env__name": "jsonl", "env__data": "."}, ConfigError, "has no rows to train on"),
        ({"model": "./nowhere"}, ModelError, "there is no model folder './nowhere'"),
    ],
)
def test_a_single_problem_is_reported_as_it_is(
    tmp_path: Path, model: Path, settings: dict[str, str], kind: type[UserError], words: str
) -> None:
    found = refusal(tmp_path, **{"model": str(model), **settings})
    assert type(found) is kind
    assert words in found.message
    assert found.fix


def test_a_reward_file_that_cannot_be_loaded_is_found_before_a_start(tmp_path: Path, model: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 3)
    (tmp_path / "mine.py").write_text("def short(completion:\n")
    settings = {"env__name": "jsonl", "env__data": "rows.jsonl"}
    found = refusal(tmp_path, model=str(model), env__args=json.dumps({"rewards": ["mine.py:short"]}), **settings)
    assert "mine.py cannot be loaded" in found.message


def test_a_damaged_model_folder_is_found_before_a_start(tmp_path: Path) -> None:
    broken = write_tiny_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"short")
    assert "is damaged" in refusal(tmp_path, model=str(broken)).message


def test_a_resumed_run_is_checked_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_run(tmp_path)
    save_run(config.model_copy(update={"env": resolve_environment(config.env)}), tmp_path / "config.json")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    before = psutil.Process().children()
    with pytest.raises(SeveralProblems) as caught:
        resume(tmp_path, {"train.track": "tensorboard,wandb", "steps": "60"}, plain=True)
    assert [type(problem) for problem in caught.value.problems] == [MissingExtra, ConfigError]
    assert psutil.Process().children() == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "./nowhere", "--use-wandb"), ("there is no model folder './nowhere'", "no API key")),
        (("--train-layer-indices", "7", "--model", "{model}"), ("there is no layer 7",)),
    ],
)
def test_a_trainer_is_checked_before_torch_loads_and_without_a_hub(
    model: Path, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    code = "import sys, treadle.cli\ntry: treadle.cli.main()\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "train", *(flag.format(model=model) for flag in flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert all(part in done.stderr for part in words)


def test_a_matrix_is_checked_before_its_folder_is_made(tmp_path: Path, model: Path) -> None:
    config = load_settings(None, {"model": str(model), "output": str(tmp_path / "runs"), "train.track": "wandb"})
    with pytest.raises(ConfigError, match="no API key"):
        start_matrix(config, ("single_copy",), plain=True)
    assert not (tmp_path / "runs").exists()
