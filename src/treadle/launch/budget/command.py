"""`treadle plan`: read the request, estimate, print."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from rich.console import Console

from treadle.config.schema import RunConfig
from treadle.errors import TreadleError
from treadle.launch.budget.accounting import HOST, estimate
from treadle.launch.budget.cards import Machine
from treadle.launch.budget.drawing import as_json, show
from treadle.launch.budget.levers import largest_micro_tokens, suggest
from treadle.launch.budget.request import add_plan_flags, read_request
from treadle.launch.budget.result import Budget

LESS = 0.75  # of what was planned: for a run that ended for want of memory although its plan fits


def plan_memory(run: RunConfig, values: argparse.Namespace, console: Console | None = None) -> int:
    """Print the budget; the exit code is 1 when the job does not fit, so that a script can ask first."""
    job, machine = read_request(run, values)
    budget = estimate(job, machine)
    suggestions = [] if budget.verdict == "fits" else suggest(job, machine)
    largest_micro = largest_micro_tokens(job, machine)
    if values._json:
        print(json.dumps(as_json(budget, suggestions, largest_micro), indent=2))
    else:
        show(console or Console(), budget, suggestions, largest_micro)
    return 1 if budget.verdict == "does not fit" else 0


def show_what_fits(run: RunConfig, console: Console) -> None:
    """For a run that ended for want of memory: its plan on this machine, and flags that take less."""
    own_flags = argparse.ArgumentParser()
    add_plan_flags(own_flags)
    try:
        job, machine = read_request(run, own_flags.parse_args([]))
    except TreadleError as error:  # of a model whose shape is not known here, say
        console.print(f"no plan of its memory: {error}", style="dim")
        return
    budget = estimate(job, machine)
    if budget.verdict == "does not fit":
        show(console, budget, suggest(job, machine), None)
        return
    show(console, budget, suggest(job, _with_less(machine, budget)), None)
    console.print(
        "By this plan there is room: something else has some of it, or this job needs more than planned. "
        f"Flags that are named here take {1 - LESS:.0%} less."
    )


def _with_less(machine: Machine, budget: Budget) -> Machine:
    if machine.gpu_bytes is None:
        return replace(machine, host_bytes=round(LESS * budget.place(HOST).peak))
    return replace(machine, gpu_bytes=round(LESS * max(p.peak for p in budget.places if p.name != HOST)))
