"""Every constant that was measured or chosen rather than counted. Correct a prediction here and nowhere else.

Counted, and so not here: parameters (shapes.py) and the tensors that a layer keeps (activations.py). Both are compared
with transformers and torch themselves by the tests.
"""

from __future__ import annotations

# --- bytes of optimizer state per trained parameter ------------------------------------------------------------------
# From the formats themselves: fp32 numbers are 4 bytes, 8-bit moments 1 byte each plus fp32 scales per block of 256.
MASTER_BYTES = 4.0
MOMENT_BYTES = 4.0
MOMENTS_8BIT_BYTES = 2.03
FACTORED_BYTES = 0.01  # a row and a column instead of a matrix

# --- scratch of an optimizer step ---------------------------------------------------------------------------------
# AdamW runs fused, in place. Adafactor and Muon make fp32 copies of one tensor at a time, 8-bit AdamW of one chunk.
STEP_COPIES = {"adafactor": 1, "muon": 2}
CHUNK_8BIT_BYTES = 12 * 4 * 2**24  # twelve fp32 tensors of a chunk (train/optim/eight_bit.py)
PIECE_BYTES = 256 * 2**20  # bf16 gradients are turned to fp32 a piece at a time (train/optim/optimizer.py)

# --- the loss -----------------------------------------------------------------------------------------------------
# Counted from train/logprobs.py: two chunks' fp32 logits and one bf16 gradient exist side by side.
LOGITS_BYTES_PER_ENTRY = 10
HIDDEN_BYTES_AT_LOSS = 8  # per hidden number of a loss token: gathered hidden state, fp32 gradient, its bf16 copy

# --- the backward pass of one layer, in tensors of the weights' number format ----------------------------------------
# Gradients of activations that exist side by side at the worst place, which is the middle of the MLP.
BACKWARD_FFN_TENSORS = 3
BACKWARD_HIDDEN_TENSORS = 4

# --- what no tensor accounts for -------------------------------------------------------------------------------------
CUDA_CONTEXT_BYTES = 550_000_000  # per process: context, kernels and cuBLAS workspaces on data-centre GPUs
# Of what comes and goes; torch's caching allocator rounds up and leaves gaps. On an H200 (bench/memory.py) this gives
# what it held to 2 % with whole models; with LoRA it held 12.8 GB more, on a card with room to spare.
FRAGMENTATION = 0.05

# --- the engine ------------------------------------------------------------------------------------------------------
ENGINE_BATCHED_TOKENS = 8192  # tokens that vLLM prefills at once
ENGINE_GRAPHS_BYTES = 800_000_000  # CUDA graphs of the decode steps
SAMPLING_COPIES = 3  # fp32 copies of the sampled logits

# --- a CPU machine; measured on the default job (5.31 GB, all processes, micros of up to 1,097 tokens) ----------------
CPU_TORCH_PROCESS_BYTES = 350_000_000  # Python with torch and transformers: 0.34 to 0.36 GB with a tiny model
CPU_OTHER_PROCESSES = {"hub": 40_000_000, "environment": 80_000_000, "launcher": 50_000_000}
# What comes and goes leaves holes that malloc keeps: after 45 steps of changing sizes trainer and engine hold more than
# their tensors need at once. With this, a plan for the longest completions there can be is 9 % above that measurement.
CPU_FREED_BUT_KEPT = 0.5
CPU_KV_COPIES = 2  # rows that join the running ones are copied together with them
CPU_KV_GROWTH = 64  # positions by which the cache grows

# --- host memory beside GPUs -----------------------------------------------------------------------------------------
HOST_GPU_PROCESS_BYTES = 3_000_000_000  # Python, torch and the CUDA libraries, with pinned buffers

# --- the verdict -----------------------------------------------------------------------------------------------------
SAFE_SHARE = 0.95  # of a card; beyond it a plan is called tight, because predictions are off by some per cent

# --- prompts of the built-in environments, in tokens, with the chat template of the default model --------------------
BUILT_IN_PROMPT_TOKENS = {"arithmetic": 48, "echo": 48}
