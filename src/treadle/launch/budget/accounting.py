"""Job and machine -> Budget. Pure: the same numbers in, the same numbers out."""

from __future__ import annotations

import math

from treadle.engines.vllm.adapter_places import lora_rank, max_cpu_loras, max_loras
from treadle.formatting import gigabytes
from treadle.launch.budget import calibration as known
from treadle.launch.budget.activations import backward_bytes, kept_bytes, logits_bytes
from treadle.launch.budget.cards import Machine
from treadle.launch.budget.job import Job
from treadle.launch.budget.result import ALL, MICRO, Budget, Component, Moment, Owner, Place

TRAINER_GPU = "trainer GPU"
ENGINE_GPU = "engine GPU"
HOST = "host"


def estimate(job: Job, machine: Machine) -> Budget:
    """The memory of every component, at the worst moment of a step.

    `estimate(Job(find_shape("Qwen3-8B")), Machine("h100", card_bytes("h100"), None)).verdict` is "does not fit".
    """
    if machine.gpu_bytes is None:
        return Budget(job, machine, (_cpu(job, machine.host_bytes),))
    trainer = _trainer_parts(job)
    engine = _engine_parts(job, machine.gpu_bytes)
    problem = _too_small_share(job, machine.gpu_bytes)
    if job.engine_gpus:
        places = [_gpu(TRAINER_GPU, trainer, machine.gpu_bytes), _gpu(ENGINE_GPU, engine, machine.gpu_bytes, problem)]
    else:
        places = [_gpu(TRAINER_GPU, trainer + engine, machine.gpu_bytes, problem)]
    return Budget(job, machine, (*places, Place(HOST, machine.host_bytes, _listed(_host_parts(job)))))


def kv_bytes_per_token(job: Job) -> int:
    """Keys and values of one token on one engine GPU; kv heads are divided, but never below one."""
    heads = math.ceil(job.shape.num_kv_heads / job.tensor_parallel)
    return 2 * job.shape.num_layers * heads * job.shape.head_dim * job.weight_bytes


def _trainer_parts(job: Job) -> list[Component]:
    """What is on each trainer GPU: the optimizer's states are divided among them, all else is whole on each."""
    shape = job.shape
    is_shared = job.mode == "single-copy"
    weights = "shared with the engine" if is_shared else "the trainer's copy"
    return [
        _part("weights", job.model_bytes, "both" if is_shared else "trainer", weights),
        *_state_parts(job),
        *_reference_parts(job),
        _part("activations", kept_bytes(job), "trainer", _activations_note(job), MICRO),
        _part("logits", logits_bytes(job), "trainer", f"{min(job.logprob_chunk, shape.vocab):,} at a time", ("loss",)),
        _part("backward of a layer", backward_bytes(job), "trainer", "activations' gradients", ("backward",)),
        *_fresh_gradient_parts(job),
        _part("CUDA context", known.CUDA_CONTEXT_BYTES, "trainer", "the trainer's process"),
    ]


def _state_parts(job: Job) -> list[Component]:
    """Gradient accumulators and the optimizer's numbers, as far as they are on the GPU."""
    parts = []
    if job.lora:
        parts.append(_part("adapters", job.num_trained * 4, "trainer", f"fp32, rank {job.lora_r}"))
    if job.optimizer == "adamw_cpu":
        return parts
    masters, moments = optimizer_bytes(job)
    note = "fp32" if job.gradient_bytes == 4 else "bf16"
    share = _largest_share(job)
    states = (
        ("gradients", job.num_trained * job.gradient_bytes, f"{note} accumulators"),
        ("masters", masters * share, "fp32 copy of the weights"),
        ("optimizer moments", moments * share, job.optimizer),
    )
    parts += [_part(name, size, "trainer", text) for name, size, text in states]
    parts.append(_part("optimizer scratch", _step_scratch(job), "trainer", "fp32, a piece at a time", ("step",)))
    return parts


def _largest_share(job: Job) -> float:
    """Of the optimizer's states, on the GPU that keeps most: a parameter's are never divided."""
    is_largest_trained = not job.lora and job.train_layers is None
    return max(1 / job.train_gpus, job.shape.num_largest / job.num_trained if is_largest_trained else 0.0)


def _step_scratch(job: Job) -> float:
    """What a step makes besides: fp32 copies of the largest tensor, and of bf16 gradients a piece at a time."""
    if job.lora:  # adapters are small
        return 0
    if job.optimizer == "adamw_8bit":
        return known.CHUNK_8BIT_BYTES
    largest = 4 * job.shape.num_largest
    piece = 0 if job.gradient_bytes == 4 else known.PIECE_BYTES + largest
    return known.STEP_COPIES.get(job.optimizer, 0) * largest + piece


def optimizer_bytes(job: Job) -> tuple[float, float]:
    """(masters, moments) of what is trained, wherever they are kept.

    >>> from treadle.launch.budget.shapes import KNOWN
    >>> optimizer_bytes(Job(KNOWN["qwen3-1.7b"], optimizer="adamw"))
    (6882299904.0, 13764599808.0)
    """
    trained = job.num_trained
    masters = 0.0 if job.optimizer == "adamw_8bit" else known.MASTER_BYTES * trained
    if job.optimizer == "adamw_8bit":
        return masters, known.MOMENTS_8BIT_BYTES * trained
    if job.optimizer == "adafactor":
        return masters, known.FACTORED_BYTES * trained
    if job.optimizer == "muon":
        # One momentum for the matrices of the layers; AdamW's two moments for embeddings, norms and biases.
        layers = job.shape.num_layers if job.train_layers is None else len(job.train_layers)
        matrices = trained if job.lora else layers * job.shape.num_matrix_params
        return masters, known.MOMENT_BYTES * (matrices + 2 * (trained - matrices))
    return masters, 2 * known.MOMENT_BYTES * trained


def _reference_parts(job: Job) -> list[Component]:
    """With adapters the reference is the model without them, and costs nothing."""
    if not job.has_reference or job.lora:
        return []
    shape, size = job.shape, job.weight_bytes
    if not job.is_reference_offloaded:
        return [_part("reference", shape.num_params * size, "trainer", "frozen copy for the KL")]
    visiting = shape.num_outer_params + shape.num_layer_params
    return [_part("reference", visiting * size, "trainer", "a layer at a time", MICRO)]


def _fresh_gradient_parts(job: Job) -> list[Component]:
    """Gradients in the weights' number format: each is added to its accumulator and freed as soon as it is made.

    The output layer's comes first. Where it is the embedding too, it waits for the embedding's share until the end.
    A compiled layer gives all its gradients at once, an eager one each matrix by itself.
    """
    if job.lora:
        return []
    shape, size = job.shape, job.weight_bytes
    parts = []
    if job.train_layers is None:
        moments: tuple[Moment, ...] = MICRO if shape.is_tied else ("loss",)
        note = "tied: held to the end" if shape.is_tied else "added up, then freed"
        parts.append(_part("output layer's gradient", shape.num_embedding_params * size, "trainer", note, moments))
    layer = shape.num_layer_params if job.is_compiled else max(i * o for i, o in shape.linears.values())
    parts.append(_part("a layer's gradients", layer * size, "trainer", "added up, then freed", ("backward",)))
    return parts


def _engine_parts(job: Job, gpu_bytes: int) -> list[Component]:
    """What is on each engine GPU: weights and keys are divided among them."""
    parts: list[Component] = []
    if job.engine_gpus or job.has_own_engine_copy:
        parts.append(_part("engine's weights", _engine_weights(job), "engine", "a second copy"))
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
        _part("CUDA context", known.CUDA_CONTEXT_BYTES, "engine", "the engine's process"),
    ]


def _engine_weights(job: Job) -> float:
    return job.model_bytes / job.tensor_parallel


def _engine_workspace(job: Job) -> float:
    shape = job.shape
    forward = known.ENGINE_BATCHED_TOKENS * job.weight_bytes * (3 * shape.ffn / job.tensor_parallel + 4 * shape.hidden)
    sampling = known.SAMPLING_COPIES * 4 * job.max_num_seqs * shape.vocab
    return forward + sampling + known.ENGINE_GRAPHS_BYTES


def _beside_cache(job: Job) -> float:
    """What vLLM's share of the card holds besides its KV cache."""
    places = sum(part.bytes for part in _adapter_places(job))
    return _engine_weights(job) + _engine_workspace(job) + known.CUDA_CONTEXT_BYTES + places


def _too_small_share(job: Job, gpu_bytes: int) -> str:
    """Why vLLM would not start with its share of the card; "" if it does."""
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


def _adapter_places(job: Job) -> list[Component]:
    """vLLM keeps room for adapters on every linear layer, whichever of them have one."""
    if not job.lora:
        return []
    rank = lora_rank(job.lora_r)
    one = job.shape.num_layers * rank * sum(map(sum, job.shape.linears.values())) * job.weight_bytes
    num = max_loras(rank)
    return [_part("places for adapters", num * one / job.tensor_parallel, "engine", f"{num} of rank {rank}")]


def _host_parts(job: Job) -> list[Component]:
    num_processes = job.train_gpus + job.tensor_parallel
    others = sum(known.CPU_OTHER_PROCESSES.values())
    parts = [
        _part("processes", num_processes * known.HOST_GPU_PROCESS_BYTES, "both", f"{num_processes} with CUDA"),
        _part("hub and environment", others, "others"),
    ]
    if job.lora and job.gpu_memory_utilization is not None:
        num = max_cpu_loras(lora_rank(job.lora_r))
        parts.append(
            _part("adapters", num * job.num_trained * job.weight_bytes, "engine", f"vLLM keeps the newest {num}")
        )
    if job.optimizer == "adamw_cpu":
        masters, moments = optimizer_bytes(job)
        gradients = job.train_gpus * job.gradient_bytes * job.num_trained  # each process has its own
        parts.append(_part("gradients", gradients, "trainer", "accumulators"))
        parts.append(_part("masters and moments", masters + moments, "trainer", "adamw_cpu keeps them here"))
    if job.has_reference and job.is_reference_offloaded and not job.lora:
        copies = job.train_gpus * job.shape.num_params * job.weight_bytes  # likewise
        parts.append(_part("reference", copies, "trainer", "a frozen copy"))
    return parts


def _cpu(job: Job, capacity: int | None) -> Place:
    """One machine without a GPU: all processes share its memory."""
    torch_processes = 2 * known.CPU_TORCH_PROCESS_BYTES
    growth = known.CPU_KV_GROWTH
    positions = min(job.max_model_len, math.ceil(job.sequence_tokens / growth) * growth)
    cache = known.CPU_KV_COPIES * job.max_num_seqs * positions * kv_bytes_per_token(job)
    sampling = known.SAMPLING_COPIES * 4 * job.max_num_seqs * job.shape.vocab
    parts = [part for part in _trainer_parts(job) if part.name != "CUDA context"]
    if job.optimizer == "adamw_cpu":  # on a CPU that is AdamW
        parts += [part for part in _host_parts(job) if part.name in ("gradients", "masters and moments")]
    if job.has_own_engine_copy:
        parts.append(_part("engine's weights", job.model_bytes, "engine", "a second copy"))
    seen = f"{job.max_num_seqs} x {positions:,} tokens, twice"
    parts += [
        _part("KV cache", cache, "engine", seen),
        _part("sampling", sampling, "engine", "logits of the next tokens"),
        _part("Python and torch", torch_processes, "both", "trainer and engine"),
        _part("hub and environment", sum(known.CPU_OTHER_PROCESSES.values()), "others", "and the launcher"),
    ]
    changing = _transient(parts) + cache + sampling
    parts.append(_part("freed but kept", known.CPU_FREED_BUT_KEPT * changing, "both", "holes that malloc keeps"))
    return Place(HOST, capacity, _listed(parts))


def _gpu(name: str, parts: list[Component], capacity: int, problem: str = "") -> Place:
    gaps = _part("fragmentation", known.FRAGMENTATION * _transient(parts), "both", "gaps between tensors")
    return Place(name, capacity, _listed([*parts, gaps]), problem)


def _transient(parts: list[Component]) -> int:
    """The most that comes and goes."""
    coming_and_going = [part for part in parts if part.is_transient]
    return max(sum(part.bytes for part in coming_and_going if moment in part.moments) for moment in ALL)


def _listed(parts: list[Component]) -> tuple[Component, ...]:
    return tuple(part for part in parts if part.bytes)


def _activations_note(job: Job) -> str:
    is_one_rollout = job.sequence_tokens > job.micro_tokens
    tokens = f"{'one rollout of' if is_one_rollout else 'up to'} {job.tokens_at_once:,} tokens"
    if job.is_checkpointed:
        return f"{tokens}, layer inputs"
    return f"{tokens}, {'compiled' if job.is_compiled else 'eager'}"


def _part(name: str, size: float, owner: Owner, note: str = "", moments: tuple[Moment, ...] = ALL) -> Component:
    return Component(name, round(size), owner, note, moments)
