"""Model folders that are damaged or could run code are refused before a library opens them, by file name."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from safetensors.torch import load_file, save_file

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig
from treadle.engines.model_folder import check_model_folder
from treadle.engines.model_runner import ModelRunner
from treadle.engines.models import resolve_model
from treadle.errors import ModelError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("whole") / "model", hidden_size=32, num_layers=1)


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


@pytest.mark.parametrize(
    "name",
    [
        "modeling.py", "modeling.PY", "weights.ckpt", "weights.pickle", "weights.Pt", "state.bin", "model.pkl", "a.npy",
        "a.so", "a.pyc", "a.h5", "a.joblib", "code/modeling.py", "deep/er/model.bin", "unknown.kind",
    ],
)  # fmt: skip
def test_a_file_that_could_run_code_is_refused_in_any_folder(folder, name):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    with pytest.raises(ModelError, match="can run code") as refused:
        check_model_folder(folder)
    assert name in refused.value.message


def test_files_of_huggingface_hub_and_git_are_accepted(folder):
    for name in ("README.md", "LICENSE", ".gitattributes", "figures/loss.png", ".git/hooks/a.sample",
                 ".cache/huggingface/a.incomplete", "tokenizer.model", "state-000.tensors"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "model.safetensors", folder / name)
    assert resolve_model(str(folder)) == folder


def test_a_link_to_a_folder_is_not_followed(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="is a link to a folder"):
        check_model_folder(folder)


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json",
     "preprocessor_config.json", "video_preprocessor_config.json"],
)  # fmt: skip
@pytest.mark.parametrize("is_nested", [False, True])
def test_settings_with_remote_code_are_refused(folder, name, is_nested):
    file = folder / name
    settings = json.loads(file.read_text()) if file.is_file() else {}
    asking = {"auto_map": {"AutoModel": "modeling.Model"}}
    file.write_text(json.dumps(settings | ({"text_config": asking} if is_nested else asking)))
    with pytest.raises(ModelError, match=rf"{name} asks to run the model's own code \(auto_map\)"):
        check_model_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("damage", ["empty", "truncated", "no JSON", "a list", "nested", "not UTF-8"])
def test_damaged_settings_are_named_with_their_remedy(folder, name, damage):
    file = folder / name
    raw = file.read_bytes()
    nested = b'{"a":' * 100_000
    file.write_bytes({
        "empty": b"", "truncated": raw[: len(raw) // 2], "no JSON": b"<html>", "a list": b"[]", "nested": nested,
        "not UTF-8": b'{"a": "\xff"}',
    }[damage])  # fmt: skip
    with pytest.raises(ModelError, match=f"{name} is damaged") as refused:
        check_model_folder(folder)
    assert refused.value.fix == "fetch or save the model again"


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:4],
        lambda raw: raw[:100],
        lambda raw: raw[:-1],
        lambda raw: raw + b"more",
        lambda raw: b"\xff" * 8 + raw[8:],
        lambda raw: raw[:8] + b"\x00" * 64 + raw[72:],
        lambda raw: (2).to_bytes(8, "little") + b"[]",
        lambda raw: (12).to_bytes(8, "little") + b'{"a": "text"}'[:12],
        lambda raw: (11).to_bytes(8, "little") + b'{"a": null}',
    ],
)
def test_damaged_weights_are_named_with_their_remedy(folder, damage):
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged") as refused:
        check_model_folder(folder)
    assert refused.value.fix == "fetch or save the model again"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "model-2.safetensors"}}, r"holds no model-2\.safetensors"),
        ({"weight_map": {"a": "../other/model.safetensors"}}, "no safetensors file beside it"),
        ({"weight_map": {"a": "model.bin"}}, "no safetensors file beside it"),
        ({"weight_map": ["model.safetensors"]}, "has no weight_map"),
        ({}, "has no weight_map"),
    ],
)
def test_an_index_names_weights_that_are_there(folder, index, message):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        check_model_folder(folder)


def test_a_folder_without_settings_or_weights_is_no_model(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no .*safetensors"):
        check_model_folder(folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")  # would be waited for
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        check_model_folder(folder)


@pytest.mark.parametrize("name", ["~nobody-here/model", "/" + "x" * 5000])
def test_an_impossible_folder_name_is_refused(name):
    with pytest.raises(ModelError, match="there is no model folder"):
        resolve_model(name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({}, "cannot be loaded"), ({"model_type": "llama", "hidden_size": "big"}, "cannot be loaded")],
)
def test_settings_that_transformers_rejects_give_a_readable_error(folder, settings, message):
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=message) as refused:
        ModelRunner(EngineConfig(dtype="float32", threads=1, device="cpu"), folder)
    assert str(folder) in refused.value.message


def test_a_missing_weight_is_not_initialized_randomly(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has no model\.layers\.0\.mlp\.up_proj\.weight"):
        ModelRunner(EngineConfig(dtype="float32", threads=1, device="cpu"), folder)
