"""--train.deepspeed-config: what a ds_config.json sets, what it cannot, and that flags win over it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treadle.config import load_run
from treadle.config.deepspeed import TRANSLATED, translate
from treadle.config.train import TrainConfig
from treadle.errors import ConfigError

# As in the usual examples: ZeRO-2 with the optimizer in host memory, ZeRO-3 with everything in it, and the file of an
# integration that fills in the values itself.
ZERO2 = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 0.5,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01, "torch_adam": True},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-5, "warmup_num_steps": 20}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "contiguous_gradients": True,
    },
}
ZERO3 = {
    "train_batch_size": 128,
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 2e-5}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 5, "warmup_type": "linear", "total_num_steps": 500},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "activation_checkpointing": {"partition_activations": True, "number_checkpoints": None, "profile": False},
}
AUTO = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 10,
    "amp": {"enabled": "auto", "opt_level": "auto"},
}


def trained(tmp_path: Path, config: dict[str, Any], **overrides: str) -> TrainConfig:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    given = {f"train.{name}": value for name, value in overrides.items()}
    return load_run(None, {"train.deepspeed_config": str(file), **given}).train


def test_zero2_with_the_optimizer_in_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = trained(tmp_path, ZERO2)
    assert (train.shard, train.optimizer, train.offload_weights) == ("zero2", "adamw_cpu", False)
    assert (train.batch_size, train.gradient_accumulation_steps, train.sequences_per_step) == (8, 8, 64)
    assert (train.lr, train.betas, train.weight_decay, train.max_grad_norm) == (1e-5, (0.9, 0.95), 0.01, 0.5)
    assert (train.schedule, train.warmup_steps, train.dtype) == ("constant", 20, "bfloat16")
    assert capsys.readouterr().err == (
        "ds_config.json: 9 fields have no effect: train_micro_batch_size_per_gpu (--train.micro-tokens bounds a "
        "micro-batch), steps_per_print, optimizer.params.torch_adam, "
        "zero_optimization.offload_optimizer.pin_memory, zero_optimization.allgather_partitions, "
        "zero_optimization.allgather_bucket_size, zero_optimization.overlap_comm, zero_optimization.reduce_scatter, "
        "zero_optimization.contiguous_gradients\n"
    )


def test_zero3_with_weights_and_optimizer_in_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = trained(tmp_path, ZERO3)
    assert (train.shard, train.optimizer, train.offload_weights) == ("fsdp2", "adamw_cpu", True)
    assert (train.batch_size, train.dtype, train.gradient_checkpointing) == (128, "float16", True)
    assert (train.schedule, train.warmup_steps, train.lr) == ("linear", 5, 2e-5)
    note = capsys.readouterr().err
    assert "scheduler.params.total_num_steps (the rate falls until --steps)" in note
    assert note.count("\n") == 1


def test_auto_leaves_our_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(tmp_path, AUTO) == TrainConfig(shard="fsdp2", optimizer="adamw", schedule="constant")
    assert capsys.readouterr().err == "ds_config.json: 1 field has no effect: steps_per_print\n"


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    train = trained(tmp_path, ZERO2, optimizer="adafactor", lr="3e-6", shard="fsdp2", gradient_accumulation_steps="2")
    assert (train.optimizer, train.lr, train.shard) == ("adafactor", 3e-6, "fsdp2")
    assert (train.batch_size, train.sequences_per_step) == (32, 64)  # the file's batch, divided otherwise


def test_beside_settings_of_a_file_the_later_layer_wins(tmp_path: Path) -> None:
    deepspeed = tmp_path / "ds_config.json"
    deepspeed.write_text(json.dumps(ZERO2))
    settings = tmp_path / "run.toml"
    settings.write_text(f'[train]\nlr = 7e-7\ndeepspeed_config = "{deepspeed}"\n')
    assert load_run(settings).train.lr == 7e-7
    assert load_run(settings).train.shard == "zero2"
    assert load_run(settings, {"train.deepspeed_config": str(deepspeed)}).train.lr == 1e-5
    assert load_run(settings, {"train.deepspeed_config": str(deepspeed), "train.lr": "1e-3"}).train.lr == 1e-3


def test_the_batch_of_a_gpu_counts_if_the_number_of_ranks_is_known() -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert translate(config, {"ranks": "8"}).settings == {"batch_size": 32, "gradient_accumulation_steps": 2}
    without_ranks = translate(config, {})
    assert without_ranks.settings == {"gradient_accumulation_steps": 2}
    assert "1 field has no effect: train_micro_batch_size_per_gpu" in without_ranks.note


def test_only_known_settings_are_set() -> None:
    for config in (ZERO2, ZERO3, AUTO):
        assert translate(config, {}).settings.keys() <= set(TRANSLATED)
    assert set(TRANSLATED) <= TrainConfig.model_fields.keys()


@pytest.mark.parametrize(
    ("config", "settings", "note"),
    [
        ({"zero_optimization": {"stage": 1}}, {}, "stage 1 (several ranks always shard"),
        ({"zero_optimization": {"cpu_offload": True, "stage": 2}}, {"shard": "zero2", "optimizer": "adamw_cpu"}, ""),
        ({"gradient_clipping": 0}, {"max_grad_norm": float("inf")}, ""),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, {"gradient_dtype": "bfloat16"}, ""),
        ({"optimizer": {"type": "AdamW", "params": {"eps": 1e-6}}}, {"optimizer": "adamw"}, "eps (it is 1e-08)"),
        ({"elasticity": {"enabled": False, "max_train_batch_size": 2000}}, {}, ""),
        ({"activation_checkpointing": {"cpu_checkpointing": False, "profile": False}}, {}, ""),
        ({"flops_profiler": {"enabled": True, "profile_step": 1}}, {}, "flops_profiler.profile_step"),
    ],
)
def test_fields_and_what_they_mean(config: dict[str, Any], settings: dict[str, Any], note: str) -> None:
    found = translate(config, {})
    assert found.settings == settings
    assert (note in found.note) if note else not found.note


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stag": 2}}, "the field zero_optimization.stag is not supported"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "device is 'nvme'"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "the stage is 2, which shards none"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights true is not supported"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type is 'Lamb'"),
        ({"optimizer": {"params": {"adam_w_mode": False, "weight_decay": 0.1}}}, "adam_w_mode false"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type is 'OneCycle'"),
        ({"elasticity": {"enabled": True}}, "the field elasticity.enabled is not supported"),
        (
            {"optimizer": {"params": {"lr": 1e-5}}, "scheduler": {"params": {"warmup_max_lr": 1e-4}}},
            "optimizer.params.lr 1e-05 and scheduler.params.warmup_max_lr 0.0001 contradict each other",
        ),
        (
            {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            "train_batch_size 30 and train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 contradict",
        ),
    ],
)
def test_unknown_and_contradictory_fields_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^ds_config\.json: ") as refused:
        translate(config, {})
    assert message in refused.value.message
    assert refused.value.fix


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds no DeepSpeed configuration"),
        ("{", "cannot be parsed as JSON"),
        ('{"bf16": {}, "bf16": {}}', "'bf16' is given twice"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_run(None, {"train.deepspeed_config": str(file)})
    with pytest.raises(ConfigError, match="No such file"):
        load_run(None, {"train.deepspeed_config": str(tmp_path / "other.json")})
