"""A checkpoint is resumed only with the frozen weights and adapters that it was trained with."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.errors import ConfigError
from treadle.sync.model_folders import origin_of
from treadle.train.checkpoint import Checkpoints, Totals
from treadle.train.optimizers import build_optimizer
from treadle.train.policy import load_policy

LORA = {"lora": True, "lora_r": 4, "lora_alpha": 8.0, "train_layer_indices": "0"}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=2)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """The same shapes and settings, other values: its headers and config.json are the same, byte for byte."""
    return write_tiny_model(tmp_path_factory.mktemp("other"), seed=1, hidden_size=32, num_layers=2)


def parts(folder, **settings):
    config = TrainConfig(dtype="bfloat16", device="cpu", compile="off", **settings)
    policy = load_policy(folder, config)
    return policy, build_optimizer(policy, config)


def save(root, folder, **settings):
    Checkpoints(root, folder, keep=1).save(3, *parts(folder, **settings), Totals())


def restore(root, folder, **settings):
    return Checkpoints(root, folder, keep=1).restore(*parts(folder, **settings)).step


@pytest.mark.parametrize(
    ("changed", "message", "fix"),
    [
        ({"lora_alpha": 16.0}, "lora-alpha 8, this run has 16", "set --train.lora-alpha 8, or choose another"),
        ({"lora_r": 2}, "lora-r 4, this run has 2", "set --train.lora-r 4, "),
        (
            {"lora_target_modules": "q_proj,k_proj"},
            "lora-target-modules q_proj,v_proj, this run has k_proj,q_proj",
            "set --train.lora-target-modules q_proj,v_proj, ",
        ),
        (
            {"train_layer_indices": "0-1"},
            "train-layer-indices 0, this run has 0,1",
            "set --train.train-layer-indices 0, ",
        ),
        (
            {"train_layer_indices": None},
            "train-layer-indices 0, this run has unset",
            "--train.save-path to start",
        ),
    ],
)
def test_other_adapters_are_refused_by_the_name_of_the_setting(model_folder, tmp_path, changed, message, fix):
    save(tmp_path, model_folder, **LORA)
    with pytest.raises(ConfigError, match=message) as error:
        restore(tmp_path, model_folder, **(LORA | changed))
    assert fix in error.value.fix
    assert restore(tmp_path, model_folder, **LORA, lora_dropout=0.1) == 3  # that changes no policy


def test_a_setting_that_was_unset_is_to_be_left_out(model_folder, tmp_path):
    save(tmp_path, model_folder, lora=True)
    with pytest.raises(ConfigError, match="train-layer-indices unset, this run has 1") as error:
        restore(tmp_path, model_folder, lora=True, train_layer_indices="1")
    assert error.value.fix.startswith("leave --train.train-layer-indices out, or choose another --train.save-path")


@pytest.mark.parametrize("settings", [LORA, {"train_layer_indices": "1"}])
def test_another_model_under_what_is_trained_is_refused(model_folder, other_model, tmp_path, settings):
    save(tmp_path, model_folder, **settings)
    with pytest.raises(ConfigError, match="on a model with other weights than the one of this run") as error:
        restore(tmp_path, other_model, **settings)
    assert "set --model to the model that training began with" in error.value.fix
    moved = shutil.copytree(model_folder, tmp_path / "moved")
    assert restore(tmp_path, moved, **settings) == 3


def test_when_everything_is_trained_the_weights_come_from_the_checkpoint(model_folder, other_model, tmp_path):
    save(tmp_path, model_folder)
    assert restore(tmp_path, other_model) == 3
    edited = shutil.copytree(model_folder, tmp_path / "edited")
    settings = json.loads((edited / "config.json").read_text())
    (edited / "config.json").write_text(json.dumps(settings | {"rope_theta": 5.0, "rms_norm_eps": 1e-2}))
    with pytest.raises(ConfigError, match=r"on a model with another config\.json"):
        restore(tmp_path, edited)


def test_one_changed_layer_in_any_file_makes_another_model(model_folder, tmp_path):
    tensors = load_file(model_folder / "model.safetensors")
    names = sorted(tensors)
    for number, half in enumerate((names[:5], names[5:]), start=1):
        save_file({name: tensors[name] for name in half}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    before = origin_of(tmp_path)
    assert before.config == ""
    last = {name: tensors[name] for name in names[5:]}
    save_file(last | {names[-2]: last[names[-2]] + 1}, tmp_path / "model-00002-of-00002.safetensors")
    assert origin_of(tmp_path).weights != before.weights
    save_file(last, tmp_path / "model-00002-of-00002.safetensors")
    assert origin_of(tmp_path) == before
