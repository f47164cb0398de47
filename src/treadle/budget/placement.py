"""Choose which GPUs of a machine the engine and the trainer ranks use. Pure.

    GPUs   engine                                   trainer
    1      GPU 0                                    GPU 0: one rank, on the same GPU
    2      GPU 0                                    GPU 1: one rank
    more   the first: as few as hold the model      a rank on each of the others
           and MIN_SEQUENCES sequences, at most
           half of the GPUs unless the weights
           alone need more; several engines get
           this number each

`treadle run` uses it for its processes, `treadle plan` for its suggestions. The sizes that it compares are estimates;
no layout was measured against another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treadle.budget import hardware
from treadle.budget.shapes import ModelShape
from treadle.config.schema import RunConfig
from treadle.errors import ConfigError
from treadle.formatting import counted

OWN_GPU_SHARE = 0.9  # gpu_memory_utilization of an engine that shares its GPUs with no trainer
MIN_SEQUENCES = 32  # of the largest length that the KV cache must hold; fewer would leave the engine idle
KV_BYTES = 2  # of a number in the KV cache


@dataclass(frozen=True)
class EngineDemand:
    """Memory that the engine needs on all its GPUs together, and into how many parts its model can be split.

    >>> from treadle.budget.shapes import KNOWN
    >>> demand = EngineDemand.of(KNOWN["qwen2.5-72b"], max_num_seqs=128, max_model_len=2048)
    >>> [size for size in (1, 2, 4, 8) if demand.fits(size, hardware.CARDS["h100"])]
    [4, 8]
    """

    weight_bytes: float
    sequence_bytes: float = 0.0  # KV cache of one sequence of the largest length
    num_sequences: int = MIN_SEQUENCES
    num_heads: int = 1
    num_kv_heads: int = 1

    @classmethod
    def of(
        cls, shape: ModelShape, *, max_num_seqs: int, max_model_len: int, weight_bytes: float | None = None
    ) -> EngineDemand:
        """`weight_bytes`: of the whole model; None: 2 bytes for each parameter."""
        return cls(
            weight_bytes=2.0 * shape.num_params if weight_bytes is None else weight_bytes,
            sequence_bytes=2.0 * KV_BYTES * max_model_len * shape.num_layers * shape.kv_width,
            num_sequences=min(max_num_seqs, MIN_SEQUENCES),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
        )

    def sizes(self, most: int) -> list[int]:
        """Numbers of GPUs that the model can be split over: they divide its attention heads and its KV heads."""
        common = math.gcd(self.num_heads, self.num_kv_heads)
        return [size for size in range(1, most + 1) if common % size == 0]

    def fits(self, size: int, gpu_bytes: int, num_sequences: int | None = None) -> bool:
        """Whether `size` GPUs hold the weights and this number of sequences."""
        sequences = self.num_sequences if num_sequences is None else num_sequences
        needed = (self.weight_bytes + sequences * self.sequence_bytes) / size
        beside = hardware.CUDA_CONTEXT_BYTES + hardware.ENGINE_GRAPHS_BYTES
        return needed + beside <= OWN_GPU_SHARE * gpu_bytes


UNKNOWN_DEMAND = EngineDemand(weight_bytes=0.0)  # of a model of unknown shape: one GPU


@dataclass(frozen=True)
class GpuWishes:
    """What the user chose; None: to be chosen here."""

    engine_gpus: tuple[int, ...] | None = None
    train_gpus: tuple[int, ...] | None = None
    tensor_parallel: int | None = None
    ranks: int | None = None
    ranks_multiple: int = 1  # ranks that are chosen here are a multiple of this
    num_engines: int = 1
    is_one_copy: bool = False  # engine and trainer share one copy of the weights, which needs one GPU for both
    can_split: bool = True  # the engine works with tensor parallelism

    @property
    def fewest_ranks(self) -> int:
        return self.ranks or self.ranks_multiple


NO_WISHES = GpuWishes()


@dataclass(frozen=True)
class Placement:
    """The GPUs of the engines and of the trainer ranks, one for each rank.

    >>> print(Placement((0, 1), (2, 3)))
    engine on GPUs 0-1 (tensor parallel 2), trainer on GPUs 2-3 (2 ranks)
    >>> print(Placement((0, 1), (2,), num_engines=2))
    2 engines on GPUs 0-1, trainer on GPU 2
    """

    engine_gpus: tuple[int, ...]
    train_gpus: tuple[int, ...]
    num_engines: int = 1

    @property
    def is_shared(self) -> bool:
        """Engine and trainer use the same GPU."""
        return bool(set(self.engine_gpus) & set(self.train_gpus))

    @property
    def tensor_parallel(self) -> int:
        """GPUs of each engine."""
        return len(self.engine_gpus) // self.num_engines

    @property
    def ranks(self) -> int:
        return len(self.train_gpus)

    def __str__(self) -> str:
        if self.is_shared:
            return f"engine and trainer share {name_gpus(self.engine_gpus)}"
        split = f" (tensor parallel {self.tensor_parallel})" if self.tensor_parallel > 1 else ""
        several = f" ({self.ranks} ranks)" if self.ranks > 1 else ""
        engines = "engine" if self.num_engines == 1 else counted(self.num_engines, "engine")
        return f"{engines} on {name_gpus(self.engine_gpus)}{split}, trainer on {name_gpus(self.train_gpus)}{several}"


def settings_on_own_gpus(run: RunConfig, explicit: frozenset[str]) -> dict[str, Any]:
    """Settings that follow if engine and trainer do not share a GPU, unless the user gave them: weights in memory are
    sent, because they cannot be shared."""
    follow: dict[str, Any] = {}
    if run.train.mode.in_memory:
        follow["train.use_shared_memory"] = True
    if not run.engine_url:
        follow["engine.gpu_memory_utilization"] = OWN_GPU_SHARE
    return {key: value for key, value in follow.items() if key not in explicit}


def name_gpus(gpus: Sequence[int]) -> str:
    """In words and ranges.

    >>> name_gpus((0,)), name_gpus((0, 1, 2, 5))
    ('GPU 0', 'GPUs 0-2,5')
    """
    return f"{'GPU' if len(gpus) == 1 else 'GPUs'} {as_ranges(gpus)}"


def as_ranges(gpus: Sequence[int]) -> str:
    """As flags take them: `as_ranges((0, 1, 2, 5))` is "0-2,5"."""
    parts: list[list[int]] = []
    for gpu in sorted(gpus):
        if parts and gpu == parts[-1][1] + 1:
            parts[-1][1] = gpu
        else:
            parts.append([gpu, gpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def choose_placement(
    gpus: Sequence[int], gpu_bytes: int, demand: EngineDemand = UNKNOWN_DEMAND, wishes: GpuWishes = NO_WISHES
) -> Placement:
    """The layout for these GPUs (at least one), of `gpu_bytes` each; what the user chose is kept or refused.

    >>> print(choose_placement(range(4), 80_000_000_000))
    engine on GPU 0, trainer on GPUs 1-3 (3 ranks)
    """
    _check_wishes(gpus, wishes)
    engine, train = wishes.engine_gpus, wishes.train_gpus
    rest = tuple(gpu for gpu in gpus if gpu not in (*(engine or ()), *(train or ())))
    is_none_left = not rest and None in (engine, train)
    if wishes.is_one_copy or is_none_left:
        return _share_gpu(gpus, engine or train or tuple(gpus[:1]), wishes)
    if engine is None:
        most = (len(rest) - (0 if train else wishes.fewest_ranks)) // wishes.num_engines
        if most < 1 and len(gpus) == 1:
            return _share_gpu(gpus, tuple(gpus), wishes)
        if most < (wishes.tensor_parallel or 1):
            raise _too_few(gpus, wishes)
        half = len(gpus) // 2 // wishes.num_engines
        size = wishes.tensor_parallel or _choose_size(most, half, gpu_bytes, demand, wishes)
        engine, rest = rest[: size * wishes.num_engines], rest[size * wishes.num_engines :]
    if train is None:
        if len(rest) < wishes.fewest_ranks:
            raise _too_few(gpus, wishes)
        train = rest[: wishes.ranks or len(rest) // wishes.ranks_multiple * wishes.ranks_multiple]
    placement = Placement(engine, train, wishes.num_engines)
    if placement.is_shared and (engine != train or len(engine) > 1):
        raise ConfigError(
            f"{name_gpus(sorted(set(engine) & set(train)))} would be used by the engine and by the trainer",
            fix="they share a GPU only if it is the only one of both: name others by --engine.gpus or --train.gpus",
        )
    return placement


def idle_note(placement: Placement, num_gpus: int, wishes: GpuWishes) -> str:
    """Which GPUs are left over because the number of ranks is a multiple of something; "" if none are.

    >>> wishes = GpuWishes(ranks_multiple=2)
    >>> idle_note(choose_placement(range(4), 80_000_000_000, wishes=wishes), 4, wishes)
    'GPU 3 is not used: context_parallel and replicas need a multiple of 2 trainer ranks'
    """
    if wishes.ranks is not None or wishes.train_gpus is not None or wishes.ranks_multiple == 1 or placement.is_shared:
        return ""
    idle = [gpu for gpu in range(num_gpus) if gpu not in (*placement.engine_gpus, *placement.train_gpus)]
    needed = f"context_parallel and replicas need a multiple of {wishes.ranks_multiple} trainer ranks"
    return f"{name_gpus(idle)} {'is' if len(idle) == 1 else 'are'} not used: {needed}" if idle else ""


def _choose_size(most: int, half: int, gpu_bytes: int, demand: EngineDemand, wishes: GpuWishes) -> int:
    """On how many GPUs the engine runs: as few as hold the model and its sequences."""
    sizes = demand.sizes(most) if wishes.can_split else [1]
    usual = [size for size in sizes if size <= max(1, half)]
    roomy = [size for size in usual if demand.fits(size, gpu_bytes)]
    if roomy:
        return roomy[0]
    if demand.fits(usual[-1], gpu_bytes, num_sequences=1):
        return usual[-1]
    return next((size for size in sizes if demand.fits(size, gpu_bytes, num_sequences=1)), sizes[-1])


def _share_gpu(gpus: Sequence[int], chosen: tuple[int, ...], wishes: GpuWishes) -> Placement:
    """Engine and trainer on the same GPU."""
    are_apart = None not in (wishes.engine_gpus, wishes.train_gpus) and wishes.engine_gpus != wishes.train_gpus
    counts = (len(chosen), wishes.ranks or 1, wishes.tensor_parallel or 1, wishes.num_engines)
    is_one_gpu = counts == (1, 1, 1, 1)
    if wishes.is_one_copy and (are_apart or not is_one_gpu):
        raise ConfigError(
            "one copy of the weights is for an engine and one trainer process on the same, single GPU",
            fix="--train.use-shared-memory true, which sends the weights, instead of --train.single-copy",
        )
    if not is_one_gpu:
        raise _too_few(gpus, wishes)
    return Placement(chosen, chosen)


def _too_few(gpus: Sequence[int], wishes: GpuWishes) -> ConfigError:
    number = wishes.num_engines
    engine = len(wishes.engine_gpus or ()) or number * (wishes.tensor_parallel or 1)
    ranks = len(wishes.train_gpus or ()) or wishes.fewest_ranks
    if number > 1 and len(gpus) <= engine:
        fix = f"fewer engines: --engines {max(1, (len(gpus) - 1) * number // engine)}"
    elif engine > 1 and len(gpus) <= engine:
        fix = "an engine on fewer GPUs: --engine.tensor-parallel-size 1, or fewer in --engine.gpus"
    elif wishes.train_gpus is None and wishes.ranks is None and wishes.ranks_multiple > 1:
        fix = "a smaller --train.context-parallel or --train.replicas, of which the number of ranks is a multiple"
    else:
        fix = f"fewer trainer ranks: --train.ranks {max(1, len(gpus) - engine)}, or fewer in --train.gpus"
    engines = "an engine" if number == 1 else counted(number, "engine")
    return ConfigError(
        f"{engines} on {counted(engine, 'GPU')} and {counted(ranks, 'trainer rank')} need {engine + ranks} GPUs, and "
        f"this run can use {name_gpus(gpus)}",
        fix=fix,
    )


def _check_wishes(gpus: Sequence[int], wishes: GpuWishes) -> None:
    """Refuse GPUs that are not there, and counts that contradict each other."""
    for flag, chosen in (("--engine.gpus", wishes.engine_gpus), ("--train.gpus", wishes.train_gpus)):
        missing = sorted(set(chosen or ()) - set(gpus))
        if missing:
            there = f"{name_gpus(gpus)}" if len(gpus) > 1 else f"only GPU {gpus[0]}"
            raise ConfigError(
                f"there is no {name_gpus(missing)}: this run can use {there}", fix=f"{flag} with numbers of those"
            )
    num_engine_gpus = len(wishes.engine_gpus or ())
    if wishes.num_engines == 1:
        _check_count(wishes.engine_gpus, wishes.tensor_parallel, "engine.gpus", "engine.tensor-parallel-size")
    elif num_engine_gpus % (wishes.num_engines * (wishes.tensor_parallel or 1)):
        raise ConfigError(
            f"engine.gpus names {num_engine_gpus} GPUs ({as_ranges(wishes.engine_gpus or ())}), which "
            f"{wishes.num_engines} engines cannot divide",
            fix="leave --engine.gpus out, or name as many for each engine",
        )
    _check_count(wishes.train_gpus, wishes.ranks, "train.gpus", "train.ranks")
    if not wishes.can_split and max(num_engine_gpus // wishes.num_engines, wishes.tensor_parallel or 1) > 1:
        raise ConfigError("the transformers engine runs on one GPU", fix="--engine.engine vllm, or one GPU for it")


def _check_count(gpus: tuple[int, ...] | None, count: int | None, key: str, count_key: str) -> None:
    if gpus is not None and count is not None and len(gpus) != count:
        raise ConfigError(
            f"{key} names {len(gpus)} GPUs ({as_ranges(gpus)}), and {count_key.replace('-', '_')} is {count}",
            fix=f"leave --{count_key} out, or name {count}: --{key} {as_ranges(range(count))}",
        )
