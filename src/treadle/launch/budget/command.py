"""`treadle plan`: read the request, estimate, print."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from treadle.config.schema import RunConfig
from treadle.launch.budget.accounting import estimate
from treadle.launch.budget.drawing import as_json, show
from treadle.launch.budget.levers import largest_micro_tokens, suggest
from treadle.launch.budget.request import read_request


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
