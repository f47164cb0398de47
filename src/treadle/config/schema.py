"""The typed configuration: one section a process, and `RunConfig` that holds them all.

A field's name is its TOML key and its flag (`clip_high` -> `--clip-high`). `flags` in a field's extra lists further
spellings, among them those of Atropos' example trainer, so that old command lines keep working.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from treadle.config.env import MIN_GROUP_SIZE, EnvConfig, ServerConfig, labels_of
from treadle.config.section import DEFAULT_MODEL, Count, EngineDtype, Port, PositiveInt, Seconds, Section, option
from treadle.config.sync import Quantization, refuse_split_engine
from treadle.config.train import TrainConfig
from treadle.errors import ConfigError
from treadle.wire.generate import MIN_TEMPERATURE


class HubConfig(Section):
    """The rollout API process."""

    host: str = option("127.0.0.1", "address to listen on; another than loopback needs a token")
    port: Port = option(8000, "port to listen on")
    database: Path = option(Path("treadle-hub.sqlite"), "file of the durable queue")
    run_folder: Path | None = option(None, "folder of the run whose figures and logs the page shows")
    fresh: bool = option(False, "begin with an empty queue; the file of an earlier run is renamed, not deleted")
    # who may call
    token_file: Path | None = option(
        None, "file of the token that calls must carry, or one derived for a role; made when it is not there"
    )
    admin_token_file: Path | None = option(None, "file of the token that may also reset the hub from another machine")
    allowed_hosts: str = option("", "further names and addresses, comma-separated, that clients call this machine by")
    # batches
    lease_s: Seconds = option(600.0, "a batch not acknowledged within this time is given out again")
    max_deliveries: PositiveInt = option(5, "a batch that failed this often is set aside (dead-lettered)")
    max_age: Count | None = option(None, "groups sampled more than so many policy versions ago are stale; empty: none")
    stale: Literal["drop", "downweight"] = option("drop", "what happens to stale groups")
    unversioned: Literal["take", "refuse"] = option("take", "groups that do not say which policy version sampled them")
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
    read_timeout_s: Seconds = option(
        30.0, "headers that take longer to arrive are refused, as is a body slower than 16 KiB/s over this time"
    )
    disk_patience_s: Seconds = option(
        20.0, "when the disk has not taken what was posted for so long, the hub writes its stacks to its log"
    )
    validation_workers: Count = option(
        0, "processes that validate posted groups; 0: one less than there are cores, at most 4"
    )


class EngineConfig(Section):
    """The inference process."""

    model: str = option(
        DEFAULT_MODEL, "a Hugging Face id, a folder, or the built-in default", flags=("model-name", "model-path")
    )
    served_model_name: str = option("", "what requests call the model; empty: what --model says")
    engine: Literal["auto", "vllm", "transformers"] = option(
        "auto", "what generates; auto: vLLM where it is installed, else transformers"
    )
    host: str = option("127.0.0.1", "address to listen on; another than loopback needs a token")
    port: Port = option(9001, "port to listen on")
    token_file: Path | None = option(None, "file of the token that every call must carry; made when it is not there")
    allowed_hosts: str = option("", "further names, comma-separated, that clients call this machine by")
    hub_url: str = option("", "the hub to report to, for its page and its explanations; treadle run sets it")
    device: str = option("auto", "cpu, cuda, cuda:0, ...; auto takes a GPU when there is one")
    dtype: EngineDtype = option(
        "fast",
        "number format of the weights; fast: bfloat16, but float32 on a CPU without bf16; auto: the checkpoint's own",
    )
    threads: Count = option(0, "compute threads; 0 takes every core (vLLM on a CPU: all but one)")
    max_num_seqs: PositiveInt = option(128, "completions that are generated side by side")
    max_model_len: PositiveInt = option(2048, "longest prompt plus completion, in tokens")
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = option(
        "processed_logprobs", "logprobs of the distribution that was sampled from, or of the model at temperature 1"
    )
    weights_file: Path | None = option(None, "share the weights through this memory-mapped file")
    pause_timeout_s: Seconds = option(120.0, "longest wait for running requests when weights change")
    patience_s: Seconds = option(
        900.0, "when requests run and nothing comes of them for so long, the engine writes its stacks to its log"
    )
    # adapters
    enable_lora: bool = option(False, "take LoRA adapters while serving")
    quantization: Quantization = option(
        "none", "serve the model in 4 bits (nf4, bitsandbytes): for adapters alone; treadle run sets it"
    )
    max_lora_rank: PositiveInt = option(64, "the largest rank an adapter may have")
    adapter_root: Path | None = option(
        None,
        "the only folder from which adapters and published weights are loaded; empty: your home folder if the engine "
        "is started in it, else the folder it is started in",
    )
    # vLLM
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = option(
        0.45, "vLLM: share of the GPU's memory for weights and KV cache"
    )
    tensor_parallel_size: PositiveInt = option(1, "vLLM: GPUs that share the model", flags=("tp",))
    enforce_eager: bool = option(False, "vLLM: no CUDA graphs and no torch.compile (slower; for finding faults)")
    kv_cache_gib: PositiveInt = option(1, "vLLM on a CPU: memory for the KV cache")
    vllm_python: str = option("", "the Python that has vLLM; empty: this one")
    vllm_args: str = option("", "vLLM: further flags of its own, passed on as they are")
    start_timeout_s: Seconds = option(900.0, "vLLM: longest wait for it to load")

    @model_validator(mode="after")
    def _shares_no_packed_weights(self) -> EngineConfig:
        if self.quantization != "none" and self.weights_file is not None:
            raise ValueError(
                f"weights with the quantization {self.quantization} cannot be shared: leave weights_file out"
            )
        return self


# The sections that each process of a run reads, its own first.
SECTIONS_OF_PROCESS = {"hub": ("hub",), "engine": ("engine",), "env": ("env", "envs", "openai"), "trainer": ("train",)}


class RunConfig(Section):
    """A whole run: what `treadle run` starts."""

    model: str = option(DEFAULT_MODEL, "a Hugging Face id, a folder, or the built-in default", flags=("model-name",))
    steps: PositiveInt = option(25, "optimizer steps", flags=("training-steps",))
    seed: int = option(0, "same seed, same curve")
    output: Path = option(Path("runs"), "folder in which every run gets a folder of its own")
    hub_url: str = option(
        "", "URL of a hub that runs already and has an empty queue; empty: the run starts one", flags=("atropos-url",)
    )
    engine_url: str = option(
        "", "URL of an engine that runs already and is at policy version 0; empty: the run starts one"
    )
    stall_timeout_s: Annotated[float, Field(ge=0)] = option(
        3600.0, "a run in which nothing has moved for so long is stopped; 0: never"
    )
    hub: HubConfig = HubConfig()
    engine: EngineConfig = EngineConfig()
    openai: ServerConfig = ServerConfig()
    env: EnvConfig = EnvConfig()
    envs: tuple[EnvConfig, ...] = ()  # several environments: [[env]] tables; `env` then means nothing
    train: TrainConfig = TrainConfig()

    @property
    def environments(self) -> tuple[EnvConfig, ...]:
        """The environments of the run: those of several [[env]] tables, else the one of [env]."""
        return self.envs or (self.env,)

    @property
    def task_name(self) -> str:
        """What is trained, where there is only room for a word; of several environments their names: "gsm8k + math"."""
        return " + ".join(labels_of(self.envs)) if self.envs else self.env.task_name

    def keys_of_envs(self, name: str) -> list[str]:
        """The dotted keys of a setting in all environments: ["env.seed"], or ["envs.0.seed", "envs.1.seed"]."""
        return [f"envs.{place}.{name}" for place in range(len(self.envs))] or [f"env.{name}"]

    @property
    def attached_urls(self) -> dict[str, str]:
        """The servers that run already, which the run uses and does not start: {"hub": URL}."""
        urls = {"hub": self.hub_url, "engine": self.engine_url}
        return {server: url for server, url in urls.items() if url}

    def check_together(self) -> None:
        """What a whole run needs of its sections; a process that runs alone knows only its own."""
        self.check_mix()
        sequences = self.train.sequences_per_step
        for env, whose in self._named_envs():
            if env.group_size < MIN_GROUP_SIZE:
                raise ConfigError(f"{whose}a group of one teaches nothing", fix="--env.group-size 8")
            if sequences % env.group_size:
                raise ConfigError(
                    f"{whose}a step has {sequences} sequences (train.batch_size x gradient_accumulation_steps), no "
                    f"multiple of env.group_size {env.group_size}",
                    fix="change one of them",
                )
        if not self.engine_url:  # else the engine that runs already says how it was started
            self.check_engine()
        for env, whose in self._named_envs():
            if env.temperature < MIN_TEMPERATURE:
                raise ConfigError(
                    f"{whose}at temperature {env.temperature:g} all rollouts of a group are the same (engines take the "
                    f"likeliest token below {MIN_TEMPERATURE:g})",
                    fix="--env.temperature 1",
                )

    def _named_envs(self) -> list[tuple[EnvConfig, str]]:
        """Each environment, and how an error about it begins: "gsm8k: " among several."""
        labels = [f"{label}: " for label in labels_of(self.envs)] or [""]
        return list(zip(self.environments, labels, strict=True))

    def check_mix(self) -> None:
        """Weights and minimums of several environments."""
        if not self.envs:
            return
        for env, whose in self._named_envs():
            if not 0 < env.inference_weight < math.inf:
                raise ConfigError(
                    f"{whose}its weight is {env.inference_weight:g}, and weights are greater than 0",
                    fix="leave the environment out, or give it a weight such as 0.1",
                )
            if env.pace == "waves":
                raise ConfigError(
                    f"{whose}pace waves fills whole batches, and {len(self.envs)} environments share them",
                    fix="--env.pace stream, or leave it out",
                )
        minimums = sum(env.min_batch_allocation or 0.0 for env in self.envs)
        if minimums > 1 + 1e-9:
            raise ConfigError(
                f"the minimums of the environments are {minimums:g} of a batch together",
                fix="lower minimum (min_batch_allocation) in the [[env]] tables: at most 1 together",
            )

    def check_engine(self) -> None:
        """What the run needs of its engine."""
        group, flag = max(env.group_size for env in self.environments), "--engine."
        if self.engine_url:
            flag = "treadle engine --"
        if group > self.engine.max_num_seqs:
            raise ConfigError(
                f"env.group_size {group} is over engine.max_num_seqs {self.engine.max_num_seqs}",
                fix=f"{flag}max-num-seqs {group}",
            )
        refuse_split_engine(self.engine.tensor_parallel_size, self.train.weight_bridge_mode)
        if self.engine.tensor_parallel_size > 1 and self.train.single_copy:
            raise ConfigError(
                f"an engine on {self.engine.tensor_parallel_size} GPUs (tensor parallel) shares no weights",
                fix="leave --train.single-copy out, or use an engine on one GPU",
            )
        other = next((env.temperature for env in self.environments if env.temperature != 1), None)
        if self.engine.logprobs_mode == "raw_logprobs" and other is not None:
            raise ConfigError(
                f"raw logprobs are those of temperature 1, and rollouts are sampled at {other:g}: every ratio would be "
                "wrong",
                fix=f"{flag}logprobs-mode processed_logprobs",
            )
