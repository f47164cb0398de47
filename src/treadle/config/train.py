"""Define the settings of the trainer. They are flat, as its flags are; the classes only group them.

`--objective` and `--mismatch` name a set of values for other settings. A setting that is also given by itself wins, and
the resolved configuration holds the values, so a saved run does not change when the meaning of a name does.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from treadle.config.distillation import DistillationOptions
from treadle.config.section import (
    HUB_TABLE,
    Count,
    Dtype,
    Names,
    Numbers,
    PositiveInt,
    Seconds,
    Section,
    check_gpus,
    names_fleet,
    option,
    parse_names,
    shared,
)
from treadle.config.sync import Quantization, SyncOptions, with_fleet_mode
from treadle.errors import ConfigError
from treadle.formatting import counted

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AboveZero = Annotated[float, Field(gt=0)]  # or infinite
Fraction = Annotated[float, Field(ge=0, lt=1)]
Automatic = Literal["auto", "on", "off"]


# By device: for a core's caches and little memory, or to keep a GPU busy.
MICRO_TOKENS = {"cpu": 1024, "cuda": 16_384}
LOGPROB_CHUNK = {"cpu": 2048, "cuda": 8192}  # entries of the vocabulary whose logits exist at the same time
FLOAT32_LR = 2e-5  # steps of bf16 weights are rounded, and their best rate was a little larger (docs/experiments.md)

_TOKEN_CLIP = {"ratio": "token", "surrogate": "clip"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {**_TOKEN_CLIP, "normalize_std": True, "aggregation": "sequence_mean", "clip_low": 0.2, "clip_high": 0.2},
    "dr_grpo": {
        **_TOKEN_CLIP, "normalize_std": False, "aggregation": "sequence_constant", "clip_low": 0.2, "clip_high": 0.2,
    },
    "dapo": {
        **_TOKEN_CLIP, "normalize_std": True, "aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.28,
        "mask_overlong": True,
    },
    "gspo": {
        "ratio": "sequence_mean", "surrogate": "clip", "normalize_std": True, "aggregation": "sequence_mean",
        "clip_low": 3e-4, "clip_high": 4e-4,
    },
    "rl_max": {
        "ratio": "sequence_sum", "surrogate": "clip", "normalize_std": True, "aggregation": "sequence_mean",
        "clip_low": 0.2, "clip_high": 0.2,
    },
    "cispo": {
        "ratio": "token", "surrogate": "cispo", "normalize_std": True, "aggregation": "token_mean", "clip_high": 4.0,
    },
}  # fmt: skip
MISMATCHES: dict[str, dict[str, Any]] = {
    "none": {"importance_cap": None, "importance_mask": None},
    "tis": {"old_logprobs": "trainer", "importance_cap": 2.0},
    "icepop": {"old_logprobs": "trainer", "importance_mask": (0.5, 5.0)},
    "strict": {"old_logprobs": "trainer", "importance_cap": 2.0, "importance_mask": (0.5, 5.0)},
}


class ObjectiveOptions(Section):
    """The objective that is maximised."""

    objective: Literal["grpo", "dr_grpo", "dapo", "gspo", "rl_max", "cispo"] | None = option(
        None, "a published objective by its name: sets the settings below, except those given by themselves"
    )
    # how good a rollout was
    advantage: Literal["group_mean", "leave_one_out"] = option("group_mean", "what a score is compared with")
    normalize_std: bool = option(True, "divide advantages by the standard deviation of their group")
    std_ddof: Annotated[int, Field(ge=0, le=1)] = option(
        0, "standard deviation of the group itself (0) or of what it was drawn from (1)"
    )
    std_epsilon: NotNegative = option(1e-4, "added to the standard deviation, so that a tiny spread stays tiny")
    mask_overlong: bool = option(False, "completions that were cut off at the length limit carry no loss")
    # how far the policy may move
    ratio: Literal["token", "sequence_mean", "sequence_sum"] = option(
        "token", "importance ratio of each token, or one of the sequence: mean (GSPO) or sum of its tokens' logs"
    )
    surrogate: Literal["clip", "cispo"] = option("clip", "PPO's clipped gain, or a clipped weight on the logprob")
    clip_low: Annotated[float, Field(gt=0, lt=1)] = option(0.2, "the ratio is clipped below 1 - this")
    clip_high: Positive = option(0.28, "the ratio is clipped above 1 + this")
    dual_clip: Annotated[float, Field(gt=1)] | None = option(
        None, "bounds the loss of a bad token that became likelier by this ratio; empty: no bound"
    )
    aggregation: Literal["token_mean", "sequence_mean", "sequence_constant"] = option(
        "token_mean", "mean over tokens, mean over sequences of their token means, or sequence sums over seq_len"
    )
    epochs: PositiveInt = option(1, "optimizer updates per batch; the old logprobs stay those of the first")
    old_logprobs: Literal["rollout", "trainer"] = option(
        "rollout",
        "what the ratio is taken against: the engine's logprobs, or the trainer's own before the first update",
    )
    # staying near another policy
    kl_coef: NotNegative = option(0.0, "weight of the KL term")
    kl_estimator: Literal["k1", "k2", "k3"] = option("k3", "log ratio, half its square, or the never negative k3")
    kl_against: Literal["rollout", "reference"] = option(
        "rollout", "the policy that sampled, or the one training began with"
    )
    reference_offload: bool = option(False, "keep the reference's weights in host memory and bring them layer by layer")
    # engine and trainer disagree
    mismatch: Literal["none", "tis", "icepop", "strict"] | None = option(
        None,
        "truncated importance sampling, IcePop's mask, or both, by name: sets old_logprobs and the two settings below",
    )
    importance_cap: Positive | None = option(
        None, "weights by trainer/engine probability, at most this; needs old_logprobs trainer; empty: off"
    )
    importance_mask: Annotated[tuple[NotNegative, AboveZero] | None, BeforeValidator(parse_names)] = option(
        None, "LOW HIGH: tokens whose trainer/engine probability is outside carry no loss; empty: off"
    )

    @model_validator(mode="before")
    @classmethod
    def _names_set_values(cls, values: Any) -> Any:
        """Replace a name by the values that it stands for; values that are given by themselves win."""
        if not isinstance(values, dict):
            return values
        named = OBJECTIVES.get(str(values.get("objective")), {}) | MISMATCHES.get(str(values.get("mismatch")), {})
        return named | values

    @model_validator(mode="after")
    def _fits_together(self) -> ObjectiveOptions:
        if self.importance_cap is not None and self.old_logprobs != "trainer":
            raise ValueError(
                "importance_cap weights the trainer's own old logprobs; against the engine's the ratio holds that "
                "factor already: set old_logprobs to trainer"
            )
        if self.importance_mask is not None and self.importance_mask[0] >= self.importance_mask[1]:
            low, high = self.importance_mask
            raise ValueError(f"importance_mask {low:g} {high:g} leaves no token: the lower bound comes first")
        return self


class OptimizerOptions(Section):
    """The optimizer and its schedule."""

    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "adamw_cpu", "muon"] = option(
        "adamw", "fp32 masters and moments; 8-bit moments; factored moments; all of it in host memory; orthogonalised"
    )
    lr: Positive = option(2.5e-5, f"peak learning rate; treadle run takes {FLOAT32_LR:g} in float32")
    warmup_steps: Count = option(3, "steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = option("linear", "learning rate after the warm-up")
    betas: Annotated[tuple[Fraction, Fraction], BeforeValidator(parse_names)] = option(
        (0.9, 0.99), "AdamW: decay of the mean, and of the mean square"
    )
    weight_decay: NotNegative = option(0.0, "decoupled weight decay")
    max_grad_norm: AboveZero = option(1.0, "gradients are clipped to this norm; inf: never")
    adafactor_relative_step: bool = option(False, "Adafactor: a step size of its own that falls with the steps")
    adafactor_scale_parameter: bool = option(False, "Adafactor: steps in proportion to the size of the weights")
    gradient_dtype: Literal["float32", "bfloat16"] = option("float32", "number format that micros' gradients add up in")


class LoraOptions(Section):
    """What is trained: all weights, those of some layers, or LoRA adapters."""

    lora: bool = option(False, "train low-rank adapters; the model's own weights stay")
    lora_r: PositiveInt = option(16, "rank of the adapters")
    lora_alpha: Positive = option(32.0, "scale of the adapters, over the rank")
    lora_dropout: Fraction = option(0.0, "dropout before the adapters; more than 0 makes every ratio noisy")
    lora_target_modules: Names = option(("q_proj", "v_proj"), "which linear layers get an adapter")
    train_layer_indices: Numbers = option(
        None, "train only these layers (20-31,0-3), or with lora add adapters only to them; empty: all"
    )
    quantization: Quantization = shared("quantization", "about a third of the memory for weights, slower steps")
    merge_final: bool = option(
        False, "with lora: in the end also write final_model, the model with the adapters merged into its weights"
    )


class SpeedOptions(Section):
    """Settings that change time and memory, and the result only by rounding."""

    micro_tokens: Count = option(
        0,
        "tokens forwarded at once; bounds the memory of a step; "
        f"0: {MICRO_TOKENS['cpu']} on a CPU, {MICRO_TOKENS['cuda']} on a GPU",
    )
    share_prompts: Automatic = option(
        "auto", "forward the prompt of a group once for all its completions; auto: when it pays"
    )
    attention: Literal["auto", "blocks", "sdpa", "varlen", "flash4"] = option(
        "auto",
        "dense blocks or scaled_dot_product_attention (CPU), variable-length attention by torch's kernel or "
        "FlashAttention 4's (CUDA; auto: the latter where it is installed)",
    )
    gradient_checkpointing: bool = option(
        False, "compute activations again in the backward pass: less memory, a third more time"
    )
    compile: Automatic = option("auto", "torch.compile of the layers; auto: on a GPU")
    card_sharing: Literal["auto", "turns", "mps", "free"] = option(
        "auto",
        "engine and trainer on one GPU: the engine pauses during forward and backward (turns), both compute through "
        "CUDA MPS (mps) or without it (free); auto: MPS where it works, and turns if the first steps show that they "
        "are faster",
    )
    fused_kernels: Literal["none", "liger"] = option(
        "none", "liger-kernel's norms, rotary embedding and SwiGLU (GPU only)"
    )


class ShardOptions(Section):
    """Several trainer processes (ranks) that train as one."""

    gpus: Numbers = option(
        None,
        "GPUs, one for each rank: 4,5 or 0-3; numbers within CUDA_VISIBLE_DEVICES; empty: treadle run "
        "chooses them, and a trainer that is started alone uses device",
    )
    ranks: PositiveInt = option(1, "number of trainer processes, each with its own GPU; treadle run starts them")
    trainer_rank: Count = option(0, "rank of this process, if neither treadle run nor torchrun started it")
    init_method: str = option("env://", "rendezvous: tcp://HOST:PORT, or env:// for MASTER_ADDR and MASTER_PORT")
    ranks_timeout_s: Seconds = option(600.0, "seconds without a sign of life from one rank after which all of them end")
    shard: Literal["fsdp2", "zero2"] = option(
        "fsdp2",
        "several ranks share weights, gradients and optimizer state; a layer is whole only while it computes (fsdp2), "
        "or from its forward to its backward pass (zero2: fewer transfers, more memory)",
    )
    replicas: PositiveInt = option(
        1, "copies of the sharded model, each on ranks / replicas ranks (hybrid sharding: shard inside a machine)"
    )
    context_parallel: PositiveInt = option(
        1,
        "ranks that share each micro, for rollouts that are too long for one card: each computes a part of the tokens, "
        "and attention exchanges heads (Ulysses)",
    )
    offload_weights: bool = option(False, "keep sharded weights in host memory, and copy a layer to the GPU to compute")

    @property
    def ranks_multiple(self) -> int:
        """The number of ranks is a multiple of this."""
        return math.lcm(self.replicas, self.context_parallel)

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse divisions of the ranks that leave a rest, and what only several ranks can do."""
        if self.offload_weights and num_ranks == 1:
            raise ConfigError(
                "train.offload_weights is for the weights that several ranks share, and there is one rank",
                fix="leave --train.offload-weights out, or start several ranks; --train.optimizer adamw_cpu keeps the "
                "optimizer in host memory",
            )
        for name in ("replicas", "context_parallel"):
            number = getattr(self, name)
            if num_ranks % number:
                raise ConfigError(
                    f"train.{name} is {number}, and {counted(num_ranks, 'rank')} cannot be divided by it",
                    fix=f"give --train.{name.replace('_', '-')} a divisor of the number of ranks, or leave it out",
                )


class TrackOptions(Section):
    """Metrics, and the trackers that get them beside the JSONL file."""

    metrics_file: Path | None = option(None, "JSONL file of the metrics; metrics.jsonl in save_path when empty")
    track: Annotated[tuple[Literal["wandb", "tensorboard", "trackio"], ...], BeforeValidator(parse_names)] = option(
        (), "further sinks: wandb, tensorboard, trackio"
    )
    wandb_project: str | None = option(None, "project at W&B or Trackio")
    wandb_group: str | None = option(None, "group of the run at W&B or Trackio")
    wandb_run_name: str | None = option(None, "name of the run at W&B or Trackio")
    metric_aliases: Annotated[tuple[Literal["trl", "verl", "atropos"], ...], BeforeValidator(parse_names)] = option(
        (), "also write metrics under the names of: trl, verl, atropos"
    )

    @property
    def unused_name(self) -> str:
        """A sentence about a name for a tracker that is given while no tracker is used; "" otherwise."""
        named = [name for name in ("wandb_project", "wandb_group", "wandb_run_name") if getattr(self, name)]
        if not named or {"wandb", "trackio"} & set(self.track):
            return ""
        flag = "--" + named[0].replace("_", "-")
        return f"{flag} has no effect without a tracker: add --track wandb, or --track trackio"


class TrainConfig(
    ObjectiveOptions,
    DistillationOptions,
    OptimizerOptions,
    LoraOptions,
    SpeedOptions,
    ShardOptions,
    SyncOptions,
    TrackOptions,
):
    """The trainer process."""

    model: str = shared("model")
    steps: PositiveInt = shared("steps")
    seed: int = shared("seed")
    device: str = shared("device")
    threads: Count = shared("threads")
    dtype: Dtype = option("auto", "number format of the live weights, auto: the engine's")
    # the batch
    batch_size: PositiveInt = option(128, "sequences per optimizer step, before accumulation")
    gradient_accumulation_steps: PositiveInt = option(1, "multiplies the sequences of an optimizer step")
    seq_len: PositiveInt = option(2048, "longest sequence taken, in tokens")
    max_age: Count = shared(
        "max_age",
        "not more than the environments': before version v is published, the trainer waits for batch v + this",
        default=0,
    )
    # the neighbours
    hub_url: str = shared("hub_url")
    engine_url: Names = shared(
        "engine_url",
        "each gets the weights; hub: those in the hub's table, which may join and leave (treadle engine --join HUB)",
    )
    # what stays
    save_path: Path = option(Path("trained_model_checkpoints"), "folder for checkpoints and the final model")
    checkpoint_interval: Count = option(25, "steps between resumable checkpoints, and one at the end; 0: none")
    keep_checkpoints: PositiveInt = option(
        2, "number of checkpoints that are kept; with two, a damaged one can be skipped"
    )
    checkpoint_url: str = option(
        "",
        "also copy checkpoints and the final model to s3://bucket/path, gs://, az:// or file://, and start from the "
        "newest copy if it is newer; treadle run adds the name of the run folder",
    )

    @model_validator(mode="before")
    @classmethod
    def _mode_of_fleet(cls, values: Any) -> Any:
        if isinstance(values, dict) and names_fleet(values.get("engine_url")):
            return with_fleet_mode(values)
        return values

    @model_validator(mode="after")
    def _can_be_done(self) -> TrainConfig:
        check_gpus(self.gpus, self.device)
        if self.gpus is not None and self.ranks not in (1, len(self.gpus)):
            raise ValueError(
                f"train.gpus names {len(self.gpus)} GPUs and ranks is {self.ranks}: each rank has one; leave ranks out"
            )
        if self.has_fleet:
            self._check_fleet()
        if self.ranks > 1:  # else torchrun may start several
            self.check_ranks(self.ranks)
        if self.mode.adapters and not self.lora:
            raise ValueError(
                f"weight_bridge_mode {self.weight_bridge_mode} publishes adapters, and lora is off: leave lora out, or "
                "choose reload to publish all weights"
            )
        if self.quantization != "none":
            self._check_quantization()
        if self.offload_weights and self.optimizer == "adamw_8bit":
            raise ValueError(
                "adamw_8bit changes weights on the GPU, and offload_weights keeps them in host memory: choose the "
                "optimizer adamw_cpu, or leave offload_weights out"
            )
        # Adapters are the trainer's own, and a frozen base stays as the engine has it.
        merges = not self.mode.adapters
        own_copy = {
            "lora": self.lora and merges,
            "epochs over 1": self.epochs > 1 and merges,
            "ranks over 1": self.ranks > 1,
        }
        if self.single_copy and any(own_copy.values()):
            needs = " and ".join(name for name, is_set in own_copy.items() if is_set)
            if not merges:
                raise ValueError(f"single_copy cannot be with {needs}: leave it out")
            raise ValueError(
                f"single_copy cannot be with {needs}: the trainer's weights then differ from the engine's between two "
                "publishes; set use_shared_memory instead, or with lora weight_bridge_mode lora_only"
            )
        return self

    @property
    def has_fleet(self) -> bool:
        """Whether the weights go to several engines, which may come and go."""
        return names_fleet(self.engine_url)

    @property
    def names_hub_table(self) -> bool:
        """Whether the engines are those of the hub's table, however many there are."""
        return HUB_TABLE in self.engine_url

    def _check_fleet(self) -> None:
        if not self.can_have_fleet:
            mode = "broadcast_by memory" if self.use_shared_memory else f"weight_bridge_mode {self.weight_bridge_mode}"
            raise ValueError(
                f"{mode} publishes to one engine, and engine_url names several: set weight_bridge_mode reload or "
                "lora_only, or use_shared_memory (a broadcast to all)"
            )
        if self.single_copy:
            raise ValueError("single_copy is for one engine, and engine_url names several: leave single_copy out")
        if self.verify_publish == "off":
            raise ValueError(
                "verify_publish is off, and of several engines only those with verified weights serve: leave "
                "verify_publish out"
            )

    def _check_quantization(self) -> None:
        if not self.lora or not self.mode.quantized_base:
            raise ValueError(
                f"quantization {self.quantization} needs weight_bridge_mode lora_only, which trains adapters "
                "on a frozen model"
            )
        if self.single_copy or self.merge_final:
            given = "single_copy" if self.single_copy else "merge_final"
            raise ValueError(
                f"{given} cannot be with quantization {self.quantization}: leave it out (treadle export merges "
                "adapters into the 16-bit model)"
            )

    def on_device(self, *, gpu: bool) -> TrainConfig:
        """A copy with `micro_tokens` chosen for the device."""
        chosen = self.micro_tokens or MICRO_TOKENS["cuda" if gpu else "cpu"] * self.context_parallel
        return self.model_copy(update={"micro_tokens": chosen})

    @property
    def metrics_path(self) -> Path:
        return self.metrics_file or self.save_path / "metrics.jsonl"

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps
