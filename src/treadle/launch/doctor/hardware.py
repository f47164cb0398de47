"""Processors, memory, disks, limits, ports and clock. Pure: facts -> checks."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass

from treadle.formatting import gigabytes
from treadle.launch.doctor.finding import Check

ONE_GB = 1e9
MANY_FILES = 65_536
SPARE_FILES = 100  # the database, logs, pipes, libraries
EARLIEST_YEAR = 2026
MAX_SKEW_S = 5.0


def check_cpu(num_cores: int, flags: frozenset[str], *, has_gpu: bool) -> Check:
    """Without bf16 units a run on it is in float32 (processor.py): slower; that is worth knowing before a long one."""
    name = f"{num_cores} core{'s' if num_cores != 1 else ''}, {platform.machine()}"
    if "amx_bf16" in flags:
        return Check("CPU", "ok", f"{name}, AMX (fast bf16)")
    if "avx512_bf16" in flags:
        return Check("CPU", "ok", f"{name}, AVX-512 with bf16")
    if "bf16" in flags:
        return Check("CPU", "ok", f"{name}, with bf16")
    found = f"{name}, {'AVX-512 ' if 'avx512f' in flags else ''}without bf16"
    if has_gpu:
        return Check("CPU", "ok", found)
    slow = "nothing need be done: weights are float32 here by default, which takes longer and twice the memory for them"
    return Check("CPU", "warning", found, slow)


def check_memory(available: float, total: float) -> Check:
    found = f"{gigabytes(available)} of {gigabytes(total)} free"
    if available < 3 * ONE_GB:
        return Check("memory", "problem", found, "end other programs; the default job takes up to 6 GB")
    if available < 6 * ONE_GB:
        return Check("memory", "warning", found, "the default job takes up to 6 GB; treadle plan says what yours does")
    return Check("memory", "ok", found)


def check_disk(name: str, place: str, free: float, *, trouble: str = "") -> Check:
    """`trouble`: why nothing could be written there."""
    if trouble:
        return Check(name, "problem", f"{place} cannot be written: {trouble}", "choose another folder with --output")
    found = f"{gigabytes(free)} free at {place}"
    if free < 2 * ONE_GB:
        return Check(name, "problem", found, "free some space, or choose another disk with --output")
    if free < 5 * ONE_GB:
        return Check(name, "warning", found, "the default job may need 5 GB")
    return Check(name, "ok", found)


def check_shared_memory(place: str, free: float | None) -> Check:
    """`free` None: there is none."""
    name = "shared memory"
    if free is None:
        return Check(name, "warning", f"no {place}", "nothing need be done: weights are shared through the run folder")
    found = f"{gigabytes(free)} free in {place}"
    if free < ONE_GB:
        remedy = "docker run --shm-size 4g (or more than the model's weights), or --engine.weights-file on a fast disk"
        return Check(name, "warning", found, remedy)
    return Check(name, "ok", found)


def check_file_limit(soft: int, hard: int, max_connections: int) -> Check:
    """Every connection to the hub is an open file, and an environment has one for each call in flight."""
    name, needed = "open files", max_connections + SPARE_FILES
    found = f"{soft} for a process; the hub takes up to {max_connections} connections"
    if soft >= needed:
        return Check(name, "ok", found)
    if hard >= needed:
        return Check(name, "warning", found, f"ulimit -n {min(hard, MANY_FILES)}")
    remedy = f"raise the hard limit ({hard}): docker run --ulimit nofile={MANY_FILES}, or /etc/security/limits.conf"
    return Check(name, "warning", found, remedy)


def check_ports(wished: Mapping[str, int], taken_by: Mapping[int, str]) -> list[Check]:
    """`taken_by`: who has a port that is in use, as far as that is told."""

    def check(name: str, port: int) -> Check:
        if port in taken_by:
            owner = f" by {taken_by[port]}" if taken_by[port] else ""
            remedy = f"treadle run takes another by itself; treadle {name} needs --port"
            return Check(f"port of the {name}", "warning", f"{port} is in use{owner}", remedy)
        return Check(f"port of the {name}", "ok", f"{port} is free")

    return [check(name, port) for name, port in wished.items()]


@dataclass(frozen=True)
class ClockFacts:
    year: int
    skew_s: float | None  # time of a file written now, minus our time; None: none could be written


def check_clock(facts: ClockFacts) -> Check:
    """A wrong year breaks certificates; a disk with a clock of its own breaks whatever compares times of files."""
    if facts.year < EARLIEST_YEAR:
        return Check("clock", "problem", f"the year is {facts.year}", "timedatectl set-ntp true")
    if facts.skew_s is not None and abs(facts.skew_s) > MAX_SKEW_S:
        found = f"files written now are dated {abs(facts.skew_s):.0f} s {'ahead' if facts.skew_s > 0 else 'behind'}"
        return Check("clock", "warning", found, "timedatectl set-ntp true here and on the machine of the disk")
    told = "not compared with the disk's" if facts.skew_s is None else f"{abs(facts.skew_s):.2f} s from the disk's"
    return Check("clock", "ok", f"{facts.year}, {told}")
