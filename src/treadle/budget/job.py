"""Values of the memory plan: PlannedJob is what is estimated, Budget is the result.

A Budget has one MemoryPool for each kind of memory (trainer GPU, engine GPU, host), with its components and the moments
of a step in which each component exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from treadle.budget.hardware import SAFE_SHARE, Machine
from treadle.budget.shapes import ModelShape
from treadle.config.sync import Quantization
from treadle.errors import ConfigError
from treadle.support import WeightModeName

Mode = Literal["single-copy", "two-copies", "lora", "none"]
NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8  # of a weight: 4 bits, a scale for 64 of them, a scale for 256 scales
OptimizerName = Literal["adamw", "adamw_8bit", "adafactor", "adamw_cpu", "muon"]


@dataclass(frozen=True)
class PlannedJob:
    """Everything that decides about memory. Impossible combinations are refused.

    `PlannedJob(find_shape("Qwen3-8B"))`: full fine-tuning with AdamW, engine and trainer on one GPU with a copy each.
    """

    shape: ModelShape
    mode: Mode = "two-copies"
    train_gpus: int = 1  # a trainer rank on each
    engine_gpus: int = 0  # an engine worker on each (tensor parallel); 0: the engine runs on the GPU of the only rank
    shard: Literal["fsdp2", "zero2"] = "fsdp2"  # of several ranks
    replicas: int = 1  # copies of the sharded model, each on train_gpus / replicas ranks
    ranks_multiple: int = 1  # suggested numbers of ranks are multiples of this
    offloads_weights: bool = False  # shards are in host memory
    weight_mode: WeightModeName = "shared_vllm"
    weight_bytes: int = 2
    # training
    optimizer: OptimizerName = "adamw"
    gradient_bytes: int = 4
    train_layers: tuple[int, ...] | None = None
    lora: bool = False
    quantization: Quantization = "none"
    lora_r: int = 16
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj")
    # one micro-batch
    micro_tokens: int = 16_384
    prompt_tokens: int = 1024
    completion_tokens: int = 1024
    group_size: int = 8
    shares_prompts: bool = True
    logprob_chunk: int = 8192
    is_checkpointed: bool = False
    is_compiled: bool = True
    has_liger: bool = False
    has_block_attention: bool = False  # dense fp32 blocks, as on a CPU
    is_lean: bool = False  # norms and MLPs recompute cheap tensors, as on a CPU
    # reference model of the KL term
    has_reference: bool = False
    is_reference_offloaded: bool = False
    # engine
    max_num_seqs: int = 64
    max_model_len: int = 2048
    gpu_memory_utilization: float | None = None

    def __post_init__(self) -> None:
        _check_modes(self)
        _check_layers(self)
        unknown = [name for name in self.lora_targets if name not in self.shape.linears]
        if self.lora and unknown:
            raise ConfigError(
                f"the model has no linear layer '{unknown[0]}'; it has {', '.join(self.shape.linears)}",
                fix="correct --train.lora-target-modules",
            )
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization {self.gpu_memory_utilization:g} is no share of a GPU",
                fix="--engine.gpu-memory-utilization 0.5",
            )

    @property
    def sequence_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def tokens_at_once(self) -> int:
        """Largest micro-batch: a rollout longer than micro_tokens is never cut.

        >>> from treadle.budget.shapes import KNOWN
        >>> PlannedJob(KNOWN["qwen3-8b"], micro_tokens=4096, prompt_tokens=512, completion_tokens=8192).tokens_at_once
        8704
        """
        return max(self.micro_tokens, self.sequence_tokens)

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of weights, gradients and optimizer state."""
        return self.train_gpus // self.replicas

    @property
    def is_sharded(self) -> bool:
        return self.train_gpus > 1

    @property
    def tensor_parallel(self) -> int:
        """Number of GPUs that share the engine's weights."""
        return max(1, self.engine_gpus)

    @property
    def model_bytes(self) -> float:
        """One copy of the model. nf4 quantizes the matrices of the layers; embeddings, output layer and norms stay."""
        shape = self.shape
        if self.quantization == "none":
            return float(shape.num_params * self.weight_bytes)
        matrices = shape.num_layers * shape.num_matrix_params
        return NF4_BYTES * matrices + self.weight_bytes * (shape.num_params - matrices)

    @property
    def num_trained(self) -> int:
        """Parameters with gradients and optimizer state."""
        if self.lora:
            layers = self.shape.num_layers if self.train_layers is None else len(self.train_layers)
            return layers * sum(self.lora_r * sum(self.shape.linears[name]) for name in self.lora_targets)
        if self.train_layers is not None:
            return len(self.train_layers) * self.shape.num_layer_params
        return self.shape.num_params

    @property
    def tokens_per_completion(self) -> float:
        """Tokens forwarded per completion: its own, and its share of the prompt."""
        # Completions of one prompt that fit into a micro-batch.
        fitting = (self.tokens_at_once - self.prompt_tokens) // self.completion_tokens
        num_sharing = min(self.group_size, fitting) if self.shares_prompts else 1
        return self.prompt_tokens / num_sharing + self.completion_tokens

    @property
    def loss_tokens(self) -> int:
        """Completion tokens in a full micro-batch."""
        return round(self.tokens_at_once * self.completion_tokens / self.tokens_per_completion)


def _check_modes(job: PlannedJob) -> None:
    if job.train_gpus < 1 or job.engine_gpus < 0:
        raise ConfigError("a job needs at least one trainer GPU", fix="--train-gpus 1 --engine-gpus 0")
    if job.mode == "single-copy" and (job.train_gpus > 1 or job.engine_gpus):
        raise ConfigError(
            "one copy of the weights is shared by a trainer and an engine on the same, single GPU",
            fix="--mode two-copies, or --train-gpus 1 --engine-gpus 0",
        )
    if job.mode not in (("lora", "single-copy") if job.lora else ("single-copy", "two-copies", "none")):
        raise ConfigError(
            f"mode '{job.mode}' and train.lora {str(job.lora).lower()} do not go together",
            fix="give --train.lora true and leave --mode out, or --mode single-copy for one copy of the base model",
        )
    if job.train_gpus > 1 and not job.engine_gpus:
        raise ConfigError(
            f"{job.train_gpus} trainer ranks and the engine need GPUs of their own: they share one only with one rank",
            fix="--engine-gpus 1",
        )
    if job.train_gpus % job.replicas:
        raise ConfigError(
            f"{job.train_gpus} trainer ranks cannot be divided into {job.replicas} replicas",
            fix="choose --train.replicas that divides the number of ranks",
        )
    heads, kv_heads, split = job.shape.num_heads, job.shape.num_kv_heads, job.tensor_parallel
    if heads % split or (kv_heads % split and split % kv_heads):
        raise ConfigError(
            f"the {heads} attention heads and {kv_heads} KV heads cannot be divided among {split} engine GPUs",
            fix="choose --engine-gpus that divides both, such as 2, 4 or 8",
        )


def _check_layers(job: PlannedJob) -> None:
    layers = job.train_layers
    if layers is not None and (not layers or max(layers) >= job.shape.num_layers):
        raise ConfigError(
            f"--train.train-layer-indices must name layers from 0 to {job.shape.num_layers - 1}",
            fix="correct --train.train-layer-indices",
        )


@dataclass(frozen=True)
class Layout:
    """Numbers of the GPUs of engine and trainer; `reason`: why the plan chose them, "" if it did not."""

    engine: tuple[int, ...]
    trainer: tuple[int, ...]
    reason: str = ""

    @classmethod
    def of(cls, job: PlannedJob) -> Layout:
        """The engine on the first GPUs, the trainer on the next ones."""
        num_engine = job.engine_gpus
        return cls(tuple(range(max(1, num_engine))), tuple(range(num_engine, num_engine + job.train_gpus)))


# ---- the result

Moment = Literal["loss", "backward", "reduce", "step"]
Verdict = Literal["fits", "tight", "does not fit", "not known"]
Owner = Literal["trainer", "engine", "both", "others"]
ALL: tuple[Moment, ...] = ("loss", "backward", "reduce", "step")
MICRO: tuple[Moment, ...] = ("loss", "backward")


@dataclass(frozen=True)
class Component:
    """`bytes` of memory in these moments of a step: computing the loss, the backward pass of a layer, summing the
    gradients of embeddings and output layer over the ranks, the optimizer step."""

    name: str
    bytes: int
    owner: Owner
    note: str = ""
    moments: tuple[Moment, ...] = ALL


@dataclass(frozen=True)
class MemoryPool:
    """One kind of memory: "trainer GPU", "engine GPU" or "host". `capacity` None: unknown."""

    name: str
    capacity: int | None
    components: tuple[Component, ...]
    problem: str = ""  # why it does not fit even if the sum does

    def at(self, moment: Moment) -> int:
        return sum(part.bytes for part in self.components if moment in part.moments)

    @property
    def peak_moment(self) -> Moment:
        return max(ALL, key=self.at)

    @property
    def peak(self) -> int:
        return self.at(self.peak_moment)

    @property
    def verdict(self) -> Verdict:
        if self.capacity is None:
            return "not known"
        if self.problem or self.peak > self.capacity:
            return "does not fit"
        return "fits" if self.peak <= SAFE_SHARE * self.capacity else "tight"

    def find(self, name: str) -> int:
        """Bytes of the component with this name; 0 without one."""
        return sum(part.bytes for part in self.components if part.name == name)

    @property
    def trainer_tensors(self) -> int:
        """Peak that torch in the trainer would report: no CUDA context, no fragmentation, nothing of the engine.

        Shared weights are included: subtract "weights" if the engine allocated them.
        """
        mine = [p for p in self.components if p.owner in ("trainer", "both") and p.name not in NOT_TENSORS]
        return max(sum(part.bytes for part in mine if moment in part.moments) for moment in ALL)


NOT_TENSORS = ("CUDA context", "fragmentation", "Python and torch", "freed but kept")


@dataclass(frozen=True)
class Budget:
    job: PlannedJob
    machine: Machine
    pools: tuple[MemoryPool, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the pools; pools of unknown capacity are ignored."""
        verdicts = {pool.verdict for pool in self.pools}
        order: tuple[Verdict, ...] = ("does not fit", "tight", "fits")
        return next((verdict for verdict in order if verdict in verdicts), "not known")
