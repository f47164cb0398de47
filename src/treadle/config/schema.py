"""The typed configuration: one section a process, and `RunConfig` that holds them all.

A field's name is its TOML key and its flag (`clip_high` -> `--clip-high`). `flags` in a field's extra lists further
spellings, among them those of Atropos' example trainer, so that old command lines keep working.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from treadle.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"

Port = Annotated[int, Field(ge=1, le=65535)]
PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]


def option(default: Any, help: str, *, flags: tuple[str, ...] = ()) -> Any:
    """A field with its help text and further spellings of its flag."""
    return Field(default, description=help, json_schema_extra={"flags": list(flags)})


class Section(BaseModel):
    """Unknown keys are errors: a misspelt key must never be ignored in silence."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class HubConfig(Section):
    """The rollout API process."""

    host: str = option("127.0.0.1", "address to listen on; another than loopback needs a token")
    port: Port = option(8000, "port to listen on")
    database: Path = option(Path("treadle-hub.sqlite"), "file of the durable queue")
    fresh: bool = option(False, "begin with an empty queue; the file of an earlier run is renamed, not deleted")
    # who may call
    token_file: Path | None = option(None, "file of the token that every call must carry; made when it is not there")
    admin_token_file: Path | None = option(None, "file of the token that may also reset the hub from another machine")
    allowed_hosts: str = option("", "further names, comma-separated, that clients call this machine by")
    # batches
    lease_s: Seconds = option(600.0, "a batch not acknowledged within this time is given out again")
    max_deliveries: PositiveInt = option(5, "a batch that failed this often is set aside (dead-lettered)")
    max_age: Count | None = option(None, "groups sampled more than so many policy versions ago are stale; empty: none")
    stale: Literal["drop", "downweight"] = option("drop", "what happens to stale groups")
    vocab_size: PositiveInt | None = option(None, "token ids must be below this; empty: as the trainer registers")
    # limits
    queue_limit_groups: PositiveInt = option(10_000, "groups that may wait before posts are answered 503")
    queue_limit_bytes: PositiveInt = option(4 * 2**30, "bytes that may wait before posts are answered 503")
    keep_trained_bytes: Count = option(
        16 * 2**30, "trained groups are kept for replay and for looking, up to this size"
    )
    max_packed_bytes: PositiveInt = option(16 * 2**20, "largest compressed request body")
    max_body_bytes: PositiveInt = option(64 * 2**20, "largest request body, inflated")
    max_connections: PositiveInt = option(1000, "connections that may be open at once; more are answered 503")
    read_timeout_s: Seconds = option(30.0, "a request that takes longer to arrive is ended")
    door_workers: Count = option(0, "processes that check posted groups; 0: one less than there are cores, at most 4")


class EngineConfig(Section):
    """The inference process."""

    model: str = option(DEFAULT_MODEL, "a Hugging Face id, a folder, or the built-in default", flags=("model-name",))
    host: str = option("127.0.0.1", "address to listen on")
    port: Port = option(9001, "port to listen on")
    device: str = option("auto", "cpu, cuda, cuda:0, ...; auto takes a GPU when there is one")
    dtype: Dtype = option("bfloat16", "number format of the weights; auto takes the checkpoint's own")
    threads: Count = option(0, "compute threads; 0 takes every core")
    max_num_seqs: PositiveInt = option(64, "completions that are generated side by side")
    max_model_len: PositiveInt = option(2048, "longest prompt plus completion, in tokens")
    weights_file: Path | None = option(None, "share the weights through this memory-mapped file")
    pause_timeout_s: Seconds = option(120.0, "longest wait for running requests when weights change")


class ServerConfig(Section):
    """Where an environment finds its model (Atropos' `--openai.*` flags)."""

    base_url: str = option("http://127.0.0.1:9001/v1", "URL of the engine, with or without /v1")
    model_name: str = option(DEFAULT_MODEL, "the model whose tokenizer and chat template are used")
    server_type: Literal["vllm", "openai"] = option("vllm", "wire format of the engine")
    api_key: str = option("", "bearer token, when the engine asks for one")
    timeout: Seconds = option(1200.0, "seconds to wait for one completion")


class EnvConfig(Section):
    """An environment process (Atropos' `--env.*` flags)."""

    name: str = option("arithmetic", "a built-in environment")
    task: str = option(
        "addition", "which of the environment's tasks (arithmetic: addition, comparison, multiplication)"
    )
    group_size: PositiveInt = option(8, "completions per prompt")
    max_token_length: PositiveInt = option(24, "longest completion, in tokens")
    temperature: Annotated[float, Field(ge=0)] = option(1.0, "sampling temperature in training")
    brevity: Annotated[float, Field(ge=0)] = option(0.0, "bonus for a right answer that ends early, at most this much")
    seed: int = option(0, "the same seed gives the same prompts and the same samples")
    rollout_server_url: str = option("http://127.0.0.1:8000", "URL of the hub")
    max_age: Count = option(
        1, "how many policy versions ahead of training to sample: 0 is strictly on-policy, 1 overlaps both"
    )
    num_eval: Count = option(256, "held-out prompts of an evaluation; 0 evaluates never")
    steps_per_eval: Count = option(
        0, "also evaluate every so many steps (not in the last max_age); 0: before and after"
    )
    data_dir_to_save_evals: Path | None = option(None, "folder for the evaluations' results")
    inference_weight: float = option(1.0, "weight of this environment in the mix")
    wandb_name: str | None = option(None, "name to register under; the environment's own when empty")


class TrainConfig(Section):
    """The trainer process."""

    model: str = option(DEFAULT_MODEL, "a Hugging Face id, a folder, or the built-in default", flags=("model-name",))
    steps: PositiveInt = option(45, "optimizer steps", flags=("training-steps",))
    seed: int = option(0, "seed of everything random in the trainer")
    device: str = option("auto", "cpu, cuda, cuda:0, ...; auto takes a GPU when there is one")
    threads: Count = option(0, "compute threads; 0 takes every core")
    dtype: Dtype = option("auto", "number format of the live weights, auto: the engine's; masters are always fp32")
    # the batch
    batch_size: PositiveInt = option(64, "sequences per optimizer step, before accumulation")
    gradient_accumulation_steps: PositiveInt = option(1, "multiplies the sequences of an optimizer step")
    seq_len: PositiveInt = option(2048, "longest sequence taken, in tokens")
    micro_tokens: PositiveInt = option(768, "tokens forwarded at once; bounds the memory of a step")
    logprob_chunk: PositiveInt = option(8192, "entries of the vocabulary whose logits exist at the same time")
    max_age: Count = option(
        0, "versions that environments sample ahead: before version v is published, batch v + this is leased"
    )
    # the objective
    normalize_std: bool = option(True, "divide advantages by the standard deviation of their group")
    clip_eps: Annotated[float, Field(gt=0)] | None = option(None, "sets clip_low and clip_high at once")
    clip_low: Annotated[float, Field(gt=0, lt=1)] = option(0.2, "the ratio is clipped below 1 - this")
    clip_high: Annotated[float, Field(gt=0)] = option(0.28, "the ratio is clipped above 1 + this")
    kl_coef: Annotated[float, Field(ge=0)] = option(0.0, "weight of the KL term against the rollout policy")
    # the optimizer
    lr: Annotated[float, Field(gt=0)] = option(3e-5, "peak learning rate", flags=("learning-rate",))
    warmup_steps: Count = option(3, "steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = option("linear", "course of the learning rate after that")
    beta1: Annotated[float, Field(ge=0, lt=1)] = option(0.9, "AdamW: decay of the mean")
    beta2: Annotated[float, Field(ge=0, lt=1)] = option(0.99, "AdamW: decay of the mean square")
    weight_decay: Annotated[float, Field(ge=0)] = option(0.0, "AdamW: decoupled weight decay")
    max_grad_norm: Annotated[float, Field(gt=0)] = option(1.0, "gradients are clipped to this norm")
    # the neighbours
    atropos_url: str = option("http://127.0.0.1:8000", "URL of the hub", flags=("hub-url",))
    engine_url: str = option("http://127.0.0.1:9001", "URL of the engine that gets the weights")
    weight_bridge_mode: Literal["shared_memory", "offline"] = option(
        "shared_memory", "how new weights reach the engine: one shared copy, or not at all"
    )
    # what stays
    save_path: Path = option(Path("trained_model_checkpoints"), "folder for checkpoints and the final model")
    checkpoint_interval: Count = option(25, "save a resumable checkpoint every so many steps; 0: only at the end")
    metrics_file: Path | None = option(None, "JSONL file of the metrics; metrics.jsonl in save_path when empty")

    @model_validator(mode="before")
    @classmethod
    def _clip_eps_sets_both(cls, values: Any) -> Any:
        """It is a way to say two things, not a setting of its own, so it is not kept."""
        if isinstance(values, dict) and values.get("clip_eps") is not None:
            values = values | {"clip_low": values["clip_eps"], "clip_high": values["clip_eps"], "clip_eps": None}
        return values

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps


class RunConfig(Section):
    """A whole run: what `treadle run` starts."""

    model: str = option(DEFAULT_MODEL, "a Hugging Face id, a folder, or the built-in default", flags=("model-name",))
    steps: PositiveInt = option(45, "optimizer steps", flags=("training-steps",))
    seed: int = option(0, "the same seed gives the same curve")
    output: Path = option(Path("runs"), "folder in which every run gets a folder of its own")
    hub: HubConfig = HubConfig()
    engine: EngineConfig = EngineConfig()
    openai: ServerConfig = ServerConfig()
    env: EnvConfig = EnvConfig()
    train: TrainConfig = TrainConfig()

    def check_together(self) -> None:
        """What a whole run needs of its sections; a process that runs alone knows only its own."""
        group, sequences = self.env.group_size, self.train.sequences_per_step
        if group < 2:
            raise ConfigError("a group of one teaches nothing", fix="--env.group-size 8")
        if sequences % group:
            raise ConfigError(
                f"a step has {sequences} sequences (train.batch_size x gradient_accumulation_steps), no multiple of "
                f"env.group_size {group}",
                fix="change one of them",
            )
        if group > self.engine.max_num_seqs:
            raise ConfigError(
                f"env.group_size {group} is over engine.max_num_seqs {self.engine.max_num_seqs}",
                fix=f"--engine.max-num-seqs {group}",
            )
        if self.env.temperature == 0:
            raise ConfigError("at temperature 0 all rollouts of a group are the same", fix="--env.temperature 1")
