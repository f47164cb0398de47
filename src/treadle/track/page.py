"""The page that lists every metric: `python -m treadle.track.page > docs/metrics.md`."""

from __future__ import annotations

import sys

from treadle.track.catalogue import SECTIONS, MetricEntry


def render_page() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "<!-- Made by `python -m treadle.track.page > docs/metrics.md`; change src/treadle/track/catalogue.py. -->",
        "",
        "One line of JSON per optimizer step in `metrics.jsonl`; `--track wandb,tensorboard,trackio` sends the same to",
        "further places. `step` counts optimizer steps. A value that is not finite is written as `null`, and so is one",
        "that a step does not have: where all groups scored the same, no token is trained, and there is no ratio, KL,",
        "entropy or gradient. Charts show a gap there. Other figures that an environment sends with its groups appear",
        "as `rollout/<its name>`, averaged over the groups. Evaluations and tables of rollouts come from the",
        "environment, in a run of its own: [environments.md](environments.md#at-the-trackers).",
        "",
        "Used to other names? `--metric-aliases trl,verl,atropos` writes those too, beside ours. The trainer says in",
        "its log, and the launcher shows, when a figure leaves its healthy range.",
    ]
    for title, entries in SECTIONS.items():
        lines += ["", f"## {title}", "", "| name | unit | meaning | healthy | TRL | verl | Atropos |"]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [_row(entry) for entry in entries]
    return "\n".join(lines) + "\n"


def _row(entry: MetricEntry) -> str:
    def other(alias: str) -> str:
        return "same" if alias == entry.name else f"`{alias}`" if alias else ""

    cells = [f"`{entry.name}`", entry.unit, entry.meaning, entry.healthy]
    cells += [other(alias) for alias in (entry.trl, entry.verl, entry.atropos)]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(render_page())
