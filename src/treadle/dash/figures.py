"""The figures of a run as the page draws them: thinned for the charts, and the publishes one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from treadle.dash.downsample import Values, extremes, means, places, stretches
from treadle.dash.run_folder import HeldOut, RunFolder

NUM_SYNCS = 300
_SYNC_PARTS = ("pause", "transfer", "verify")
_OF_A_SYNC = {
    "ended_s": "time_s",
    "seconds": "perf/weight_sync_s",
    "bytes": "sync/bytes",
    "version": "policy_version",
    "canary": "sync/canary_mean_abs_diff",
    **{part: f"perf/weight_sync_{part}_s" for part in _SYNC_PARTS},
}


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Of a long run `values` has the extremes of each stretch of steps and `means` their means; else that is None."""

    run: str = ""
    steps: list[int] = []
    values: dict[str, Values] = {}
    means: dict[str, Values] | None = None
    held_out: list[HeldOut] = []
    num_steps: int = 0
    last_step: int = 0
    names: list[str] = []


def series_of(
    run: RunFolder | None, names: Sequence[str], first: int | None, last: int | None, num_points: int
) -> Series:
    if run is None:
        return Series()
    with run.metrics.columns() as columns:
        steps = columns.steps
        cuts = stretches(steps, first, last, num_points)
        known = {name: columns.by_name[name] for name in names if name in columns.by_name}
        is_thinned = any(cut.stop - cut.start > 1 for cut in cuts)
        return Series(
            run=run.name,
            steps=places(steps, cuts),
            values={name: extremes(column, cuts) for name, column in known.items()},
            means={name: means(column, cuts) for name, column in known.items()} if is_thinned else None,
            held_out=run.held_out(),
            num_steps=len(steps),
            last_step=steps[-1] if steps else 0,
            names=sorted(columns.by_name),
        )


def syncs_of(run: RunFolder | None) -> dict[str, list[dict[str, float]]]:
    """The last publishes: which version, when it was through, and where its time went."""
    if run is None:
        return {"syncs": []}
    with run.metrics.columns() as columns:
        named = {short: columns.by_name[name] for short, name in _OF_A_SYNC.items() if name in columns.by_name}
        known = {short: column[-NUM_SYNCS:] for short, column in named.items()}
        steps = columns.steps[-NUM_SYNCS:]
    rows = [
        {"step": step, **{short: values[row] for short, values in known.items() if not math.isnan(values[row])}}
        for row, step in enumerate(steps)
    ]
    return {"syncs": [row for row in rows if "seconds" in row]}
