"""`treadle plan`: read the request, estimate, print."""

from __future__ import annotations

import argparse
import json
from functools import partial

from rich.console import Console

from treadle.config.schema import RunConfig
from treadle.errors import TreadleError
from treadle.launch.budget.accounting import HOST, estimate
from treadle.launch.budget.drawing import as_json, show
from treadle.launch.budget.levers import largest_micro_tokens, suggest, take_less
from treadle.launch.budget.request import accepts, add_plan_flags, read_request
from treadle.launch.budget.start import Start
from treadle.launch.plan import explicit_keys

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


def show_what_fits(run: RunConfig, console: Console, *, of_host: bool = False) -> None:
    """For a run that ended for want of memory, `of_host`: of main memory. Its plan on this machine, and flags that take
    less of it. `run` is the settled configuration."""
    own_flags = argparse.ArgumentParser()
    add_plan_flags(own_flags)
    values = own_flags.parse_args([])
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
