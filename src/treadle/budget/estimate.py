"""Estimate the memory of a PlannedJob on a Machine, component by component. Pure.

Several trainer ranks share weights, gradients and optimizer states (torch's FSDP2): each has a part of every tensor,
and layers are whole while they compute. Everything else is the same on each rank.
"""

from __future__ import annotations

import math

from treadle.budget import hardware
from treadle.budget.activations import backward_bytes, kept_bytes, logits_bytes
from treadle.budget.hardware import Machine
from treadle.budget.job import ALL, MICRO, Budget, Component, MemoryPool, Moment, Owner, PlannedJob
from treadle.engines.vllm.command import lora_rank, max_cpu_loras, max_loras
from treadle.formatting import gigabytes

TRAINER_GPU = "trainer GPU"
ENGINE_GPU = "engine GPU"
HOST = "host"


def estimate(job: PlannedJob, machine: Machine) -> Budget:
    """The memory of every component, in every moment of a step.

    `estimate(PlannedJob(find_shape("Qwen3-8B")), Machine("h100", card_bytes("h100"), None)).verdict` is "does not fit".
    """
    if machine.gpu_bytes is None:
        return Budget(job, machine, (_cpu(job, machine.host_bytes),))
    trainer = _trainer_parts(job)
    engine = _engine_parts(job, machine.gpu_bytes)
    problem = _too_small_share(job, machine.gpu_bytes)
    if job.engine_gpus:
        pools = [_gpu(TRAINER_GPU, trainer, machine.gpu_bytes), _gpu(ENGINE_GPU, engine, machine.gpu_bytes, problem)]
    else:
        pools = [_gpu(TRAINER_GPU, trainer + engine, machine.gpu_bytes, problem)]
    return Budget(job, machine, (*pools, MemoryPool(HOST, machine.host_bytes, _listed(_host_parts(job)))))


def kv_bytes_per_token(job: PlannedJob) -> int:
    """Keys and values of one token on one engine GPU: kv heads are split among GPUs, with at least one each."""
    heads = math.ceil(job.shape.num_kv_heads / job.tensor_parallel)
    return 2 * job.shape.num_layers * heads * job.shape.head_dim * job.weight_bytes


def _trainer_parts(job: PlannedJob) -> list[Component]:
    """Components of each trainer GPU, and so of each rank."""
    shape = job.shape
    return [
        *_weight_parts(job),
        *_state_parts(job),
        *_reference_parts(job),
        _part("activations", kept_bytes(job), "trainer", _activations_note(job), MICRO),
        _part("logits", logits_bytes(job), "trainer", f"{min(job.logprob_chunk, shape.vocab):,} at a time", ("loss",)),
        _part("backward of a layer", backward_bytes(job), "trainer", "activations' gradients", ("backward",)),
        *_fresh_gradient_parts(job),
        *_publish_parts(job, "trainer"),
        _part("CUDA context", hardware.CUDA_CONTEXT_BYTES, "trainer", "the trainer's process"),
    ]


def _weight_parts(job: PlannedJob) -> list[Component]:
    """The weights that a rank keeps, and those that are whole while it computes with them."""
    is_shared = job.mode == "single-copy"
    if not job.is_sharded:
        note = "shared with the engine" if is_shared else "the trainer's copy"
        return [_part("weights", job.model_bytes, "both" if is_shared else "trainer", note)]
    shape, size = job.shape, job.weight_bytes
    parts = [] if job.offloads_weights else [_part("weights", job.model_bytes / job.num_shards, "trainer", _of(job))]
    computing: tuple[Moment, ...] = ("loss", "backward", "reduce")
    if job.shard == "zero2":
        return [*parts, _part("whole weights", job.model_bytes, "trainer", "from forward to backward", computing)]
    layers = hardware.WHOLE_LAYERS * shape.num_layer_params * size
    return [
        *parts,
        _part("whole layers", layers, "trainer", f"{hardware.WHOLE_LAYERS}: computing, gathered ahead", MICRO),
        _part("whole embeddings", shape.num_outer_params * size, "trainer", "and output layer", computing),
    ]


def _of(job: PlannedJob) -> str:
    """ "1/7 of the trainer's copy"."""
    return f"1/{job.num_shards} of the trainer's copy" if job.num_shards > 1 else "the trainer's copy"


def _state_parts(job: PlannedJob) -> list[Component]:
    """Gradient accumulators and optimizer states that are on the GPU: of this rank's shard."""
    parts = []
    shards = job.num_shards
    if job.lora:
        parts.append(_part("adapters", job.num_trained * 4 / shards, "trainer", f"fp32, rank {job.lora_r}"))
    if job.optimizer == "adamw_cpu":
        return parts
    masters, moments = optimizer_bytes(job)
    note = "fp32" if job.gradient_bytes == 4 else "bf16"
    states = (
        ("gradients", job.num_trained * job.gradient_bytes, f"{note} accumulators"),
        ("masters", masters, "fp32 copy of the weights"),
        ("optimizer moments", moments, job.optimizer),
    )
    parts += [
        _part(name, size / shards, "trainer", f"1/{shards}, {text}" if shards > 1 else text)
        for name, size, text in states
    ]
    parts.append(_part("optimizer scratch", _step_scratch(job), "trainer", "fp32, a piece at a time", ("step",)))
    if job.optimizer == "muon" and job.is_sharded:
        matrix = job.shape.num_largest_in_layer * job.weight_bytes
        parts.append(_part("whole matrix", matrix, "trainer", "one at a time, for Muon", ("step",)))
    return parts


def _step_scratch(job: PlannedJob) -> float:
    """Temporary fp32 copies in the optimizer step: of the largest tensor, and of bf16 gradients piece by piece."""
    if job.lora:  # adapters are small
        return 0
    if job.optimizer == "adamw_8bit":
        return hardware.CHUNK_8BIT_BYTES
    largest = 4 * job.shape.num_largest / job.num_shards
    piece = 0 if job.gradient_bytes == 4 else hardware.PIECE_BYTES + largest
    return hardware.STEP_COPIES.get(job.optimizer, 0) * largest + piece


def optimizer_bytes(job: PlannedJob) -> tuple[float, float]:
    """(masters, moments) of all trained parameters, on the GPU or in host memory.

    >>> from treadle.budget.shapes import KNOWN
    >>> optimizer_bytes(PlannedJob(KNOWN["qwen3-1.7b"], optimizer="adamw"))
    (6882299904.0, 13764599808.0)
    """
    trained = job.num_trained
    masters = 0.0 if job.optimizer == "adamw_8bit" else hardware.MASTER_BYTES * trained
    if job.optimizer == "adamw_8bit":
        return masters, hardware.MOMENTS_8BIT_BYTES * trained
    if job.optimizer == "adafactor":
        return masters, hardware.FACTORED_BYTES * trained
    if job.optimizer == "muon":
        # One momentum for the matrices of the layers; AdamW's two moments for embeddings, norms and biases.
        layers = job.shape.num_layers if job.train_layers is None else len(job.train_layers)
        matrices = trained if job.lora else layers * job.shape.num_matrix_params
        return masters, hardware.MOMENT_BYTES * (matrices + 2 * (trained - matrices))
    return masters, 2 * hardware.MOMENT_BYTES * trained


def _reference_parts(job: PlannedJob) -> list[Component]:
    """None with LoRA: the reference is the base model without adapters."""
    if not job.has_reference or job.lora:
        return []
    shape, size = job.shape, job.weight_bytes
    if not job.is_reference_offloaded:
        return [_part("reference", shape.num_params * size / job.num_shards, "trainer", "frozen copy for the KL")]
    visiting = shape.num_outer_params + shape.num_layer_params * (hardware.WHOLE_LAYERS if job.is_sharded else 1)
    return [_part("reference", visiting * size, "trainer", "a layer at a time", MICRO)]


def _fresh_gradient_parts(job: PlannedJob) -> list[Component]:
    """New gradients in the dtype of the weights: each is added to its accumulator and freed at once.

    The gradient of the output layer comes first; if it is tied to the embedding, it exists until the end. A compiled
    layer returns all its gradients together, an eager one matrix by matrix. Several ranks sum the gradients of a whole
    layer, and at the end those of embeddings and output layer together, in fp32.
    """
    if job.lora:
        return []
    shape, size = job.shape, job.weight_bytes
    parts = []
    if job.train_layers is None:
        is_held = shape.is_tied or job.is_sharded
        moments: tuple[Moment, ...] = MICRO if is_held else ("loss",)
        note = (
            "added up, then freed" if not is_held else "tied: held to the end" if shape.is_tied else "held to the end"
        )
        parts.append(_part("output layer's gradient", shape.num_embedding_params * size, "trainer", note, moments))
    if not job.is_sharded:
        layer = shape.num_layer_params if job.is_compiled else shape.num_largest_in_layer
        return [*parts, _part("a layer's gradients", layer * size, "trainer", "added up, then freed", ("backward",))]
    summed = size + hardware.REDUCE_BYTES
    note = "and their sum over the ranks, fp32"
    parts.append(_part("a layer's gradients", shape.num_layer_params * summed, "trainer", note, ("backward",)))
    if job.train_layers is None:
        parts.append(
            _part("embeddings' gradients", shape.num_outer_params * summed, "trainer", note, ("reduce",)),
        )
    return parts


def _publish_parts(job: PlannedJob, owner: Owner) -> list[Component]:
    """Weights on their way to an engine on other GPUs: a bucket on both sides, and one whole weight on each rank."""
    if not job.engine_gpus or job.mode != "two-copies":
        return []
    whole = job.shape.num_largest * job.weight_bytes if job.is_sharded and owner == "trainer" else 0
    note = "a whole weight and a bucket" if whole else "a bucket of weights"
    moments = ("step",) if owner == "trainer" else ALL
    return [_part("publishing", hardware.PUBLISH_BUCKET_BYTES + whole, owner, note, moments)]


def _engine_parts(job: PlannedJob, gpu_bytes: int) -> list[Component]:
    """Components of each engine GPU: weights and KV cache are split among the GPUs."""
    parts: list[Component] = []
    if job.mode != "single-copy":
        split = f"1/{job.tensor_parallel} of its copy" if job.tensor_parallel > 1 else "a second copy"
        parts.append(_part("engine's weights", job.model_bytes / job.tensor_parallel, "engine", split))
    one_sequence = job.max_model_len * kv_bytes_per_token(job)
    if job.gpu_memory_utilization is None:
        cache, note = job.max_num_seqs * one_sequence, f"{job.max_num_seqs} x {job.max_model_len:,} tokens"
    else:
        parts += _adapter_places(job)
        cache = max(one_sequence, round(job.gpu_memory_utilization * gpu_bytes - _beside_cache(job)))
        note = f"room for {cache // one_sequence} x {job.max_model_len:,} tokens"
    return [
        *parts,
        _part("KV cache", cache, "engine", note),
        _part("engine's workspace", _engine_workspace(job), "engine", "prefill, CUDA graphs"),
        *_publish_parts(job, "engine"),
        _part("CUDA context", hardware.CUDA_CONTEXT_BYTES, "engine", "the engine's process"),
    ]


def _engine_workspace(job: PlannedJob) -> float:
    shape = job.shape
    forward = (
        hardware.ENGINE_BATCHED_TOKENS * job.weight_bytes * (3 * shape.ffn / job.tensor_parallel + 4 * shape.hidden)
    )
    sampling = hardware.SAMPLING_COPIES * 4 * job.max_num_seqs * shape.vocab
    return forward + sampling + hardware.ENGINE_GRAPHS_BYTES


def _beside_cache(job: PlannedJob) -> float:
    """Memory in vLLM's share of the GPU besides its KV cache."""
    places = sum(part.bytes for part in _adapter_places(job))
    weights = job.model_bytes / job.tensor_parallel
    return weights + _engine_workspace(job) + hardware.CUDA_CONTEXT_BYTES + places


def _too_small_share(job: PlannedJob, gpu_bytes: int) -> str:
    """Why vLLM would not start with its share of the GPU; "" if it starts."""
    if job.gpu_memory_utilization is None:
        return ""
    least = _beside_cache(job) + job.max_model_len * kv_bytes_per_token(job)
    share = job.gpu_memory_utilization * gpu_bytes
    if share >= least:
        return ""
    return (
        f"the engine needs {gigabytes(least)}, and --engine.gpu-memory-utilization {job.gpu_memory_utilization:g} "
        f"gives it {gigabytes(share)}"
    )


def _adapter_places(job: PlannedJob) -> list[Component]:
    """vLLM reserves slots for adapters on every linear layer, whichever layers have one."""
    if not job.lora:
        return []
    rank = lora_rank(job.lora_r)
    one = job.shape.num_layers * rank * sum(map(sum, job.shape.linears.values())) * job.weight_bytes
    num = max_loras(rank)
    return [_part("places for adapters", num * one / job.tensor_parallel, "engine", f"{num} of rank {rank}")]


def _host_parts(job: PlannedJob) -> list[Component]:
    num_processes = job.train_gpus + job.tensor_parallel
    others = sum(hardware.CPU_OTHER_PROCESSES.values())
    parts = [
        _part("processes", num_processes * hardware.HOST_GPU_PROCESS_BYTES, "both", f"{num_processes} with CUDA"),
        _part("hub and environment", others, "others"),
    ]
    if job.lora and job.gpu_memory_utilization is not None:
        num = max_cpu_loras(lora_rank(job.lora_r))
        parts.append(
            _part("adapters", num * job.num_trained * job.weight_bytes, "engine", f"vLLM keeps the newest {num}")
        )
    if job.optimizer == "adamw_cpu":
        masters, moments = optimizer_bytes(job)
        gradients = job.gradient_bytes * job.num_trained
        parts.append(_part("gradients", job.replicas * gradients, "trainer", "accumulators"))
        states = job.replicas * (masters + moments)
        parts.append(_part("masters and moments", states, "trainer", "adamw_cpu keeps them here"))
    if job.has_reference and job.is_reference_offloaded and not job.lora:
        copies = job.replicas * job.shape.num_params * job.weight_bytes
        parts.append(_part("reference", copies, "trainer", "a frozen copy"))
    if job.is_sharded and job.offloads_weights:
        parts.append(_part("weights", job.replicas * job.model_bytes, "trainer", "offloaded"))
        fresh = 0 if job.lora else job.replicas * job.num_trained * job.weight_bytes
        parts.append(_part("new gradients", fresh, "trainer", "of the offloaded weights"))
    if job.is_sharded:
        parts.append(_part("checkpoint", 4 * job.shape.num_largest, "trainer", "a tensor at a time"))
    return parts


def _cpu(job: PlannedJob, capacity: int | None) -> MemoryPool:
    """A machine without a GPU: all processes share host memory."""
    torch_processes = 2 * hardware.CPU_TORCH_PROCESS_BYTES
    growth = hardware.CPU_KV_GROWTH
    positions = min(job.max_model_len, math.ceil(job.sequence_tokens / growth) * growth)
    cache = hardware.CPU_KV_COPIES * job.max_num_seqs * positions * kv_bytes_per_token(job)
    sampling = hardware.SAMPLING_COPIES * 4 * job.max_num_seqs * job.shape.vocab
    parts = [part for part in _trainer_parts(job) if part.name != "CUDA context"]
    if job.optimizer == "adamw_cpu":  # on a CPU that is AdamW
        parts += [part for part in _host_parts(job) if part.name in ("gradients", "masters and moments")]
    if job.mode != "single-copy":
        parts.append(_part("engine's weights", job.model_bytes, "engine", "a second copy"))
    seen = f"{job.max_num_seqs} x {positions:,} tokens, twice"
    parts += [
        _part("KV cache", cache, "engine", seen),
        _part("sampling", sampling, "engine", "logits of the next tokens"),
        _part("Python and torch", torch_processes, "both", "trainer and engine"),
        _part("hub and environment", sum(hardware.CPU_OTHER_PROCESSES.values()), "others", "and the launcher"),
    ]
    changing = _transient(parts) + cache + sampling
    parts.append(_part("freed but kept", hardware.CPU_FREED_BUT_KEPT * changing, "both", "holes that malloc keeps"))
    return MemoryPool(HOST, capacity, _listed(parts))


def _gpu(name: str, parts: list[Component], capacity: int, problem: str = "") -> MemoryPool:
    gaps = _part("fragmentation", hardware.FRAGMENTATION * _transient(parts), "both", "gaps between tensors")
    return MemoryPool(name, capacity, _listed([*parts, gaps]), problem)


def _transient(parts: list[Component]) -> int:
    """Peak of the components that do not exist during the whole step."""
    transient = [part for part in parts if part.moments != ALL]
    return max(sum(part.bytes for part in transient if moment in part.moments) for moment in ALL)


def _listed(parts: list[Component]) -> tuple[Component, ...]:
    return tuple(part for part in parts if part.bytes)


def _activations_note(job: PlannedJob) -> str:
    is_one_rollout = job.sequence_tokens > job.micro_tokens
    tokens = f"{'one rollout of' if is_one_rollout else 'up to'} {job.tokens_at_once:,} tokens"
    if job.is_checkpointed:
        return f"{tokens}, layer inputs"
    return f"{tokens}, {'compiled' if job.is_compiled else 'eager'}"


def _part(name: str, size: float, owner: Owner, note: str = "", moments: tuple[Moment, ...] = ALL) -> Component:
    return Component(name, round(size), owner, note, moments)
