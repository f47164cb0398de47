"""Run `treadle plan` and `treadle run --fit`: estimate, and print or apply a suggestion."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial

from rich.console import Console

from treadle.budget.estimate import HOST, estimate
from treadle.budget.job import Budget
from treadle.budget.output import StartCommand, as_json, show
from treadle.budget.request import accepts, add_plan_flags, read_request
from treadle.budget.suggestions import SAFE, largest_micro_tokens, settings_of, suggest, take_less
from treadle.config.schema import RunConfig
from treadle.config.values import explicit_keys, keys_in, value_of
from treadle.errors import ConfigError, ModelError, TreadleError
from treadle.formatting import gigabytes

LESS = 0.75  # of the planned peak, for a run that ran out of memory


def plan_memory(run: RunConfig, values: argparse.Namespace, console: Console | None = None) -> int:
    """Print the budget. Exit code 1: the job does not fit, for use in scripts."""
    request = read_request(run, values)
    job, machine = request.job, request.machine
    budget = estimate(job, machine)
    suggestions = [] if budget.verdict == "fits" else suggest(job, machine, partial(accepts, run))
    largest_micro = largest_micro_tokens(job, machine)
    start = StartCommand.of(run, values)
    if values._json:
        print(json.dumps(as_json(budget, suggestions, largest_micro, start, request.layout), indent=2))
    else:
        show(console or Console(), budget, suggestions, largest_micro, start, request.layout)
    return 1 if budget.verdict == "does not fit" else 0


def fit_run(
    load: Callable[[Mapping[str, str]], RunConfig], say: Callable[[str], None], console: Console | None = None
) -> RunConfig:
    """`treadle run --fit`: the run with the first suggestion that fits on the GPUs of this machine.

    `load` adds settings to those of the user. Without a suggestion that fits, the plan is printed and the run refused.
    """
    run = load({})
    values = _plan_flags()
    try:
        request = read_request(run, values)
    except ModelError as error:
        fix = "leave --fit out, or give a folder with a config.json by --model"
        raise ModelError(f"--fit cannot plan this run: {error.message}", fix=fix) from None
    job, machine = request.job, request.machine
    budget = estimate(job, machine)
    if budget.verdict in SAFE:
        say(f"--fit changes nothing: {_peaks(budget)}")
        return run
    offers = suggest(job, machine, partial(accepts, run))
    for offer in offers:
        planned = offer.budget.job
        if (planned.train_gpus, planned.engine_gpus) != (job.train_gpus, job.engine_gpus):
            continue  # it needs more GPUs, or another pool for them
        changed = load(settings_of(offer.flags))
        again = read_request(changed, values)
        after = estimate(again.job, again.machine)
        if after.verdict == "does not fit":
            continue
        for flag in offer.flags:
            say(f"--fit sets {flag} (was {_value_before(run, flag)})")
        say(f"--fit: {_peaks(after)}")
        return changed
    if budget.verdict == "tight":
        say(f"--fit changes nothing: {_peaks(budget)}, and no setting of treadle takes less")
        return run
    show(console or Console(stderr=True), budget, offers, None, layout=request.layout)
    raise ConfigError(
        f"this run does not fit on {machine.name}, and --fit found no settings with which it does",
        fix="take a smaller model or larger GPUs",
    )


def _peaks(budget: Budget) -> str:
    """ "trainer GPU 21.3 of 24.0 GB, host 4.1 of 64.0 GB: fits"."""
    sizes = [
        f"{pool.name} {gigabytes(pool.peak)}" + ("" if pool.capacity is None else f" of {gigabytes(pool.capacity)}")
        for pool in budget.pools
    ]
    return f"{', '.join(sizes)}: {budget.verdict}"


def _value_before(run: RunConfig, flag: str) -> str:
    """The value that a flag replaces; a flag of several environments may replace a different one in each: "16, 512"."""
    values = [value_of(run, key) for name in settings_of([flag]) for key in sorted(keys_in(run, [name]))]
    return ", ".join(dict.fromkeys(str(value).lower() if isinstance(value, bool) else str(value) for value in values))


def _plan_flags() -> argparse.Namespace:
    """The defaults of the flags of `treadle plan`."""
    parser = argparse.ArgumentParser()
    add_plan_flags(parser)
    return parser.parse_args([])


def show_what_fits(run: RunConfig, console: Console, *, of_host: bool = False) -> None:
    """For a run that ran out of GPU memory, or with `of_host` out of host memory: print its plan on this machine and
    flags that need less. `run` is the complete configuration."""
    values = _plan_flags()
    try:
        # The configuration of a started run has every setting, also an engine share that is not used.
        request = read_request(run, values, explicit_keys(run) - {"engine.gpu_memory_utilization"})
    except TreadleError as error:  # such as a model of unknown shape
        console.print(f"no plan of its memory: {error}", style="dim")
        return
    job, machine = request.job, request.machine
    budget = estimate(job, machine)
    has_room = budget.verdict != "does not fit"
    concerned = [p for p in budget.pools if (p.name == HOST) == (of_host or not machine.has_gpu)] if has_room else []
    most = {pool.name: round(LESS * pool.peak) for pool in concerned}
    offers = take_less(job, machine, most, partial(accepts, run))
    show(console, budget, offers, None, layout=request.layout)
    if has_room:
        found = f"These flags take {1 - LESS:.0%} less." if offers else "No flags take much less."
        console.print(f"By this plan there is room: something else has some, or this job needs more. {found}")
