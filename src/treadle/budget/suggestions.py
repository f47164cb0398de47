"""Find changes of settings with which a job fits, in the order of their cost. Pure.

A cost is a number without a unit that only orders the suggestions:

    smaller micro-batches, a reference in host memory    slightly slower
    fewer concurrent sequences in the engine             slower generation
    gradient checkpointing                               a third more time
    gradients in bf16, 8-bit or factored moments         rounding, another optimizer
    optimizer states in host memory                      the same result, much slower steps
    sharded weights in host memory                       the same result, much slower steps
    LoRA                                                 fewer trained parameters
    LoRA on a model in 4 bits                            rounding as well, and slower steps
    GPUs divided otherwise between engine and trainer    less of one of them
    more GPUs                                            a larger machine
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

from treadle.budget.estimate import estimate
from treadle.budget.hardware import Machine
from treadle.budget.job import Budget, PlannedJob, Verdict
from treadle.budget.placement import OWN_GPU_SHARE, EngineDemand, as_ranges
from treadle.errors import ConfigError
from treadle.support import WEIGHT_MODES

Accepts = Callable[[tuple[str, ...]], bool]
SAFE: tuple[Verdict, ...] = ("fits", "not known")
MAX_SUGGESTIONS = 4
_MORE_RANKS = (1, 2, 3, 4, 5, 6, 7, 12, 16, 24, 32)
_SMALLEST_MICRO = {True: 2048, False: 256}  # with and without a GPU; below this size a GPU is mostly idle
_MICRO_STEP = 256


@dataclass(frozen=True)
class Suggestion:
    """Flags to add to the command, and the budget that they give."""

    flags: tuple[str, ...]
    cost: float
    budget: Budget

    @property
    def command(self) -> str:
        return " ".join(self.flags)


@dataclass(frozen=True)
class _Change:
    """A change of the job: the fields it sets, the flags that set them, and its cost."""

    fields: tuple[tuple[str, object], ...] = ()
    flags: tuple[str, ...] = ()
    cost: float = 0.0


_NO_CHANGE = _Change()
NF4_BASE = ("--train.weight-bridge-mode lora_only", "--train.quantization nf4")
SHARED_BASE = ("--train.weight-bridge-mode lora_only", "--train.single-copy true")  # one copy of the frozen base model


def layout_flags(train_gpus: int, engine_gpus: int, weight_mode: str) -> tuple[str, ...]:
    """The engine on the first GPUs, a trainer rank on each of the next ones.

    Weights that would be shared on one GPU are broadcast to an engine of several.

    >>> layout_flags(2, 4, "reload")
    ('--engine.gpus 0-3', '--train.gpus 4-5')
    """
    engine, train = range(engine_gpus), range(engine_gpus, engine_gpus + train_gpus)
    broadcasts = engine_gpus > 1 and WEIGHT_MODES[weight_mode].in_memory
    how = ("--train.use-shared-memory true",) if broadcasts else ()
    return f"--engine.gpus {as_ranges(engine)}", f"--train.gpus {as_ranges(train)}", *how


def settings_of(flags: Iterable[str]) -> dict[str, str]:
    """("--train.micro-tokens 4096",) -> {"train.micro_tokens": "4096"}."""
    pairs = (flag.removeprefix("--").partition(" ") for flag in flags)
    return {name.replace("-", "_"): value for name, _, value in pairs}


def take_less(
    job: PlannedJob, machine: Machine, most: Mapping[str, int], accepts: Accepts = lambda _: True
) -> list[Suggestion]:
    """The cheapest combination for each way of training that fits here and needs at most `most` bytes of each pool, in
    the order of cost. `accepts` says whether a run can have these flags."""
    found = [_cheapest_fit(job, machine, way, most) for way in _ways(job, machine)]
    as_placed = [
        s
        for s in found
        if s is not None
        and (s.budget.job.train_gpus, s.budget.job.engine_gpus) == (job.train_gpus, job.engine_gpus)
        and accepts(s.flags)
    ]
    return sorted(as_placed, key=lambda suggestion: suggestion.cost)[:MAX_SUGGESTIONS]


def suggest(job: PlannedJob, machine: Machine, accepts: Accepts = lambda _: True) -> list[Suggestion]:
    """The cheapest combination for each way of training (optimizer, LoRA, GPUs) whose flags a run `accepts`.

    First what fits on these GPUs, then what is tight with the present placement, then larger machines.
    """
    found = [best for way in _ways(job, machine) if (best := _cheapest_fit(job, machine, way)) is not None]
    ways = sorted((s for s in found if accepts(s.flags)), key=lambda suggestion: suggestion.cost)
    here = [s for s in ways if _num_gpus(s.budget.job) == _num_gpus(job)]
    safe = [s for s in here if s.budget.verdict in SAFE]
    more = [s for s in ways if _num_gpus(s.budget.job) > _num_gpus(job) and s.budget.verdict in SAFE]
    as_placed = [s for s in here if s.budget.job.train_gpus == job.train_gpus]
    tight = [] if any(s.budget.verdict in SAFE for s in as_placed) else as_placed[:2]
    # With more GPUs: the cheapest suggestion, and the cheapest that keeps optimizer and trained parameters.
    faithful = [s for s in more if not any(word in s.command for word in ("optimizer", "lora", "offload"))]
    return list(dict.fromkeys([*safe[:MAX_SUGGESTIONS], *tight, *more[:1], *faithful[:1]]))


def largest_micro_tokens(job: PlannedJob, machine: Machine) -> int | None:
    """The largest --train.micro-tokens with which the job fits; None if one sequence does not fit."""

    def fits(micro_tokens: int) -> bool:
        return estimate(replace(job, micro_tokens=micro_tokens), machine).verdict in SAFE

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


def _ways(job: PlannedJob, machine: Machine) -> Iterator[_Change]:
    """Ways to train; `_cheapest_fit` combines each with smaller changes."""
    kinds = [_NO_CHANGE, *_optimizers(job, machine)]
    can_adapt = job.lora or job.train_layers is None  # else the user chose weights of the model
    if can_adapt and not job.lora:
        kinds.append(_Change((("lora", True), ("mode", "lora")), ("--train.lora true",), 10))
    is_shared_base = job.lora and job.mode == "single-copy"
    is_one_gpu = (job.train_gpus, job.engine_gpus) == (1, 0)
    can_quantize = machine.has_gpu and is_one_gpu and can_adapt and not is_shared_base
    if can_quantize and job.quantization == "none":
        fields = (("lora", True), ("mode", "lora"), ("quantization", "nf4"))
        flags = NF4_BASE if job.lora else ("--train.lora true", *NF4_BASE)
        kinds.append(_Change(fields, flags, 3.0 if job.lora else 13.0))
    yield from kinds
    if can_adapt and is_one_gpu and not is_shared_base:
        flags = SHARED_BASE if job.lora else ("--train.lora true", *SHARED_BASE)
        yield _Change((("lora", True), ("mode", "single-copy")), flags, 0.25 if job.lora else 9.75)
    if not machine.has_gpu:
        return
    for kind, placement in product(kinds, _placements(job, machine)):
        is_lora = job.lora or ("lora", True) in kind.fields
        mode = "lora" if is_lora else "two-copies" if job.mode == "single-copy" else job.mode
        yield _Change(
            (*kind.fields, *placement.fields, ("mode", mode)),
            (*kind.flags, *placement.flags),
            kind.cost + placement.cost,
        )


def _placements(job: PlannedJob, machine: Machine) -> Iterator[_Change]:
    """Other layouts: the same GPUs divided otherwise between engine and trainer, and more GPUs for the trainer.

    The engine does not lose GPUs that it needs for its model and some sequences.
    """
    total = _num_gpus(job)
    demand = EngineDemand.of(
        job.shape, max_num_seqs=job.max_num_seqs, max_model_len=job.max_model_len, weight_bytes=job.model_bytes
    )
    layouts = {(total - engine, engine): 1.0 + abs(engine - job.engine_gpus) / 10 for engine in range(1, total)}
    engine_gpus = max(1, job.engine_gpus)
    # An engine that had to share its GPU takes a whole one, as treadle run starts it.
    own = (("gpu_memory_utilization", OWN_GPU_SHARE),) if job.gpu_memory_utilization is None else ()
    layouts |= {(ranks, engine_gpus): 20.0 * ranks for ranks in _MORE_RANKS if ranks + engine_gpus > total}
    for (train_gpus, engine), cost in layouts.items():
        has_room = engine >= job.engine_gpus > 0 or demand.fits(engine, machine.gpu_bytes or 0)
        is_other = (train_gpus, engine) != (job.train_gpus, job.engine_gpus)
        if is_other and has_room and train_gpus % job.ranks_multiple == 0:
            fields = (("train_gpus", train_gpus), ("engine_gpus", engine), *own)
            yield _Change(fields, layout_flags(train_gpus, engine, job.weight_mode), cost)


def _optimizers(job: PlannedJob, machine: Machine) -> list[_Change]:
    if job.lora:
        return []
    costs = {"adamw_8bit": 4.0, "adafactor": 5.0} | ({"adamw_cpu": 8.0} if machine.has_gpu else {})
    if job.optimizer != "adamw":
        costs.pop(job.optimizer, None)
    return [_Change((("optimizer", n),), (f"--train.optimizer {n}",), cost) for n, cost in costs.items()]


def _cheapest_fit(
    job: PlannedJob, machine: Machine, way: _Change, most: Mapping[str, int] = MappingProxyType({})
) -> Suggestion | None:
    """The cheapest combination of `way` and smaller changes that fits; a tight one if none fits."""
    tight: Suggestion | None = None
    try:
        changed = replace(job, **dict(way.fields))  # type: ignore[arg-type]
    except ConfigError:  # the heads cannot be split among this number of GPUs
        return None
    combinations = product(*_small_changes(changed, machine))
    for changes in sorted(combinations, key=lambda changes: sum(change.cost for change in changes)):
        chosen = (way, *changes)
        changed = replace(job, **dict(field for change in chosen for field in change.fields))  # type: ignore[arg-type]
        budget = estimate(changed, machine)
        if budget.verdict == "does not fit" or any(p.peak > most.get(p.name, p.peak) for p in budget.pools):
            continue
        flags = tuple(flag for change in chosen for flag in change.flags)
        suggestion = Suggestion(flags, sum(change.cost for change in chosen), budget)
        if budget.verdict in SAFE:
            return suggestion
        tight = tight or suggestion
    return tight


def _small_changes(job: PlannedJob, machine: Machine) -> list[list[_Change]]:
    smallest = max(_SMALLEST_MICRO[machine.has_gpu], job.sequence_tokens)
    checkpointing = _Change((("is_checkpointed", True),), ("--train.gradient-checkpointing true",), 1)
    bf16 = _Change((("gradient_bytes", 2),), ("--train.gradient-dtype bfloat16",), 2)
    offload = _Change((("is_reference_offloaded", True),), ("--train.reference-offload true",), 0.5)
    can_offload = machine.has_gpu and job.has_reference and not job.is_reference_offloaded
    zero2 = _Change((("shard", "fsdp2"),), ("--train.shard fsdp2",), 0.25)
    weights = _Change((("offloads_weights", True),), ("--train.offload-weights true",), 8.5)
    return [
        [_NO_CHANGE] if job.is_checkpointed else [_NO_CHANGE, checkpointing],
        [_NO_CHANGE, *_halvings(job.micro_tokens, smallest, "micro_tokens", "--train.micro-tokens", cost=0.5)],
        [_NO_CHANGE, offload] if can_offload else [_NO_CHANGE],
        [_NO_CHANGE] if job.gradient_bytes == 2 else [_NO_CHANGE, bf16],
        [_NO_CHANGE] if job.shard == "fsdp2" or not job.is_sharded else [_NO_CHANGE, zero2],
        [_NO_CHANGE, weights] if job.is_sharded and not job.offloads_weights else [_NO_CHANGE],
        [_NO_CHANGE, *_other_caches(job)],
    ]


def _other_caches(job: PlannedJob) -> list[_Change]:
    """Other sizes of the KV cache: smaller to leave room for the trainer, larger if the engine does not fit."""
    share = job.gpu_memory_utilization
    if job.engine_gpus and share is not None:  # it takes nothing from the trainer
        return []
    if share is None:
        return _halvings(job.max_num_seqs, job.group_size, "max_num_seqs", "--engine.max-num-seqs", cost=0.75)
    return [
        _Change((("gpu_memory_utilization", other),), (f"--engine.gpu-memory-utilization {other:g}",), 1.0 + n / 2)
        for step in (-0.1, 0.1)
        for n in range(9)
        if 0.1 <= (other := round(share + (n + 1) * step, 2)) <= 0.95
    ]


def _halvings(value: int, smallest: int, field: str, flag: str, *, cost: float) -> list[_Change]:
    """Half, a quarter, and on down to the smallest."""
    changes: list[_Change] = []
    while value // 2 >= smallest:
        value //= 2
        changes.append(_Change(((field, value),), (f"{flag} {value}",), cost * (len(changes) + 1)))
    return changes


def _num_gpus(job: PlannedJob) -> int:
    return job.train_gpus + job.engine_gpus
