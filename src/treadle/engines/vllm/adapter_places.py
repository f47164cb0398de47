"""How many adapters vLLM has room for, and of which rank. Pure, and light: `treadle plan` counts them too."""

from __future__ import annotations

from treadle.errors import ConfigError

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those vLLM has kernels for
# Adapters side by side in one batch: the one that serves, and those before it under which long completions still run.
# One more waits for a place, and with it everybody who asks for the newest. Worse, where all places are taken the new
# one takes that of the oldest in use, which takes the next one's at the next token, and so on: one swap copies all of
# them to the GPU once more (75 ms for 8, on an H200). Each place takes memory by its rank.
MAX_LORAS = 16
RANKS_TOGETHER = 256


def lora_rank(wanted: int) -> int:
    """The smallest rank vLLM offers that is enough.

    >>> lora_rank(24)
    32
    """
    enough = [rank for rank in LORA_RANKS if rank >= wanted]
    if not enough:
        raise ConfigError(f"vLLM takes adapters of rank {LORA_RANKS[-1]} at most", fix="lower --max-lora-rank")
    return enough[0]


def max_loras(rank: int) -> int:
    """
    >>> max_loras(16), max_loras(32), max_loras(256)
    (16, 8, 2)
    """
    return max(2, min(MAX_LORAS, RANKS_TOGETHER // rank))


def max_cpu_loras(rank: int) -> int:
    """How many vLLM keeps in host memory, also those that it was told to unload; any other it reads from its files
    again.

    >>> max_cpu_loras(16), max_cpu_loras(256)
    (32, 4)
    """
    return 2 * max_loras(rank)
