"""What a forward pass keeps for the backward pass, counted operation by operation for a Llama or Qwen layer.

h hidden, q queries (heads x head_dim), k keys (kv heads x head_dim), f inner width of the MLP; in units of numbers:

    part                  eager                              compiled, Liger's kernels, or lean
    norms (2 a layer)     fp32 input + its scaled copy       the input
    normed inputs         h, twice: what linear layers read  the same
    query/key norms       fp32 input + its scaled copy       the input                     (Qwen3 only)
    query, key, value     q + 2k, after the rotation         the same; k more often where prompts are shared
    attention output      q, and one fp32 number a head      the same
    MLP                   gate, silu, up, product: 4f        gate, up, product: 3f

A frozen weight needs no input of its own: with LoRA, normed inputs and the product go, and what adapters read comes.
The tests hold these counts against the tensors that torch really saves.
"""

from __future__ import annotations

from treadle.launch.budget import calibration
from treadle.launch.budget.job import Job

_FP32 = 4
# What each linear layer reads: those with the same word read the same tensor.
_READERS = {
    "q_proj": "attention", "k_proj": "attention", "v_proj": "attention",
    "gate_proj": "mlp", "up_proj": "mlp", "o_proj": "output", "down_proj": "product",
}  # fmt: skip


def kept_per_layer(job: Job) -> dict[str, float]:
    """Bytes per token that one layer keeps, by part."""
    shape, size = job.shape, job.weight_bytes
    widths = shape.query_width + shape.kv_width
    is_fused = job.is_compiled or job.has_liger or job.is_lean
    # The scaled copy of a norm's input is kept for the gradient of the norm's weight.
    norm = size if is_fused else _FP32 + (0 if job.lora else size)
    mlp = (2 if job.lora else 3) if is_fused else (3 if job.lora else 4)
    return {
        "norms": 2 * (norm * shape.hidden + _FP32),
        "normed inputs": 0 if job.lora else 2 * size * shape.hidden,
        "query and key norms": shape.has_qk_norm * (norm * widths + _FP32 * (shape.num_heads + shape.num_kv_heads)),
        "query, key, value": size * (shape.query_width + 2 * shape.kv_width * job.keys_per_token),
        "attention output": size * shape.query_width,
        "attention weights": _attention_weights(job),
        "mlp": mlp * size * shape.ffn,
        "adapters": _adapters(job) if job.lora else 0,
    }


def kept_bytes(job: Job) -> float:
    """All that a micro keeps; with checkpointing only the input of each layer."""
    shape = job.shape
    last_norm = (_FP32 + 2 * job.weight_bytes) * shape.hidden
    layer = job.weight_bytes * shape.hidden if job.is_checkpointed else sum(kept_per_layer(job).values())
    return job.tokens_at_once * (job.num_backward_layers * layer + last_norm)


def backward_bytes(job: Job) -> float:
    """What exists besides while one layer's backward runs: gradients, and with checkpointing its recomputed tensors."""
    shape = job.shape
    gradients = job.weight_bytes * (
        calibration.BACKWARD_FFN_TENSORS * shape.ffn + calibration.BACKWARD_HIDDEN_TENSORS * shape.hidden
    )
    recomputed = sum(kept_per_layer(job).values()) if job.is_checkpointed else 0
    return job.tokens_at_once * (gradients + recomputed)


def logits_bytes(job: Job) -> float:
    """One chunk of the logits of every loss token, and those tokens' hidden states."""
    entries = min(job.logprob_chunk, job.shape.vocab) * calibration.LOGITS_BYTES_PER_ENTRY
    return job.loss_tokens * (entries + calibration.HIDDEN_BYTES_AT_LOSS * job.shape.hidden)


def _attention_weights(job: Job) -> float:
    """Fused attention keeps one number a query; dense blocks keep every probability, in fp32."""
    keys = job.sequence_tokens if job.has_block_attention else 1
    return _FP32 * job.shape.num_heads * keys


def _adapters(job: Job) -> float:
    """fp32 inputs of the adapters, and what stands between their two matrices.

    Eager, every adapter copies its input to fp32; compiled, those that read the same tensor share the copy.
    """
    inputs = {name: job.shape.linears[name][0] for name in job.lora_targets}
    copies = {_READERS[name]: width for name, width in inputs.items()} if job.is_compiled else inputs
    return _FP32 * (job.lora_r * len(inputs) + sum(copies.values()))
