"""Memory sizes of GPUs and of this machine, and every constant of the estimate that was measured or chosen.

Correct a prediction here and nowhere else. Parameters (shapes.py) and the tensors that a layer keeps (estimate.py) are
counted exactly; the tests compare both with transformers and torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from treadle.config.load import suggest
from treadle.errors import ConfigError
from treadle.gpus import find_gpus

# --- bytes of optimizer state per trained parameter ------------------------------------------------------------------
# From the formats: fp32 numbers take 4 bytes, 8-bit moments 1 byte each plus fp32 scales per block of 256.
MASTER_BYTES = 4.0
MOMENT_BYTES = 4.0
MOMENTS_8BIT_BYTES = 2.03
FACTORED_BYTES = 0.01  # a row and a column instead of a matrix

# --- scratch of an optimizer step ---------------------------------------------------------------------------------
# AdamW runs fused, in place. Adafactor and Muon make fp32 copies of one tensor at a time, 8-bit AdamW of one chunk.
STEP_COPIES = {"adafactor": 1, "muon": 2}
CHUNK_8BIT_BYTES = 12 * 4 * 2**24  # twelve fp32 tensors of a chunk (train/adamw_8bit.py)
PIECE_BYTES = 256 * 2**20  # bf16 gradients are converted to fp32 a piece at a time (train/optimizer.py)

# --- the loss -----------------------------------------------------------------------------------------------------
# Counted from train/logprobs.py: two chunks' fp32 logits and one bf16 gradient exist side by side.
LOGITS_BYTES_PER_ENTRY = 10
HIDDEN_BYTES_AT_LOSS = 8  # per hidden number of a loss token: gathered hidden state, fp32 gradient, its bf16 copy

# --- the backward pass of one layer, in tensors of the weights' number format ----------------------------------------
# Gradients of activations that exist side by side at the worst place, which is the middle of the MLP.
BACKWARD_FFN_TENSORS = 3
BACKWARD_HIDDEN_TENSORS = 4

# --- memory outside of tensors ---------------------------------------------------------------------------------------
CUDA_CONTEXT_BYTES = 550_000_000  # per process: context, kernels and cuBLAS workspaces on data-centre GPUs
# Share of transient memory: torch's caching allocator rounds up and leaves gaps. On an H200 (bench/memory.py) this
# predicts reserved memory within 2 % for full fine-tuning; with LoRA it reserved 12.8 GB more, on a GPU with free room.
FRAGMENTATION = 0.05

# --- several trainer ranks (torch's FSDP2) ----------------------------------------------------------------------------
WHOLE_LAYERS = 2  # one computes, the next one is being gathered
REDUCE_BYTES = 4  # gradients are summed over the ranks in fp32
PUBLISH_BUCKET_BYTES = 256 * 2**20  # of weights on their way to the engine (sync/process_group.py)

# --- the engine ------------------------------------------------------------------------------------------------------
ENGINE_BATCHED_TOKENS = 8192  # tokens that vLLM prefills at once
ENGINE_GRAPHS_BYTES = 800_000_000  # CUDA graphs of the decode steps
SAMPLING_COPIES = 3  # fp32 copies of the sampled logits

# --- a CPU machine; measured on the default job (5.31 GB, all processes, micros of up to 1,097 tokens) ----------------
CPU_TORCH_PROCESS_BYTES = 350_000_000  # Python with torch and transformers: 0.34 to 0.36 GB with a tiny model
CPU_OTHER_PROCESSES = {"hub": 40_000_000, "environment": 80_000_000, "launcher": 50_000_000}
# Share of transient memory that malloc does not return: after 45 steps of changing sizes trainer and engine hold more
# than their tensors need at once. With it, a plan for the longest possible completions is 9 % above that measurement.
CPU_FREED_BUT_KEPT = 0.5
CPU_KV_COPIES = 2  # rows that join the running ones are copied together with them
CPU_KV_GROWTH = 16  # positions by which the cache grows

# --- host memory beside GPUs -----------------------------------------------------------------------------------------
HOST_GPU_PROCESS_BYTES = 3_000_000_000  # Python, torch and the CUDA libraries, with pinned buffers

# --- the verdict -----------------------------------------------------------------------------------------------------
SAFE_SHARE = 0.95  # of the capacity; above it the verdict is tight, because predictions are off by some per cent

# --- prompts of the built-in environments, in tokens, with the chat template of the default model --------------------
BUILT_IN_PROMPT_TOKENS = {"arithmetic": 48, "echo": 48}

# --- GPUs and this machine -----------------------------------------------------------------------------------------
_GIB = 2**30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
# Usable memory as the driver reports it; the size in a product name is rounded.
_USABLE_GIB = {
    "t4": 14.6,
    "v100-32gb": 31.7,
    "rtx3090": 23.6,
    "rtx4090": 23.5,
    "rtx5090": 31.3,
    "l4": 22.0,
    "a10g": 22.0,
    "a6000": 47.4,
    "l40s": 44.4,
    "a100-40gb": 39.4,
    "a100-80gb": 79.2,
    "h100": 79.1,
    "h100-nvl": 93.0,
    "gh200": 94.5,
    "h200": 139.8,
    "b200": 178.3,
    "mi300x": 191.9,
    "mi325x": 255.9,
}
_IGNORED_WORDS = frozenset(
    [
        "nvidia",
        "geforce",
        "tesla",
        "amd",
        "instinct",
        "pcie",
        "sxm",
        "sxm2",
        "sxm4",
        "sxm5",
        "hbm2",
        "hbm2e",
        "hbm3",
        "hbm3e",
    ]
)
_ROUNDING = 0.1  # of a size in a name: an "L4 24GB" has 22.0 GiB
CARDS: dict[str, int] = {name: round(gib * _GIB) for name, gib in _USABLE_GIB.items()}


@dataclass(frozen=True)
class Machine:
    """`gpu_bytes`: memory of one GPU, None to train on the CPU. `host_bytes` None: unknown. `num_gpus` None: as many as
    the job needs."""

    name: str
    gpu_bytes: int | None
    host_bytes: int | None
    num_gpus: int | None = None

    @property
    def has_gpu(self) -> bool:
        return self.gpu_bytes is not None


def card_bytes(name: str) -> int:
    """The memory of a GPU by its name, as users and the driver write it.

    >>> card_bytes("H100") == card_bytes("NVIDIA H100 80GB HBM3") == card_bytes("h100-80gb")
    True
    """
    words = [word for word in re.split(r"[\s_-]+", name.lower()) if word and word not in _IGNORED_WORDS]
    size = next((word for word in words if re.fullmatch(r"\d+gi?b", word)), "")
    plain = "".join(word for word in words if word != size)
    gib = 0 if plain == "gh200" else int(re.sub(r"\D", "", size) or 0)  # its name contains the size of host memory
    for card, known in CARDS.items():
        squeezed = card.replace("-", "")
        if squeezed == f"{plain}{gib}gb":
            return known
        fits = not gib or abs(known / _GIB - gib) < _ROUNDING * gib
        if fits and squeezed in (plain, f"rtx{plain}", plain.removeprefix("rtx")):
            return known
    variants = [card for card in CARDS if card.partition("-")[0] == plain]
    hint = f"known are {', '.join(variants)}" if variants else suggest(plain, CARDS) or "known: " + ", ".join(CARDS)
    raise ConfigError(f"the GPU '{name}' is not known", fix=f"{hint}; or give --gpu-memory-gb {gib or 'GB'}")


def parse_cards(text: str) -> tuple[int | None, str, int]:
    """(number of GPUs, or None if only one name is given; name; memory of one) of `--gpu`.

    >>> parse_cards("8xH100")
    (8, 'H100', 84932978278)
    >>> parse_cards("2x80gb")
    (2, 'a GPU of 80 GB', 80000000000)
    """
    count, name = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(.*)", text.strip()).groups()  # type: ignore[union-attr]
    if count is not None and int(count) < 1:
        raise ConfigError(f"'{text}' is no number of GPUs", fix="write for example 8xh100")
    size = re.fullmatch(r"([\d.]+)\s*gi?b", name.lower())
    num_gpus = None if count is None else int(count)
    if size is not None:
        return num_gpus, f"a GPU of {size[1]} GB", round(float(size[1]) * 1e9)
    return num_gpus, name, card_bytes(name)


def find_gpu() -> tuple[str, int] | None:
    """(name, bytes) of the first NVIDIA GPU that this process sees."""
    gpus = find_gpus(os.environ)
    return (gpus[0].name, gpus[0].num_bytes) if gpus and gpus[0].num_bytes else None


def host_memory() -> int:
    """Memory that this process may use: that of the machine, or the limit of its container if that is lower."""
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return total
