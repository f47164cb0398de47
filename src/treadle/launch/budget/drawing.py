"""A budget for people (a table with a bar per component) and for programs (JSON)."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from treadle.formatting import gigabytes
from treadle.launch.budget.job import Job
from treadle.launch.budget.levers import Suggestion
from treadle.launch.budget.result import Budget, Place, Verdict
from treadle.launch.budget.start import Start

_WIDE_TERMINAL = 110
_BARS = {_WIDE_TERMINAL: 34, 80: 16, 0: 8}  # least terminal width in columns -> width of a bar
_COLOURS: dict[Verdict, str] = {"fits": "green", "tight": "yellow", "does not fit": "red", "not known": "dim"}
_OWNERS = {"trainer": "cyan", "engine": "magenta", "both": "blue", "others": "white"}


def draw(
    budget: Budget, suggestions: list[Suggestion], largest_micro: int | None, *, width: int = _WIDE_TERMINAL
) -> RenderableType:
    warning = _warning(budget)
    lines: list[RenderableType] = [_heading(budget), *([Text(warning, "yellow")] if warning else []), Text()]
    for place in budget.places:
        if place.capacity is None:
            lines += [_in_a_line(place), Text()]
        else:
            lines += [_table(place, _place_name(budget, place), width), _verdict(place, place.capacity), Text()]
    if largest_micro is not None and budget.verdict == "fits":
        lines += [_fact("largest micro", f"--train.micro-tokens {largest_micro} would still fit"), Text()]
    for title, offers in _by_way_to_start(budget, suggestions).items():
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


def _by_way_to_start(budget: Budget, suggestions: list[Suggestion]) -> dict[str, list[Suggestion]]:
    """treadle run has one trainer process; for more, the planner is asked again and prints the commands."""
    here = [s for s in suggestions if s.budget.job.train_gpus in (1, budget.job.train_gpus)]
    more = [s for s in suggestions if s not in here]
    return {
        "what would make it fit, the least harm first": here,
        "on more trainer GPUs: with these flags treadle plan prints the commands that start it": more,
    }


def as_json(budget: Budget, suggestions: list[Suggestion], largest_micro: int | None, start: Start) -> dict[str, Any]:
    """Everything the table shows, in bytes."""
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
        "places": [_place_json(place) for place in budget.places],
        "largest_micro_tokens": largest_micro,
        "commands": start.commands(budget.job) if _can_start(budget) else [],
        "suggestions": [
            {
                "flags": suggestion.command,
                "commands": start.commands(suggestion.budget.job, suggestion.flags),
                "verdict": suggestion.budget.verdict,
                "peaks": {place.name: place.peak for place in suggestion.budget.places},
            }
            for suggestion in suggestions
        ],
    }


def show(
    console: Console,
    budget: Budget,
    suggestions: list[Suggestion],
    largest_micro: int | None,
    start: Start | None = None,
) -> None:
    """`start`: how to start it, where it fits."""
    console.print(draw(budget, suggestions, largest_micro, width=console.width))
    commands = start.commands(budget.job) if start is not None and _can_start(budget) else []
    if start is not None and commands:
        console.print(Text(f"\n{start.heading(budget.job)}", "bold"))
        for command in commands:  # whole lines, to be copied
            console.print(Text(command), soft_wrap=True)


def _can_start(budget: Budget) -> bool:
    return budget.verdict in ("fits", "tight")


def _place_json(place: Place) -> dict[str, Any]:
    return {
        "name": place.name,
        "capacity": place.capacity,
        "peak": place.peak,
        "peak_moment": place.peak_moment,
        "verdict": place.verdict,
        "trainer_tensors": place.trainer_tensors,
        "components": [
            {"name": c.name, "bytes": c.bytes, "owner": c.owner, "moments": list(c.moments), "note": c.note}
            for c in place.components
        ],
    }


def _heading(budget: Budget) -> Text:
    job = budget.job
    return Text.assemble(
        (job.shape.name, "bold"),
        f"  {_count(job.shape.num_params)} parameters, {_training(job)}, {_weights(job)}, on {_machines(budget)}",
    )


def _table(place: Place, title: str, width: int) -> Table:
    """What exists at the peak. A bar begins where the one before it ended; the last one shows the total."""
    bar_width = next(bar for columns, bar in _BARS.items() if width >= columns)
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False, title=title, title_justify="left",
        title_style="bold",
    )  # fmt: skip
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, width=bar_width, overflow="crop")
    table.add_column(style="dim")
    scale = bar_width / max(place.peak, place.capacity or 0)
    begin = 0.0
    for part in place.components:
        if place.peak_moment in part.moments:
            end = begin + part.bytes * scale
            table.add_row(part.name, gigabytes(part.bytes), _bar(begin, end, _OWNERS[part.owner]), part.note)
            begin = end
    size = (place.capacity or 0) * scale
    total = Text.assemble(
        ("█" * round(min(begin, size)), "green" if begin > size else _COLOURS[place.verdict]),
        ("░" * (round(begin) - round(min(begin, size))), "red"),
    )
    table.add_row("total", gigabytes(place.peak), total, f"of {gigabytes(place.capacity or 0)}", style="bold")
    return table


def _bar(begin: float, end: float, colour: str) -> Text:
    """Between two positions, in characters; what is too small to be drawn is a thin line."""
    return Text(" " * int(begin) + ("█" * round(end - begin) or "▏"), style=colour)


def _verdict(place: Place, capacity: int) -> Text:
    left = capacity - place.peak
    words = f"{gigabytes(left)} left" if left >= 0 else f"{gigabytes(-left)} too much"
    weights = place.find("weights")
    if left < 0 and weights > capacity / 2:
        words += f"; the weights alone take {gigabytes(weights)}"
    if place.problem:
        words = place.problem if left >= 0 else f"{words}; {place.problem}"
    return Text.assemble((place.verdict, f"bold {_COLOURS[place.verdict]}"), f": {words}")


def _in_a_line(place: Place) -> Text:
    """Memory whose size is not known gets no bars."""
    parts = ", ".join(f"{part.name} {gigabytes(part.bytes)}" for part in place.components)
    return Text.assemble(
        ("host memory  ", "bold"), gigabytes(place.peak), (f"  {parts} (--host-memory-gb gives a verdict)", "dim")
    )


def _offers(suggestions: list[Suggestion]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for suggestion in suggestions:
        colour = _COLOURS[suggestion.budget.verdict]
        sizes = ", ".join(f"{place.name} {gigabytes(place.peak)}" for place in suggestion.budget.places)
        table.add_row(Text(suggestion.budget.verdict, style=colour), Text.assemble(suggestion.command or "as it is"))
        table.add_row("", Text(sizes, style="dim"))
    return table


def _place_name(budget: Budget, place: Place) -> str:
    count = {"trainer GPU": budget.job.train_gpus, "engine GPU": budget.job.engine_gpus}.get(place.name)
    if count is None:
        return "host memory" if budget.machine.has_gpu else "memory, all processes together"
    also = "" if budget.job.engine_gpus else ", with the engine"
    which = "the first" if also and place.name == "trainer GPU" else "each"
    name = f"{which} of the {count} {place.name}s" if count > 1 else place.name
    return name + (also if place.name == "trainer GPU" else "")


def _training(job: Job) -> str:
    if job.lora:
        return f"LoRA ({_count(job.num_trained)} trained)"
    if job.train_layers is not None:
        return f"{len(job.train_layers)} layers with {job.optimizer} ({_count(job.num_trained)} trained)"
    return f"full fine-tune with {job.optimizer}"


def _weights(job: Job) -> str:
    what = "base model" if job.lora else "weights"
    return f"one copy of the {what}" if job.mode == "single-copy" else f"two copies of the {what}"


def _warning(budget: Budget) -> str:
    """What the reader must know about the copies of the weights; "" where nothing is special."""
    return "offline: the engine's copy never changes" if budget.job.mode == "none" else ""


def _machines(budget: Budget) -> str:
    num_gpus = budget.job.train_gpus + budget.job.engine_gpus
    return f"{num_gpus} x {budget.machine.name}" if num_gpus > 1 else budget.machine.name


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _fact(name: str, words: str) -> Text:
    return Text.assemble((f"{name}  ", "dim"), words)
