"""Show a budget as tables or as JSON, and print the command that starts the planned job."""

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

from treadle.budget.estimate import ENGINE_GPU, HOST, TRAINER_GPU
from treadle.budget.job import Budget, Layout, MemoryPool, PlannedJob, Verdict
from treadle.budget.placement import name_gpus
from treadle.budget.suggestions import SHARED_BASE, Suggestion, layout_flags, settings_of
from treadle.config.flags import given
from treadle.config.schema import RunConfig
from treadle.formatting import gigabytes

Settings = Mapping[str, str]  # {"train.optimizer": "adamw_8bit"}
_WIDE_TERMINAL = 110
_BARS = {_WIDE_TERMINAL: 34, 80: 16, 0: 8}  # least terminal width in columns -> width of a bar
_COLOURS: dict[Verdict, str] = {"fits": "green", "tight": "yellow", "does not fit": "red", "not known": "dim"}
_CAN_START: tuple[Verdict, ...] = ("fits", "tight")
_OWNERS = {"trainer": "cyan", "engine": "magenta", "both": "blue", "others": "white"}
_OF_MODE: Mapping[str, Settings] = {
    "single-copy": {"train.single_copy": "true"},
    "two-copies": {"train.use_shared_memory": "true"},
    "none": {"train.weight_bridge_mode": "offline"},
}


@dataclass(frozen=True)
class StartCommand:
    """Builds the `treadle run ...` from the `settings` and the `config_file` that the user gave."""

    run: RunConfig
    settings: Settings
    config_file: Path | None = None
    is_model_known: bool = True  # False: only a size was given

    @classmethod
    def of(cls, run: RunConfig, values: argparse.Namespace) -> StartCommand:
        settings = {key: str(value) for key, value in given(values).items()}
        if run.train.lora and values._mode == "single-copy":
            settings = {**settings, **settings_of(SHARED_BASE)}
        elif run.train.mode.in_memory:
            settings = {**_OF_MODE.get(values._mode, {}), **settings}
        return cls(run, settings, values._config, values._params is None)

    def command(self, job: PlannedJob, flags: Iterable[str] = ()) -> str:
        """Empty if no model was named. `flags`: of a suggestion, such as ("--train.optimizer adamw_8bit",)."""
        if not self.is_model_known:
            return ""
        settings = {**self.settings, **settings_of(flags)}
        settings = {**settings, **self._gpus(job, settings)}
        file = [] if self.config_file is None else ["--config", shlex.quote(str(self.config_file))]
        words = [f"--{key.replace('_', '-')} {shlex.quote(value)}" for key, value in settings.items()]
        return " ".join(["treadle run", *file, *words])

    def _gpus(self, job: PlannedJob, settings: Settings) -> Settings:
        """The GPUs of engine and trainer if they share none, unless the user placed them."""
        devices = (self.run.engine.device, self.run.train.device)
        if job.engine_gpus == 0 or any(device not in ("auto", "cuda") for device in devices):
            return {}
        placed = settings_of(layout_flags(job.train_gpus, job.engine_gpus, job.weight_mode))
        if self.run.engine_url:
            return {} if "train.gpus" in settings or job.train_gpus == 1 else {"train.ranks": str(job.train_gpus)}
        return {key: value for key, value in placed.items() if key not in settings}


# ---- table and JSON


def draw(
    budget: Budget,
    suggestions: list[Suggestion],
    largest_micro: int | None,
    *,
    layout: Layout | None = None,
    width: int = _WIDE_TERMINAL,
) -> RenderableType:
    warning, layout = _warning(budget), layout or Layout.of(budget.job)
    lines: list[RenderableType] = [_heading(budget), *([Text(warning, "yellow")] if warning else []), Text()]
    if budget.job.engine_gpus and budget.machine.has_gpu:
        lines += [_cards(budget, layout), *([Text(layout.reason, "dim")] if layout.reason else []), Text()]
    for pool in budget.pools:
        if pool.capacity is None:  # no bars
            parts = ", ".join(f"{part.name} {gigabytes(part.bytes)}" for part in pool.components)
            note = (f"  {parts} (--host-memory-gb gives a verdict)", "dim")
            lines += [Text.assemble(("host memory  ", "bold"), gigabytes(pool.peak), note), Text()]
        else:
            lines += [_table(pool, _pool_name(budget, pool, layout), width), _verdict(pool, pool.capacity), Text()]
    if largest_micro is not None and budget.verdict == "fits":
        largest = f"--train.micro-tokens {largest_micro} would still fit"
        lines += [Text.assemble(("largest micro  ", "dim"), largest), Text()]
    num_gpus = budget.job.train_gpus + budget.job.engine_gpus
    more = [s for s in suggestions if s.budget.job.train_gpus + s.budget.job.engine_gpus > num_gpus]
    here = [s for s in suggestions if s not in more]
    for title, offers in (("settings that make it fit, cheapest first", here), ("with more GPUs", more)):
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
    budget: Budget, suggestions: list[Suggestion], largest_micro: int | None, start: StartCommand, layout: Layout
) -> dict[str, Any]:
    """The content of the tables, with sizes in bytes."""
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
        "layout": asdict(layout),
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
        "command": start.command(budget.job) if budget.verdict in _CAN_START else "",
        "suggestions": [
            {
                "flags": suggestion.command,
                "command": start.command(suggestion.budget.job, suggestion.flags),
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
    start: StartCommand | None = None,
    layout: Layout | None = None,
) -> None:
    """`start`: also print how to start the job, if it fits."""
    console.print(draw(budget, suggestions, largest_micro, layout=layout, width=console.width))
    command = start.command(budget.job) if start is not None and budget.verdict in _CAN_START else ""
    if command:
        console.print(Text("\nstart it with", "bold"))
        console.print(Text(command), soft_wrap=True)  # not wrapped, so that it can be copied


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
    weights = pool.find("weights") + pool.find("engine's weights")
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


def _cards(budget: Budget, layout: Layout) -> Table:
    """A row for each GPU: what runs on it, its peak and the verdict."""
    job = budget.job
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for pool in sorted(budget.pools, key=lambda pool: pool.name != ENGINE_GPU):
        gpus = {ENGINE_GPU: layout.engine, TRAINER_GPU: layout.trainer}
        for number, gpu in enumerate(gpus.get(pool.name, ())):
            role = f"trainer rank {number}" if job.train_gpus > 1 else "trainer"
            if pool.name == ENGINE_GPU:
                role = f"engine worker {number}" if job.engine_gpus > 1 else "engine"
            sizes = f"{gigabytes(pool.peak)} of {gigabytes(pool.capacity or 0)}"
            verdict = Text(pool.verdict, style=_COLOURS[pool.verdict])
            table.add_row(Text(f"GPU {gpu}", "bold"), role, sizes, verdict)
    return table


def _pool_name(budget: Budget, pool: MemoryPool, layout: Layout) -> str:
    """The title of a table; several GPUs with the same content have one table."""
    job = budget.job
    if pool.name == HOST:
        return "host memory" if budget.machine.has_gpu else "memory, all processes together"
    if not job.engine_gpus:
        return f"{TRAINER_GPU}, with the engine"
    is_engine = pool.name == ENGINE_GPU
    gpus = layout.engine if is_engine else layout.trainer
    each = "each of " if len(gpus) > 1 else ""
    who = "the engine" if is_engine else "the trainer"
    if each:
        who = "a worker of the engine (tensor parallel)" if is_engine else "a trainer rank"
    return f"{each}{name_gpus(gpus)}: {who}"


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
