"""The trainer's settings: names that stand for several values, lists, and what old command lines carry."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from treadle.config import RunConfig, TrainConfig, load_run, save_run
from treadle.config.atropos import drop_without_effect
from treadle.config.flags import FlagParser, add_flags, given
from treadle.config.train import MISMATCHES, OBJECTIVES
from treadle.errors import ConfigError


def parsed(*words):
    parser = FlagParser(prog="treadle train")
    add_flags(parser, TrainConfig, prefix="train.")
    return load_run(None, given(parser.parse_args(words))).train


def test_every_objective_that_can_be_named_has_its_settings() -> None:
    named, _ = get_args(TrainConfig.model_fields["objective"].annotation)
    assert set(get_args(named)) == set(OBJECTIVES)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_named_objective_sets_its_values_and_given_ones_win(name):
    named = TrainConfig(objective=name)
    for setting, value in OBJECTIVES[name].items():
        assert getattr(named, setting) == value
    assert TrainConfig(objective=name, clip_high=0.9).clip_high == 0.9
    assert load_run(None, {"train.objective": name, "train.clip_eps": 0.15}).train.clip_high == 0.15


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_named_correction_sets_its_values(name):
    named = TrainConfig(mismatch=name)
    for setting, value in MISMATCHES[name].items():
        assert getattr(named, setting) == value


def test_a_saved_configuration_reads_back_to_the_same_value():
    run = load_run(None, {"train.objective": "gspo", "train.mismatch": "strict", "train.train_layer_indices": "3,0-1"})
    again = RunConfig.model_validate(json.loads(json.dumps(run.model_dump(mode="json"))))
    assert again == run
    assert again.train.train_layer_indices == (0, 1, 3)


def test_a_name_given_over_a_saved_configuration_takes_effect(tmp_path):
    file = tmp_path / "config.json"
    save_run(load_run(None, {"train.clip_low": "0.3", "train.lr": "1e-4"}), file)
    train = load_run(file, {"train.objective": "gspo", "train.mismatch": "tis", "train.clip_high": "0.5"}).train
    assert (train.ratio, train.clip_low, train.clip_high) == ("sequence_mean", 3e-4, 0.5)
    assert (train.importance_cap, train.old_logprobs) == (2.0, "trainer")
    assert train.lr == 1e-4  # no name speaks of it


def test_lists_booleans_and_ports_as_atropos_users_write_them():
    train = parsed(
        "--lora-target-modules", "q_proj", "v_proj", "--lora", "--lora_layer_indices", "0-3,28-31", "--use-wandb",
        "--vllm-port", "9005", "--learning-rate", "1e-6", "--normalize-std", "false", "--clip-eps", "0.1",
    )  # fmt: skip
    assert train.lora
    assert train.lora_target_modules == ("q_proj", "v_proj")
    assert train.train_layer_indices == (0, 1, 2, 3, 28, 29, 30, 31)
    assert train.track == ("wandb",)
    assert train.engine_url == ("http://127.0.0.1:9005",)
    assert train.lr == 1e-6
    assert not train.normalize_std
    assert (train.clip_low, train.clip_high) == (0.1, 0.1)


@pytest.mark.parametrize("flag", ["--wandb-project", "--wandb-group", "--wandb-run-name"])
def test_names_for_a_tracker_that_is_not_used_are_named(flag):
    assert parsed(flag, "mine").unused_name == (
        f"{flag} has no effect without a tracker: add --track wandb, or --track trackio"
    )
    assert parsed(flag, "mine", "--use-wandb").unused_name == ""
    assert parsed(flag, "mine", "--track", "trackio").unused_name == ""
    assert parsed().unused_name == ""


def test_flags_without_effect_are_named_and_taken_with_their_values():
    words = ["--benchmark", "--vllm-gpu", "0", "--lr", "1e-5", "--log_dir=./logs"]
    kept, notes = drop_without_effect(words, "train")
    assert kept == ["--lr", "1e-5"]
    assert [note.split()[0] for note in notes] == ["--benchmark", "--vllm-gpu", "--log-dir"]


def test_an_old_command_line_gets_as_far_as_the_trainer():
    """Atropos' flags, all of them; only the last one is wrong, so it is the one that is complained about."""
    words = (
        "--model-name M --lr 1e-5 --training-steps 30 --batch-size 4 --gradient-accumulation-steps 4 --warmup-steps 5 "
        "--seq-len 2048 --optimizer adamw_8bit --adafactor-scale-parameter --device cuda:0 --save-path out "
        "--checkpoint-interval 3 --clip-eps 0.2 --vllm-port 9001 --vllm-gpu 0 --gpu-memory-utilization 0.45 "
        "--max-model-len 4096 --dtype bfloat16 --vllm-restart-interval 3 --atropos-url http://localhost:8000 "
        "--use-wandb --wandb-project p --wandb-group g --wandb-run-name r --vllm-config-path auto "
        "--train-layer-indices 20-31 --lora-r 16 --lora-alpha 32 --lora-dropout 0.05 "
        "--lora-target-modules q_proj v_proj --kl-coef 0.1 --debug-loading --benchmark --log-dir ./logs "
        "--no-reference-logprobs --steps zero"
    )
    result = subprocess.run(
        [sys.executable, "-m", "treadle", "train", *words.split()], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "'train.steps' is 'zero'" in result.stderr
    assert "--benchmark has no effect" in result.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train.train_layer_indices": "5-2"}, "counts backwards"),
        ({"train.train_layer_indices": "a"}, "no list of numbers"),
        ({"train.importance_cap": "2"}, "set old_logprobs to trainer"),
        ({"train.objective": "ppo"}, "objective"),
        ({"train.clip_low": "1.5"}, "clip_low"),
        ({"train.lora_dropout": "1"}, "lora_dropout"),
        ({"train.lr": "inf"}, "lr"),
        ({"train.importance_mask": "5 0.5"}, "importance_mask 5 0.5 leaves no token"),
        ({"train.vllm_port": "x"}, "vllm_port"),
        ({"train.track": "foo"}, "track"),
        ({"train.teacher_url": "127.0.0.1:9100"}, "write it as http://HOST:PORT"),
        ({"train.teacher_url": "http://t:1", "train.distill_coef": "0"}, "the teacher of teacher_url is of no use"),
        ({"train.reward_coef": "0"}, "so nothing is learned"),
        ({"train.reward_coef": "-1", "train.distill_coef": "1"}, "reward_coef"),
        ({"train.metric_aliases": "foo"}, "metric_aliases"),
        ({"train.single_copy": "true", "train.use_shared_memory": "true"}, "give one of the two"),
        ({"train.single_copy": "true", "train.lora": "true"}, "single_copy cannot be with lora: .* use_shared_memory"),
        ({"train.single_copy": "true", "train.epochs": "2"}, "single_copy cannot be with epochs over 1"),
        (
            {"train.single_copy": "true", "train.weight_bridge_mode": "lora_only", "train.ranks": "2"},
            "single_copy cannot be with ranks over 1: leave it out",
        ),
        ({"train.single_copy": "true", "train.weight_bridge_mode": "reload"}, "leave one of them out"),
        ({"train.weight_bridge_mode": "lora_only", "train.lora": "false"}, "publishes adapters, and lora is off"),
        ({"train.quantization": "nf4"}, "needs weight_bridge_mode lora_only"),
        (
            {"train.weight_bridge_mode": "lora_only", "train.quantization": "nf4", "train.single_copy": "true"},
            "single_copy cannot be with quantization nf4",
        ),
        (
            {"train.weight_bridge_mode": "lora_only", "train.quantization": "nf4", "train.merge_final": "true"},
            "merge_final cannot be with quantization nf4: leave it out .treadle export merges",
        ),
        ({"engine.quantization": "nf4", "engine.weights_file": "w"}, "cannot be shared: leave weights_file out"),
        ({"train.weight_bridge_mode": "nccl"}, "weight_bridge_mode"),
        ({"train.vllm_restart_interval": "0"}, "vllm_restart_interval"),
        ({"train.canary_tolerance": "-1"}, "canary_tolerance"),
    ],
)
def test_wrong_values_are_refused_with_words(settings, words):
    with pytest.raises(ConfigError, match=words):
        load_run(None, settings)


def test_what_is_left_open_follows_the_device():
    assert TrainConfig().on_device(gpu=False).micro_tokens == 1024
    assert TrainConfig().on_device(gpu=True).micro_tokens == 16_384
    assert TrainConfig(micro_tokens=99).on_device(gpu=True).micro_tokens == 99


def test_the_way_of_the_weights_sets_what_follows_from_it():
    assert TrainConfig().weight_bridge_mode == "shared_vllm"
    assert TrainConfig(weight_bridge_mode="lora_only").lora
    assert not TrainConfig(weight_bridge_mode="reload").lora
    assert TrainConfig(vllm_config_path="auto").vllm_config_path == Path("auto")  # it is looked for


@pytest.mark.parametrize(
    ("mode", "interval", "given_interval", "deadline_s"),
    [("shared_vllm", 1, 1, 180), ("lora_only", 1, 5, 180), ("lora_restart", 3, 5, 900), ("none", 3, 5, 900),
     ("reload", 1, 5, 180), ("delta", 1, 5, 180), ("offline", 1, 1, 180)],
)  # fmt: skip
def test_publish_interval_and_timeout_follow_from_the_mode(mode, interval, given_interval, deadline_s):
    config = TrainConfig(weight_bridge_mode=mode)
    assert (config.publish_interval, config.publish_deadline_s) == (interval, deadline_s)
    given = TrainConfig(weight_bridge_mode=mode, vllm_restart_interval=5, publish_timeout_s=7)
    assert (given.publish_interval, given.publish_deadline_s) == (given_interval, 7)


def test_use_wandb_adds_it_and_a_flag_takes_it_out_again(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[train]\ntrack = ["tensorboard"]\nuse_wandb = true\n')
    assert load_run(file).train.track == ("tensorboard", "wandb")
    assert load_run(file, {"train.use_wandb": "n"}).train.track == ("tensorboard",)
    with pytest.raises(ConfigError, match="use_wandb' is 'maybe'"):
        load_run(file, {"train.use_wandb": "maybe"})
