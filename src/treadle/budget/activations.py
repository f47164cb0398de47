"""Count the activations of a micro-batch: what a forward pass keeps, and temporary memory. Pure.

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

from treadle.budget import hardware
from treadle.budget.job import PlannedJob

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
        # Inputs and outputs of the experts, a copy for each that a token uses.
        "routed tokens": 2 * size * shape.hidden * shape.experts_per_token,
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
