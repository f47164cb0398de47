"""Show a budget as a table or as JSON, and print the commands that start the planned job.

one trainer process          treadle run
several trainer processes    hub, engine and environment one by one, the trainers with torchrun
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from treadle.budget.job import Budget, MemoryPool, PlannedJob, Verdict
from treadle.budget.suggestions import SHARED_BASE, Suggestion, separate_engine_gpu, settings_of
from treadle.config.env import labels_of
from treadle.config.flags import given
from treadle.config.schema import EngineConfig, RunConfig
from treadle.formatting import gigabytes
from treadle.support import WEIGHT_MODES

Settings = Mapping[str, str]  # {"train.optimizer": "adamw_8bit"}
BY_HAND = "start it with, each in a terminal of its own (treadle run starts one trainer process: docs/multi-gpu.md)"
_WIDE_TERMINAL = 110
_BARS = {_WIDE_TERMINAL: 34, 80: 16, 0: 8}  # least terminal width in columns -> width of a bar
_COLOURS: dict[Verdict, str] = {"fits": "green", "tight": "yellow", "does not fit": "red", "not known": "dim"}
_CAN_START: tuple[Verdict, ...] = ("fits", "tight")
_OWNERS = {"trainer": "cyan", "engine": "magenta", "both": "blue", "others": "white"}
_OF_TORCHRUN = ("ranks", "trainer_rank", "init_method", "device")  # set by torchrun for each trainer process
_OF_MODE: Mapping[str, Settings] = {
    "single-copy": {"train.single_copy": "true"},
    "two-copies": {"train.use_shared_memory": "true"},
    "none": {"train.weight_bridge_mode": "offline"},
}


@dataclass(frozen=True)
class StartCommands:
    """Builds the commands from the `settings` and the `config_file` that the user gave."""

    run: RunConfig
    settings: Settings
    config_file: Path | None = None
    is_model_known: bool = True  # False: only a size was given

    @classmethod
    def of(cls, run: RunConfig, values: argparse.Namespace) -> StartCommands:
        settings = {key: str(value) for key, value in given(values).items()}
        if run.train.lora and values._mode == "single-copy":
            settings = {**settings, **settings_of(SHARED_BASE)}
        elif run.train.mode.in_memory:
            settings = {**_OF_MODE.get(values._mode, {}), **settings}
        return cls(run, settings, values._config, values._params is None)

    def commands(self, job: PlannedJob, flags: Iterable[str] = ()) -> list[str]:
        """Empty if no model was named. `flags`: of a suggestion, such as ("--train.optimizer adamw_8bit",)."""
        if not self.is_model_known:
            return []
        settings = {**self.settings, **settings_of(flags)}
        if job.train_gpus == 1:
            return [self._command("treadle run", {**self._devices(job), **settings})]
        return self._by_hand(job, settings)

    def _devices(self, job: PlannedJob) -> Settings:
        """The GPUs of engine and trainer, if they do not share one."""
        if job.engine_gpus == 0 or self.run.engine_url:
            return {}
        if job.engine_gpus > 1:
            split = str(job.engine_gpus)
            return {
                "engine.engine": "vllm",
                "engine.tensor_parallel_size": split,
                "train.device": f"cuda:{split}",  # the engine takes the first ones
            }
        return settings_of(separate_engine_gpu(job.weight_mode))

    def _by_hand(self, job: PlannedJob, settings: Settings) -> list[str]:
        """torchrun gives GPU N to rank N, so the engine takes the GPUs after those, or shares the first one.

        Settings that `treadle run` copies from one section to another are given to both processes.
        """
        run = self.run
        mode = WEIGHT_MODES[settings.get("train.weight_bridge_mode", run.train.weight_bridge_mode)]
        common = {"model": settings.get("model", run.model)}
        engine = common | _section("engine", settings)
        train = common | {"steps": str(run.steps)} | _section("train", settings)
        for name in _OF_TORCHRUN:
            train.pop(name, None)
        if job.max_model_len != EngineConfig().max_model_len:
            engine["max_model_len"] = train["seq_len"] = str(job.max_model_len)
        age = str(run.env.max_age if run.max_age is None or "env.max_age" in settings else run.max_age)
        if not run.envs and run.env.pace != "stream":
            train = {"max_age": age} | train
        if mode.adapters:
            engine |= {"enable_lora": "true", "max_lora_rank": str(job.lora_r)}
            if job.quantization != "none":
                engine = {"quantization": job.quantization} | engine
        if job.engine_gpus == 0:
            engine = {"device": "cuda:0"} | engine
            if mode.in_memory or job.mode == "single-copy":
                engine = {"weights_file": "/dev/shm/mine.weights"} | engine  # noqa: S108 - memory, as in the README
        elif job.engine_gpus == 1:
            engine = {"device": f"cuda:{job.train_gpus}"} | engine
        if job.engine_gpus and mode.in_memory:
            train = {"use_shared_memory": "true"} | train
        visible = ""
        if job.engine_gpus > 1:
            engine |= {"engine": "vllm", "tensor_parallel_size": str(job.engine_gpus)}
            cards = range(job.train_gpus, job.train_gpus + job.engine_gpus)
            visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, cards))} "
        of_env = [key for key in settings if key.startswith(("env.", "openai.")) and key != "env.name"]
        env = ({"env.max_age": age} if "max_age" in settings else {}) | {key: settings[key] for key in of_env}
        mixed = [
            (label, {"env.pace": "stream", "env.inference_weight": f"{one.inference_weight:g}"})
            for label, one in zip(labels_of(run.envs), run.envs, strict=True)
        ]
        return [
            self._command("treadle hub", _section("hub", settings)),
            self._command(f"{visible}treadle engine", engine),
            *(
                self._command(f"treadle env {shlex.quote(name)} serve", own | env)
                for name, own in mixed or [(run.env.name, {})]
            ),
            self._command(f"torchrun --nproc-per-node {job.train_gpus} -m treadle train", train),
        ]

    def _command(self, program: str, settings: Settings) -> str:
        file = [] if self.config_file is None else ["--config", shlex.quote(str(self.config_file))]
        flags = [f"--{key.replace('_', '-')} {shlex.quote(value)}" for key, value in settings.items()]
        return " ".join([program, *file, *flags])


def _section(name: str, settings: Settings) -> dict[str, str]:
    """The settings of one process, without the prefix: flags of its own verb."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}


# ---- table and JSON


def draw(
    budget: Budget, suggestions: list[Suggestion], largest_micro: int | None, *, width: int = _WIDE_TERMINAL
) -> RenderableType:
    warning = _warning(budget)
    lines: list[RenderableType] = [_heading(budget), *([Text(warning, "yellow")] if warning else []), Text()]
    for pool in budget.pools:
        if pool.capacity is None:  # no bars
            parts = ", ".join(f"{part.name} {gigabytes(part.bytes)}" for part in pool.components)
            note = (f"  {parts} (--host-memory-gb gives a verdict)", "dim")
            lines += [Text.assemble(("host memory  ", "bold"), gigabytes(pool.peak), note), Text()]
        else:
            lines += [_table(pool, _pool_name(budget, pool), width), _verdict(pool, pool.capacity), Text()]
    if largest_micro is not None and budget.verdict == "fits":
        largest = f"--train.micro-tokens {largest_micro} would still fit"
        lines += [Text.assemble(("largest micro  ", "dim"), largest), Text()]
    here = [s for s in suggestions if s.budget.job.train_gpus in (1, budget.job.train_gpus)]
    # `treadle run` starts one trainer process.
    elsewhere = [s for s in suggestions if s not in here]
    more = "on more trainer GPUs: with these flags treadle plan prints the commands that start it"
    for title, offers in (("what would make it fit, the least harm first", here), (more, elsewhere)):
        if offers:
            lines += [Text(title, style="bold"), _offers(offers), Text()]
    if not suggestions and budget.verdict == "does not fit":
        lines.append(
            Text(
                "no setting that the plan tries makes it fit: take a smaller model, or a machine with more memory",
                "red",
            )
        )
    while isinstance(lines[-1], Text) and not lines[-1].plain:
        lines.pop()
    return Group(*lines)


def as_json(
    budget: Budget, suggestions: list[Suggestion], largest_micro: int | None, start: StartCommands
) -> dict[str, Any]:
    """The content of the table, with sizes in bytes."""
    return {
        "model": budget.job.shape.name,
        "num_params": budget.job.shape.num_params,
        "num_trained": budget.job.num_trained,
        "mode": budget.job.mode,
        "optimizer": budget.job.optimizer,
        "micro_tokens": budget.job.micro_tokens,
        "tokens_at_once": budget.job.tokens_at_once,
        "warning": _warning(budget),
        "machine": budget.machine.name,
        "verdict": budget.verdict,
        "places": [
            {
                "name": pool.name,
                "capacity": pool.capacity,
                "peak": pool.peak,
                "peak_moment": pool.peak_moment,
                "verdict": pool.verdict,
                "trainer_tensors": pool.trainer_tensors,
                "components": [asdict(part) for part in pool.components],
            }
            for pool in budget.pools
        ],
        "largest_micro_tokens": largest_micro,
        "commands": start.commands(budget.job) if budget.verdict in _CAN_START else [],
        "suggestions": [
            {
                "flags": suggestion.command,
                "commands": start.commands(suggestion.budget.job, suggestion.flags),
                "verdict": suggestion.budget.verdict,
                "peaks": {pool.name: pool.peak for pool in suggestion.budget.pools},
            }
            for suggestion in suggestions
        ],
    }


def show(
    console: Console,
    budget: Budget,
    suggestions: list[Suggestion],
    largest_micro: int | None,
    start: StartCommands | None = None,
) -> None:
    """`start`: also print how to start the job, if it fits."""
    console.print(draw(budget, suggestions, largest_micro, width=console.width))
    commands = start.commands(budget.job) if start is not None and budget.verdict in _CAN_START else []
    if start is not None and commands:
        heading = "start it with" if budget.job.train_gpus == 1 else BY_HAND
        console.print(Text(f"\n{heading}", "bold"))
        for command in commands:  # not wrapped, so that they can be copied
            console.print(Text(command), soft_wrap=True)


def _heading(budget: Budget) -> Text:
    job, machine = budget.job, budget.machine.name
    copies = "one copy" if job.mode == "single-copy" else "two copies"
    weights = f"{copies} of the {'base model' if job.lora else 'weights'}"
    num_gpus = job.train_gpus + job.engine_gpus
    where = f"{num_gpus} x {machine}" if num_gpus > 1 else machine
    return Text.assemble(
        (job.shape.name, "bold"),
        f"  {_count(job.shape.num_params)} parameters, {_training(job)}, {weights}, on {where}",
    )


def _table(pool: MemoryPool, title: str, width: int) -> Table:
    """Components at the peak. A bar begins where the previous one ends; the last one shows the total."""
    bar_width = next(bar for columns, bar in _BARS.items() if width >= columns)
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False, title=title, title_justify="left",
        title_style="bold",
    )  # fmt: skip
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, width=bar_width, overflow="crop")
    table.add_column(style="dim")
    scale = bar_width / max(pool.peak, pool.capacity or 0)
    begin = 0.0
    for part in pool.components:
        if pool.peak_moment in part.moments:
            end = begin + part.bytes * scale
            # A thin line if the size rounds to 0.
            bar = Text(" " * int(begin) + ("█" * round(end - begin) or "▏"), style=_OWNERS[part.owner])
            table.add_row(part.name, gigabytes(part.bytes), bar, part.note)
            begin = end
    size = (pool.capacity or 0) * scale
    total = Text.assemble(
        ("█" * round(min(begin, size)), "green" if begin > size else _COLOURS[pool.verdict]),
        ("░" * (round(begin) - round(min(begin, size))), "red"),
    )
    table.add_row("total", gigabytes(pool.peak), total, f"of {gigabytes(pool.capacity or 0)}", style="bold")
    return table


def _verdict(pool: MemoryPool, capacity: int) -> Text:
    left = capacity - pool.peak
    words = f"{gigabytes(left)} left" if left >= 0 else f"{gigabytes(-left)} too much"
    weights = pool.find("weights")
    if left < 0 and weights > capacity / 2:
        words += f"; the weights alone take {gigabytes(weights)}"
    if pool.problem:
        words = pool.problem if left >= 0 else f"{words}; {pool.problem}"
    return Text.assemble((pool.verdict, f"bold {_COLOURS[pool.verdict]}"), f": {words}")


def _offers(suggestions: list[Suggestion]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for suggestion in suggestions:
        colour = _COLOURS[suggestion.budget.verdict]
        sizes = ", ".join(f"{pool.name} {gigabytes(pool.peak)}" for pool in suggestion.budget.pools)
        table.add_row(Text(suggestion.budget.verdict, style=colour), Text.assemble(suggestion.command or "as it is"))
        table.add_row("", Text(sizes, style="dim"))
    return table


def _pool_name(budget: Budget, pool: MemoryPool) -> str:
    count = {"trainer GPU": budget.job.train_gpus, "engine GPU": budget.job.engine_gpus}.get(pool.name)
    if count is None:
        return "host memory" if budget.machine.has_gpu else "memory, all processes together"
    also = "" if budget.job.engine_gpus else ", with the engine"
    which = "the first" if also and pool.name == "trainer GPU" else "each"
    name = f"{which} of the {count} {pool.name}s" if count > 1 else pool.name
    return name + (also if pool.name == "trainer GPU" else "")


def _training(job: PlannedJob) -> str:
    if job.lora:
        return f"LoRA ({_count(job.num_trained)} trained)"
    if job.train_layers is not None:
        return f"{len(job.train_layers)} layers with {job.optimizer} ({_count(job.num_trained)} trained)"
    return f"full fine-tune with {job.optimizer}"


def _warning(budget: Budget) -> str:
    """A note on the copies of the weights, or ""."""
    return "offline: the engine's copy never changes" if budget.job.mode == "none" else ""


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
