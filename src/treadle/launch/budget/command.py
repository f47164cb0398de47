"""`treadle plan`: read the request, estimate, print. `treadle run --fit`: take the first remedy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial

from rich.console import Console

from treadle.config.keys import explicit_keys, keys_in, value_of
from treadle.config.schema import RunConfig
from treadle.errors import ConfigError, ModelError, TreadleError
from treadle.formatting import gigabytes
from treadle.launch.budget.accounting import HOST, estimate
from treadle.launch.budget.drawing import as_json, show
from treadle.launch.budget.levers import largest_micro_tokens, suggest, take_less
from treadle.launch.budget.request import accepts, add_plan_flags, read_request, settings_of
from treadle.launch.budget.result import Budget
from treadle.launch.budget.start import Start

LESS = 0.75  # of what was planned, for a run that ended for want of memory


def plan_memory(run: RunConfig, values: argparse.Namespace, console: Console | None = None) -> int:
    """Print the budget; the exit code is 1 when the job does not fit, so that a script can ask first."""
    job, machine = read_request(run, values)
    budget = estimate(job, machine)
    suggestions = [] if budget.verdict == "fits" else suggest(job, machine, partial(accepts, run))
    largest_micro = largest_micro_tokens(job, machine)
    start = Start.of(run, values)
    if values._json:
        print(json.dumps(as_json(budget, suggestions, largest_micro, start), indent=2))
    else:
        show(console or Console(), budget, suggestions, largest_micro, start)
    return 1 if budget.verdict == "does not fit" else 0


def fit_run(
    load: Callable[[Mapping[str, str]], RunConfig], say: Callable[[str], None], console: Console | None = None
) -> RunConfig:
    """`treadle run --fit`: the run with the plan's first remedy that makes it fit on this machine's GPUs.

    `load` makes the run with settings over those of the user. Refused with the plan's text if no remedy fits.
    """
    run = load({})
    values = _plan_flags()
    try:
        job, machine = read_request(run, values)
    except ModelError as error:
        fix = "leave --fit out, or give a folder with a config.json by --model"
        raise ModelError(f"--fit cannot plan this run: {error.message}", fix=fix) from None
    budget = estimate(job, machine)
    if budget.verdict in ("fits", "not known"):
        say(f"--fit changes nothing: {_peaks(budget)}")
        return run
    offers = suggest(job, machine, partial(accepts, run))
    for offer in offers:
        placed = offer.budget.job
        if (placed.train_gpus, placed.engine_gpus) != (job.train_gpus, job.engine_gpus):
            continue  # it needs more GPUs, or another place for them
        changed = load(settings_of(offer.flags))
        after = estimate(*read_request(changed, values))
        if after.verdict == "does not fit":
            continue
        for flag in offer.flags:
            say(f"--fit sets {flag} (was {_value_before(run, flag)})")
        say(f"--fit: {_peaks(after)}")
        return changed
    if budget.verdict == "tight":
        say(f"--fit changes nothing: {_peaks(budget)}, and no setting of treadle takes less")
        return run
    show(console or Console(stderr=True), budget, offers, None)
    raise ConfigError(
        f"this run does not fit on {machine.name}, and --fit found no settings with which it does",
        fix="take a smaller model or larger GPUs",
    )


def _peaks(budget: Budget) -> str:
    """ "trainer GPU 21.3 of 24.0 GB, host 4.1 of 64.0 GB: fits"."""
    sizes = [
        f"{place.name} {gigabytes(place.peak)}" + ("" if place.capacity is None else f" of {gigabytes(place.capacity)}")
        for place in budget.places
    ]
    return f"{', '.join(sizes)}: {budget.verdict}"


def _value_before(run: RunConfig, flag: str) -> str:
    """The value that a flag replaces; a flag of several environments may replace a different one in each: "16, 512"."""
    values = [value_of(run, key) for name in settings_of([flag]) for key in sorted(keys_in(run, [name]))]
    return ", ".join(dict.fromkeys(str(value).lower() if isinstance(value, bool) else str(value) for value in values))


def _plan_flags() -> argparse.Namespace:
    """The planner's own flags as they are when none is given."""
    parser = argparse.ArgumentParser()
    add_plan_flags(parser)
    return parser.parse_args([])


def show_what_fits(run: RunConfig, console: Console, *, of_host: bool = False) -> None:
    """For a run that ended for want of memory, `of_host`: of main memory. Its plan on this machine, and flags that take
    less of it. `run` is the settled configuration."""
    values = _plan_flags()
    try:
        # The settings of a run that was started are complete, so the engine's share of memory is there even if unused.
        job, machine = read_request(run, values, explicit_keys(run) - {"engine.gpu_memory_utilization"})
    except TreadleError as error:  # of a model whose shape is not known here, say
        console.print(f"no plan of its memory: {error}", style="dim")
        return
    budget = estimate(job, machine)
    has_room = budget.verdict != "does not fit"
    concerned = [p for p in budget.places if (p.name == HOST) == (of_host or not machine.has_gpu)] if has_room else []
    most = {place.name: round(LESS * place.peak) for place in concerned}
    offers = take_less(job, machine, most, partial(accepts, run))
    show(console, budget, offers, None)
    if has_room:
        found = f"These flags take {1 - LESS:.0%} less." if offers else "No flags take much less."
        console.print(f"By this plan there is room: something else has some, or this job needs more. {found}")
