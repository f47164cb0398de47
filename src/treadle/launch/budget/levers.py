"""What would make a job fit: combinations of settings, the least harmful first. Pure.

Every lever has a price in harm, a number without a unit that only orders the answers:

    fewer tokens at once, a reference in host memory     slower by a little
    fewer sequences at once in the engine                slower generation
    gradient checkpointing                               a third more time
    gradients in bf16, 8-bit or factored moments         rounding, another optimizer
    the optimizer in host memory                         the same result, much slower steps
    adapters                                             another, smaller training
    adapters on a model in 4 bits                        rounding besides, and slower steps
    a GPU for the engine, more GPUs                      another machine; several trainer processes, started by hand
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

from treadle.errors import ConfigError
from treadle.launch.budget.accounting import estimate
from treadle.launch.budget.cards import Machine
from treadle.launch.budget.job import Job
from treadle.launch.budget.result import Budget, Verdict

Accepts = Callable[[tuple[str, ...]], bool]
MAX_SUGGESTIONS = 4
_MORE_GPUS = (2, 4, 8, 16, 32)
_SMALLEST_MICRO = {True: 2048, False: 256}  # by whether there is a GPU: below, a GPU is mostly idle
_MICRO_STEP = 256


@dataclass(frozen=True)
class Suggestion:
    """Flags to add to the command, and the budget that they give."""

    flags: tuple[str, ...]
    harm: float
    budget: Budget

    @property
    def command(self) -> str:
        return " ".join(self.flags)


@dataclass(frozen=True)
class _Move:
    """One change of the job: the fields it sets, the flags that set them, and its price."""

    fields: tuple[tuple[str, object], ...] = ()
    flags: tuple[str, ...] = ()
    harm: float = 0.0


_STAY = _Move()
NF4_BASE = ("--train.weight-bridge-mode lora_only", "--train.base-quantization nf4")
SHARED_BASE = ("--train.weight-bridge-mode lora_only", "--train.single-copy true")  # one copy of a frozen base model


def engine_on_its_own_card(*, is_broadcast: bool) -> tuple[str, ...]:
    """Flags for two GPUs; `is_broadcast`: weights that would be shared on one GPU have to be sent."""
    devices = ("--engine.device cuda:1", "--train.device cuda:0")
    return (*devices, "--train.use-shared-memory true") if is_broadcast else devices


def take_less(
    job: Job, machine: Machine, most: Mapping[str, int], accepts: Accepts = lambda _: True
) -> list[Suggestion]:
    """The least harmful combination for each way of training that fits here and takes at most so many bytes of each of
    these places, best first. `accepts` says whether a run can have these flags."""
    found = [_least_harm(job, machine, way, most) for way in _ways(job, machine)]
    as_placed = [s for s in found if s is not None and _placing(s.budget.job) == _placing(job) and accepts(s.flags)]
    return sorted(as_placed, key=lambda suggestion: suggestion.harm)[:MAX_SUGGESTIONS]


def suggest(job: Job, machine: Machine, accepts: Accepts = lambda _: True) -> list[Suggestion]:
    """The least harmful combination for each way of training (optimizer, adapters, place of the GPUs), best first, of
    those whose flags a run `accepts`.

    What fits safely on these GPUs comes first, then what is only tight as they are placed now, then larger machines.
    """
    found = [best for way in _ways(job, machine) if (best := _least_harm(job, machine, way)) is not None]
    ways = sorted((s for s in found if accepts(s.flags)), key=lambda suggestion: suggestion.harm)
    here = [s for s in ways if _num_gpus(s.budget.job) == _num_gpus(job)]
    safe = [s for s in here if _is_safe(s.budget.verdict)]
    more = [s for s in ways if _num_gpus(s.budget.job) > _num_gpus(job) and _is_safe(s.budget.verdict)]
    as_placed = [s for s in here if s.budget.job.train_gpus == job.train_gpus]
    tight = [] if any(_is_safe(s.budget.verdict) for s in as_placed) else as_placed[:2]
    return [*safe[:MAX_SUGGESTIONS], *tight, *_smallest_machines(more)]


def largest_micro_tokens(job: Job, machine: Machine) -> int | None:
    """The most tokens a micro can have so that the job still fits safely; None when not even one sequence does."""

    def fits(micro_tokens: int) -> bool:
        return _is_safe(estimate(replace(job, micro_tokens=micro_tokens), machine).verdict)

    low = -(-job.sequence_tokens // _MICRO_STEP)
    if not fits(low * _MICRO_STEP):
        return None
    high = low
    while high < 2**16 and fits(2 * high * _MICRO_STEP):
        high *= 2
    low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * _MICRO_STEP) else (low, middle)
    return low * _MICRO_STEP


def _ways(job: Job, machine: Machine) -> Iterator[_Move]:
    """How to train at all; each gets its own best combination of the smaller levers."""
    kinds = [_STAY, *_optimizers(job, machine)]
    if not job.lora and job.train_layers is None:
        kinds.append(_Move((("lora", True), ("mode", "lora")), ("--train.lora true",), 10))
    is_shared_base = job.lora and job.mode == "single-copy"
    is_one_card = (job.train_gpus, job.engine_gpus) == (1, 0)
    can_quantize = machine.has_gpu and is_one_card and job.train_layers is None and not is_shared_base
    if can_quantize and job.base_quantization == "none":
        fields = (("lora", True), ("mode", "lora"), ("base_quantization", "nf4"))
        flags = NF4_BASE if job.lora else ("--train.lora true", *NF4_BASE)
        kinds.append(_Move(fields, flags, 3.0 if job.lora else 13.0))
    yield from kinds
    if job.train_layers is None and is_one_card and not is_shared_base:
        flags = SHARED_BASE if job.lora else ("--train.lora true", *SHARED_BASE)
        yield _Move((("lora", True), ("mode", "single-copy")), flags, 0.25 if job.lora else 9.75)
    if not machine.has_gpu:
        return
    for kind, placing in product(kinds, _placings(job)):
        is_lora = job.lora or ("lora", True) in kind.fields
        mode = "lora" if is_lora else "two-copies" if job.mode == "single-copy" else job.mode
        yield _Move(
            (*kind.fields, *placing.fields, ("mode", mode)), (*kind.flags, *placing.flags), kind.harm + placing.harm
        )


def _placings(job: Job) -> Iterator[_Move]:
    """Other places for the GPUs: the engine gets one of its own, some of the engine's go to the trainer, or the trainer
    gets more."""
    if job.engine_gpus == 0 and job.train_gpus == 1:
        # treadle run starts it, unlike several trainers
        yield _Move((("engine_gpus", 1),), engine_on_its_own_card(is_broadcast=job.is_shared_vllm), 30.0)
    for engine_gpus in range(1, job.engine_gpus):
        train_gpus = job.train_gpus + job.engine_gpus - engine_gpus
        flags = (f"--train-gpus {train_gpus}", f"--engine-gpus {engine_gpus}")
        yield _Move((("train_gpus", train_gpus), ("engine_gpus", engine_gpus)), flags, 1.0 + train_gpus / 10)
    for train_gpus in _MORE_GPUS:
        if train_gpus > job.train_gpus:
            yield _Move((("train_gpus", train_gpus),), (f"--train-gpus {train_gpus}",), 20.0 * train_gpus)


def _optimizers(job: Job, machine: Machine) -> list[_Move]:
    if job.lora:
        return []
    prices = {"adamw_8bit": 4.0, "adafactor": 5.0} | ({"adamw_cpu": 8.0} if machine.has_gpu else {})
    if job.optimizer != "adamw":
        prices.pop(job.optimizer, None)
    return [_Move((("optimizer", n),), (f"--train.optimizer {n}",), harm) for n, harm in prices.items()]


def _least_harm(
    job: Job, machine: Machine, way: _Move, most: Mapping[str, int] = MappingProxyType({})
) -> Suggestion | None:
    """The cheapest combination of the smaller levers that fits; a tight one when none fits safely."""
    tight: Suggestion | None = None
    for moves in sorted(product(*_small_levers(job, machine)), key=lambda moves: sum(move.harm for move in moves)):
        chosen = (way, *moves)
        try:
            changed = replace(job, **dict(field for move in chosen for field in move.fields))  # type: ignore[arg-type]
        except ConfigError:  # so many GPUs do not divide the heads
            return None
        budget = estimate(changed, machine)
        if budget.verdict == "does not fit" or any(p.peak > most.get(p.name, p.peak) for p in budget.places):
            continue
        flags = tuple(flag for move in chosen for flag in move.flags)
        suggestion = Suggestion(flags, sum(move.harm for move in chosen), budget)
        if _is_safe(budget.verdict):
            return suggestion
        tight = tight or suggestion
    return tight


def _small_levers(job: Job, machine: Machine) -> list[list[_Move]]:
    smallest = max(_SMALLEST_MICRO[machine.has_gpu], job.sequence_tokens)
    checkpointing = _Move((("is_checkpointed", True),), ("--train.gradient-checkpointing true",), 1)
    bf16 = _Move((("gradient_bytes", 2),), ("--train.gradient-dtype bfloat16",), 2)
    offload = _Move((("is_reference_offloaded", True),), ("--train.reference-offload true",), 0.5)
    can_offload = machine.has_gpu and job.has_reference and not job.is_reference_offloaded
    return [
        [_STAY] if job.is_checkpointed else [_STAY, checkpointing],
        [_STAY, *_halvings(job.micro_tokens, smallest, "micro_tokens", "--train.micro-tokens", price=0.5)],
        [_STAY, offload] if can_offload else [_STAY],
        [_STAY] if job.gradient_bytes == 2 else [_STAY, bf16],
        [_STAY, *_other_caches(job)],
    ]


def _other_caches(job: Job) -> list[_Move]:
    """Other sizes of the engine's share: smaller to leave room for the trainer, larger if the engine does not fit."""
    share = job.gpu_memory_utilization
    if share is None:
        return _halvings(job.max_num_seqs, job.group_size, "max_num_seqs", "--engine.max-num-seqs", price=0.75)
    return [
        _Move((("gpu_memory_utilization", other),), (f"--engine.gpu-memory-utilization {other:g}",), 1.0 + n / 2)
        for step in (-0.1, 0.1)
        for n in range(9)
        if 0.1 <= (other := round(share + (n + 1) * step, 2)) <= 0.95
    ]


def _halvings(value: int, smallest: int, field: str, flag: str, *, price: float) -> list[_Move]:
    """Half, a quarter, ..., and not below the smallest."""
    moves: list[_Move] = []
    while value // 2 >= smallest:
        value //= 2
        moves.append(_Move(((field, value),), (f"{flag} {value}",), price * (len(moves) + 1)))
    return moves


def _smallest_machines(more: list[Suggestion]) -> list[Suggestion]:
    """Of what needs more GPUs: the least harmful way on the fewest, and the first that keeps the training as it is."""
    if not more:
        return []
    faithful = [s for s in more if not any("optimizer" in flag or "lora" in flag for flag in s.flags)][:1]
    return [more[0], *(s for s in faithful if s is not more[0])]


def _placing(job: Job) -> tuple[int, int]:
    return job.train_gpus, job.engine_gpus


def _num_gpus(job: Job) -> int:
    return job.train_gpus + job.engine_gpus


def _is_safe(verdict: Verdict) -> bool:
    return verdict in ("fits", "not known")
