"""What this machine's processor can do."""

from __future__ import annotations

import functools
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_FLAG_LINES = ("flags", "Features")  # as Linux calls them on x86 and on ARM
# Processors that multiply bf16 numbers by themselves. On others torch takes detours, on some hundreds of times as long
# as for float32.
FAST_BF16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})


@functools.cache
def processor_flags() -> frozenset[str]:
    """None where the system does not tell, as on a Mac."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith(_FLAG_LINES)), "").split())


def fast_dtype(device: str) -> str:
    """The number format to serve and train in where nobody names one."""
    is_slow = device.partition(":")[0] == "cpu" and not FAST_BF16 & processor_flags()
    return "float32" if is_slow else "bfloat16"
