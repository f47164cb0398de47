"""adapter_config.json: plain LoRA settings pass, every other one is refused by name."""

from __future__ import annotations

import json
import os

import pytest

from treadle.config import EngineConfig
from treadle.config.schema import adapter_root
from treadle.engines.model_folder import MAX_CONFIG_BYTES, AdapterSettings, read_adapter_settings
from treadle.errors import RequestError

PLAIN = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"],
    "base_model_name_or_path": "models/tiny", "bias": "none", "init_lora_weights": True, "lora_dropout": 0.1,
    "layers_to_transform": [0, 1], "layers_pattern": ["layers"], "loftq_config": {}, "use_dora": False,
    "rank_pattern": {}, "megatron_core": "megatron.core", "qalora_group_size": 16, "a_setting_of_the_future": None,
}  # fmt: skip


def write(folder, settings):
    words = settings if isinstance(settings, str) else json.dumps(settings)
    (folder / "adapter_config.json").write_text(words)
    (folder / "adapter_model.safetensors").touch()
    return folder


def test_plain_settings_pass(tmp_path):
    found = read_adapter_settings(write(tmp_path, PLAIN | {"use_rslora": True}))
    assert found == AdapterSettings(4, 8, True, ["q_proj", "v_proj"], "models/tiny")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("init_lora_weights", how) for how in ("pissa", "pissa_niter_4", "olora", "corda", "eva", "loftq", 1)),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["mlp.weight"]),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"(a+)+b": 8}),
        ("use_dora", True),
        ("lora_bias", True),
        ("bias", "all"),
        ("fan_in_fan_out", True),
        ("a_setting_of_the_future", "on"),
        ("lora_alpha", "8"),
        ("lora_alpha", float("inf")),
        ("lora_alpha", None),
        ("r", "4"),
        ("r", 0),
        ("r", True),
        ("target_modules", {"q_proj": 1}),
        ("target_modules", None),
        ("task_type", "SEQ_CLS"),
        ("base_model_name_or_path", 7),
    ],
)
def test_any_other_setting_is_refused_by_its_name(tmp_path, name, value):
    with pytest.raises(RequestError, match=rf"settings that this engine does not serve: {name} is ") as refused:
        read_adapter_settings(write(tmp_path, PLAIN | {name: value}))
    assert "plain LoRA" in refused.value.fix


def test_all_refused_settings_are_named_in_one_error(tmp_path):
    with pytest.raises(RequestError, match=r"use_dora is True.*layer_replication is"):
        read_adapter_settings(write(tmp_path, PLAIN | {"use_dora": True, "layer_replication": [[0, 9]]}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
        ("[1]", "no JSON object"),
        ("", "adapter_config.json"),
        ('{"r": ', "adapter_config.json"),
        (" " * (MAX_CONFIG_BYTES + 1), "larger than 1 MiB"),
        ('{"peft_type": "LOHA"}', "no LoRA adapter but 'LOHA'"),
        ("{}", "no LoRA adapter but None"),
    ],
    ids=["nested", "a list", "empty", "truncated", "large", "LoHa", "no kind"],
)
def test_an_invalid_adapter_file_gives_a_readable_error(tmp_path, words, message):
    with pytest.raises(RequestError, match=message):
        read_adapter_settings(write(tmp_path, words))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_instead_of_a_file_does_not_block(tmp_path, name):
    write(tmp_path, PLAIN)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(RequestError, match=f"holds no file {name}"):
        read_adapter_settings(tmp_path)


@pytest.mark.parametrize(
    ("home", "here", "expected"),
    [
        ("home/ada", "home/ada/work", "home/ada"),
        ("home/ada", "data/run", "data/run"),
        ("home/ada", "home/ada", "home/ada"),
    ],
)
def test_adapter_root_defaults_to_home_or_working_directory(tmp_path, monkeypatch, home, here, expected):
    (tmp_path / home).mkdir(parents=True)
    (tmp_path / here).mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("HOME", str(tmp_path / home))
    monkeypatch.chdir(tmp_path / here)
    assert adapter_root(EngineConfig()) == tmp_path / expected
    assert adapter_root(EngineConfig(adapter_root="~/adapters")) == tmp_path / home / "adapters"
    monkeypatch.setenv("HOME", "/")  # as in some containers: that would be every folder
    assert adapter_root(EngineConfig()) == tmp_path / here
