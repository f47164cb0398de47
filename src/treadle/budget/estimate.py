"""Estimate the memory of a PlannedJob on a Machine, component by component. Pure.

The tensors that a forward pass keeps for the backward pass are counted for a Llama or Qwen layer. h hidden, q queries
(heads x head_dim), k keys (kv heads x head_dim), f inner width of the MLP; in numbers per token:

    part                  eager                              compiled, Liger's kernels, or lean
    norms (2 a layer)     fp32 input + its scaled copy       the input
    normed inputs         2h: inputs of linear layers        the same
    query/key norms       fp32 input + its scaled copy       the input                     (Qwen3 only)
    query, key, value     q + 2k, after the rotation         the same; k again for each completion of a shared prompt
    attention output      q, and one fp32 number a head      the same
    MLP                   gate, silu, up, product: 4f        gate, up, product: 3f

A frozen weight does not need its input: LoRA drops the normed inputs and the product, and adds the inputs of adapters.
The tests compare these counts with the tensors that torch saves.
"""

from __future__ import annotations

import math

from treadle.budget import hardware
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
    """Components of each trainer GPU: optimizer states are sharded, everything else is replicated."""
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
        _part("CUDA context", hardware.CUDA_CONTEXT_BYTES, "trainer", "the trainer's process"),
    ]


def _state_parts(job: PlannedJob) -> list[Component]:
    """Gradient accumulators and optimizer states that are on the GPU."""
    parts = []
    if job.lora:
        parts.append(_part("adapters", job.num_trained * 4, "trainer", f"fp32, rank {job.lora_r}"))
    if job.optimizer == "adamw_cpu":
        return parts
    masters, moments = optimizer_bytes(job)
    note = "fp32" if job.gradient_bytes == 4 else "bf16"
    # Those of one parameter are never split among GPUs.
    is_largest_trained = not job.lora and job.train_layers is None
    share = max(1 / job.train_gpus, job.shape.num_largest / job.num_trained if is_largest_trained else 0.0)
    states = (
        ("gradients", job.num_trained * job.gradient_bytes, f"{note} accumulators"),
        ("masters", masters * share, "fp32 copy of the weights"),
        ("optimizer moments", moments * share, job.optimizer),
    )
    parts += [_part(name, size, "trainer", text) for name, size, text in states]
    parts.append(_part("optimizer scratch", _step_scratch(job), "trainer", "fp32, a piece at a time", ("step",)))
    return parts


def _step_scratch(job: PlannedJob) -> float:
    """Temporary fp32 copies in the optimizer step: of the largest tensor, and of bf16 gradients piece by piece."""
    if job.lora:  # adapters are small
        return 0
    if job.optimizer == "adamw_8bit":
        return hardware.CHUNK_8BIT_BYTES
    largest = 4 * job.shape.num_largest
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
        return [_part("reference", shape.num_params * size, "trainer", "frozen copy for the KL")]
    visiting = shape.num_outer_params + shape.num_layer_params
    return [_part("reference", visiting * size, "trainer", "a layer at a time", MICRO)]


def _fresh_gradient_parts(job: PlannedJob) -> list[Component]:
    """New gradients in the dtype of the weights: each is added to its accumulator and freed at once.

    The gradient of the output layer comes first; if it is tied to the embedding, it exists until the end. A compiled
    layer returns all its gradients together, an eager one matrix by matrix.
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


def _engine_parts(job: PlannedJob, gpu_bytes: int) -> list[Component]:
    """Components of each engine GPU: weights and KV cache are split among the GPUs."""
    parts: list[Component] = []
    if job.mode != "single-copy":
        parts.append(_part("engine's weights", job.model_bytes / job.tensor_parallel, "engine", "a second copy"))
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
        gradients = job.train_gpus * job.gradient_bytes * job.num_trained  # one set per process
        parts.append(_part("gradients", gradients, "trainer", "accumulators"))
        parts.append(_part("masters and moments", masters + moments, "trainer", "adamw_cpu keeps them here"))
    if job.has_reference and job.is_reference_offloaded and not job.lora:
        copies = job.train_gpus * job.shape.num_params * job.weight_bytes  # one per process
        parts.append(_part("reference", copies, "trainer", "a frozen copy"))
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


# ---- activations

_FP32 = 4
# The input of each linear layer: layers with the same word read the same tensor.
_READERS = {
    "q_proj": "attention", "k_proj": "attention", "v_proj": "attention",
    "gate_proj": "mlp", "up_proj": "mlp", "o_proj": "output", "down_proj": "product",
}  # fmt: skip


def kept_per_layer(job: PlannedJob) -> dict[str, float]:
    """Bytes per token that one layer keeps, by part."""
    shape, size = job.shape, job.weight_bytes
    widths = shape.query_width + shape.kv_width
    is_fused = job.is_compiled or job.has_liger or job.is_lean
    # The scaled copy of the input is kept for the gradient of the norm's weight.
    norm = size if is_fused else _FP32 + (0 if job.lora else size)
    mlp = (2 if job.lora else 3) if is_fused else (3 if job.lora else 4)
    if job.has_block_attention:  # dense blocks keep every probability
        repeated_keys, kept_scores = 1.0, float(job.sequence_tokens)
    else:  # fused attention gathers the keys of a shared prompt for every completion, and keeps one number per query
        repeated_keys, kept_scores = job.sequence_tokens / job.tokens_per_completion, 1.0
    return {
        "norms": 2 * (norm * shape.hidden + _FP32),
        "normed inputs": 0 if job.lora else 2 * size * shape.hidden,
        "query and key norms": shape.has_qk_norm * (norm * widths + _FP32 * (shape.num_heads + shape.num_kv_heads)),
        "query, key, value": size * (shape.query_width + 2 * shape.kv_width * repeated_keys),
        "attention output": size * shape.query_width,
        "attention weights": _FP32 * shape.num_heads * kept_scores,
        "mlp": mlp * size * shape.ffn,
        "adapters": _adapters(job) if job.lora else 0,
    }


def kept_bytes(job: PlannedJob) -> float:
    """Activations of a micro-batch; with checkpointing only the input of each layer."""
    shape = job.shape
    last_norm = (_FP32 + 2 * job.weight_bytes) * shape.hidden
    layer = job.weight_bytes * shape.hidden if job.is_checkpointed else sum(kept_per_layer(job).values())
    chosen = job.train_layers
    num_layers = shape.num_layers - (min(chosen) if chosen else 0)  # the backward pass ends at the first trained one
    return job.tokens_at_once * (num_layers * layer + last_norm)


def backward_bytes(job: PlannedJob) -> float:
    """Temporary memory in the backward pass of one layer: gradients, and with checkpointing recomputed tensors."""
    shape = job.shape
    gradients = job.weight_bytes * (
        hardware.BACKWARD_FFN_TENSORS * shape.ffn + hardware.BACKWARD_HIDDEN_TENSORS * shape.hidden
    )
    recomputed = sum(kept_per_layer(job).values()) if job.is_checkpointed else 0
    return job.tokens_at_once * (gradients + recomputed)


def logits_bytes(job: PlannedJob) -> float:
    """One chunk of the logits of every loss token, and the hidden states of these tokens."""
    entries = min(job.logprob_chunk, job.shape.vocab) * hardware.LOGITS_BYTES_PER_ENTRY
    return job.loss_tokens * (entries + hardware.HIDDEN_BYTES_AT_LOSS * job.shape.hidden)


def _adapters(job: PlannedJob) -> float:
    """fp32 inputs of the adapters, and the tensors between their two matrices.

    In eager mode every adapter copies its input to fp32; compiled, adapters with the same input share the copy.
    """
    inputs = {name: job.shape.linears[name][0] for name in job.lora_targets}
    copies = {_READERS[name]: width for name, width in inputs.items()} if job.is_compiled else inputs
    return _FP32 * (job.lora_r * len(inputs) + sum(copies.values()))
