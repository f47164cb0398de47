"""`treadle report RUN`: export the page of a run with its result into one HTML file (dash/export.py).

run folder -> read_record() -> RunRecord -> page_answers() -> export_page()
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from treadle.config.files import NOT_STORED, without_secrets
from treadle.config.load import replace_text, sections_left_out
from treadle.config.schema import RunConfig
from treadle.dash.charts import Series, charts_of, series_of
from treadle.dash.export import export_page, group_answers
from treadle.dash.rollouts import GroupView, TokenDecoder, view_group
from treadle.dash.run_folder import MetricsFile, RunFolder
from treadle.dash.status import TRAINING_STEPS, RunFacts, Tile, sampling_note, tiles_of
from treadle.errors import UserError
from treadle.formatting import counted, duration, gigabytes, model_name, near, percent, with_interval
from treadle.report.history import Evaluation, History, check_is_run, flatten, held_out_of
from treadle.report.summary import RunRecord, Summary, choose_examples, read_record
from treadle.store import ReadFailed
from treadle.store.browse import GroupFilter
from treadle.store.choice import open_recorded
from treadle.track.catalogue import METRICS

PAGE_FILE = "report.html"
NUM_POINTS = 300  # of each line; keeps the report of a long run small
NUM_GROUPS = 12
MAX_GROUP_TOKENS = 8_000  # of all groups together: about 40 bytes each in the file
# Examples by (right before, right after): the name of the kind, and how many are shown.
_KINDS = {
    (False, True): ("became right", 3),
    (True, False): ("became wrong", 2),
    (True, True): ("right both times", 1),
    (False, False): ("wrong both times", 2),
}
_MEAN_STEPS = 5  # the first and the last reward are means over this many steps


@dataclass(frozen=True)
class Setting:
    key: str
    value: str
    default: str
    is_requested: bool


def write_report(run_folder: Path, out: Path | None) -> int:
    folder = run_folder.expanduser().resolve()
    check_is_run(folder)
    file = out.expanduser() if out is not None else folder / PAGE_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, render_report(read_record(folder)))
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)  # it is made to be shown; secret settings are not in it
    print(near(file.resolve()))
    return 0


def render_report(record: RunRecord) -> str:
    return export_page(record.folder.name, page_answers(record))


def page_answers(record: RunRecord) -> dict[str, Any]:
    """What the page would request from a hub, and the report below its charts."""
    config, summary, history = record.config, record.summary, record.history
    run = RunFolder(record.folder)
    if not (record.folder / "metrics.jsonl").exists() and config.train.metrics_file is not None:
        run.metrics = MetricsFile(config.train.metrics_file)
    groups = _newest_groups(record, run)
    env_ids = sorted({view.summary.env_id for view in groups if view.summary.env_id is not None})
    return {
        "kind": "report",
        "tabs": ["overview", "rollouts"] if groups else ["overview"],
        "run": {
            "name": record.folder.name,
            "model": summary.model,
            "env": task_in_words(summary),
            "charts": charts_of(run),
            "meanings": {name: METRICS[name].meaning for chart in charts_of(run) for name in chart.names},
            "others": [],
            "envs": [{"env_id": env_id, "name": groups[0].env} for env_id in env_ids] if groups[:1] else [],
            "states": sorted({view.summary.state for view in groups}),
        },
        "series": _series(run, history),
        "now": {
            "standing": "complete" if summary.is_complete else "failed" if summary.last_words else "unfinished",
            "words": [
                _steps(summary)
                if summary.is_complete
                else f"not complete: {summary.steps_taken} of {summary.steps} steps"
            ],
            "tiles": _tiles(record, run),
            "sampling_note": "",
            "health": [],
            "queued": {"groups": 0, "sequences": 0},
        },
        "report": report_of(record),
        **group_answers(groups),
    }


def report_of(record: RunRecord) -> dict[str, Any]:
    """What the page shows below the charts (dash/page/report.js)."""
    summary, history = record.summary, record.history
    before, after = _first_and_last(history.evaluations)
    by_kind: dict[tuple[bool, bool], list[dict[str, Any]]] = {kind: [] for kind in _KINDS}
    for pair in choose_examples(before, after, num=10**9):
        by_kind[pair["before_is_right"], pair["after_is_right"]].append(pair)
    settings = settings_of(record.config, record.requested)
    differing = [one for one in settings if one.value != one.default]
    changed = sorted(differing, key=lambda one: (not one.is_requested, one.key))
    return {
        "words": in_words(record),
        "health": [str(line) for line in history.health],
        "alarms": record.alarms,
        "counts": [(words, len(by_kind[kind])) for kind, (words, _) in _KINDS.items()],
        "examples": [  # some of each kind, not only the flattering ones
            pair | {"kind": words} for kind, (words, most) in _KINDS.items() for pair in by_kind[kind][:most]
        ],
        "cut_off": {"before": _cut_off_in_words(before), "after": _cut_off_in_words(after)},
        "changed": [(one.key, one.value, one.default, "user" if one.is_requested else "launcher") for one in changed],
        "settings": [(one.key, one.value) for one in settings],
        "versions": _versions(record),
        "memory": [
            (name, gigabytes(size), size / max(1, *summary.peak_memory_by_process.values()))
            for name, size in sorted(summary.peak_memory_by_process.items(), key=lambda item: -item[1])
        ],
        "peak_memory": gigabytes(summary.peak_memory_bytes) if summary.peak_memory_bytes else "",
        "files": [
            (summary.result_name, summary.final_model or "none"),
            ("metrics", summary.metrics),
            ("logs", summary.logs),
        ],
    }


# ---- charts, tiles and groups


def _series(run: RunFolder, history: History) -> Series:
    names = sorted({name for chart in charts_of(run) for name in chart.names})
    series = series_of(run, names, None, None, NUM_POINTS)
    return msgspec.structs.replace(
        series,
        names=sorted(series.values),
        held_out=[held_out_of(one) for one in history.evaluations],
        held_out_by_env={label: [held_out_of(one) for one in found] for label, found in history.by_env.items()},
    )


def _tiles(record: RunRecord, run: RunFolder) -> list[Tile]:
    summary, history = record.summary, record.history
    now = RunFacts(
        explanation="",
        has_trainer=True,
        step=history.last_step,
        planned_steps=summary.steps,
        is_at_work=False,
        is_supervised=run.is_supervised,
    )
    with run.metrics.columns() as columns:
        *tiles, _ = tiles_of(columns, [held_out_of(one) for one in history.evaluations], now, 0)
    _, last = _first_and_last(history.evaluations)
    step_s, num_warnings = history.mean("perf/step_s"), len(history.health)
    score = ""
    if last is not None and last.mean_score is not None:
        score = with_interval(last.mean_score, last.score_low, last.score_high)
    further = {
        **({} if run.is_supervised else {"Held-out mean score": score}),
        "Time": duration(summary.total_s) if summary.total_s else "",
        "Seconds per step": "" if step_s is None else f"{step_s:.2f}",
        "Peak memory": gigabytes(summary.peak_memory_bytes) if summary.peak_memory_bytes else "",
    }
    health = Tile(
        name="Health",
        value=counted(num_warnings, "warning") if num_warnings else "no warnings",
        is_bad=num_warnings > 0,
    )
    return [*tiles, *(Tile(name=name, value=value or "–") for name, value in further.items()), health]


def _newest_groups(record: RunRecord, run: RunFolder) -> list[GroupView]:
    """The newest trained groups, as far as they fit; none where the queue is not in reach."""
    config = record.config
    if config.hub_url:
        return []
    decoder = TokenDecoder(Path(config.engine.model).expanduser() if config.engine.model else None)
    env = config.environments[0].own_name if len(config.environments) == 1 else ""
    views: list[GroupView] = []
    num_tokens = 0
    try:
        with open_recorded(config.hub, record.folder) as browser:
            browser.learn(10 * NUM_GROUPS)  # those still queued come first
            for summary in browser.find(GroupFilter(state="trained"), NUM_GROUPS):
                num_tokens += summary.num_tokens
                stored = browser.contents([summary.id]).get(summary.id)
                if stored is None or num_tokens > MAX_GROUP_TOKENS:
                    break
                views.append(view_group(summary, stored, decoder, run.tokens, env=env))
    except (OSError, ValueError, UserError, ReadFailed, sqlite3.Error, msgspec.MsgspecError):
        # A folder that is read-only, a damaged queue, or one that is out of reach.
        return []
    return views


# ---- words


def in_words(record: RunRecord) -> list[str]:
    """The result of the run in a few sentences, no more certain than the figures are."""
    summary, history = record.summary, record.history
    sentences = [f"{model_name(summary.model)} was trained on {task_in_words(summary)}: {_steps(summary)}."]
    if record.config.is_supervised:
        losses = history.values("eval_loss")
        sentences += [f"The held-out loss was {losses[0]:.3f} and is {losses[-1]:.3f}."] if len(losses) > 1 else []
    else:
        sentences += _accuracy_in_words(*_first_and_last(history.evaluations))
    for label, evaluations in history.by_env.items():
        sentences += [f"{label}: {sentence}" for sentence in _accuracy_in_words(*_first_and_last(evaluations))]
    sentences += _sampling_note(record)
    rewards = history.values("reward")
    if len(rewards) >= 2 * _MEAN_STEPS:
        first, last = fmean(rewards[:_MEAN_STEPS]), fmean(rewards[-_MEAN_STEPS:])
        sentences.append(
            f"The mean reward was {first:.2f} in the first {_MEAN_STEPS} steps and {last:.2f} in the last."
        )
    num = len(history.health)
    sentences.append(
        f"The trainer gave {counted(num, 'health warning')}." if num else "The trainer gave no health warnings."
    )
    sentences += [f"It ended with an error: {summary.last_words}"] if summary.last_words else []
    sentences += summary.findings
    if summary.restarts:
        sentences.append(f"Processes that crashed were started again {counted(len(summary.restarts), 'time')}.")
    if record.alarms:
        sentences.append(f"The watchdog reported {counted(len(record.alarms), 'wait')} that took too long.")
    return sentences


def _accuracy_in_words(before: Evaluation | None, after: Evaluation | None) -> list[str]:
    if before is None:
        return ["Held-out accuracy was not measured."]
    start = f"{percent(before.accuracy)} ({100 * before.low:.1f} to {100 * before.high:.1f})"
    where = "before training" if before.step == 0 else f"at step {before.step}"
    if after is None:
        return [f"Held-out accuracy was {start} {where}; it has not been measured since."]
    end = f"{percent(after.accuracy)} ({100 * after.low:.1f} to {100 * after.high:.1f})"
    sentences = [
        f"Held-out accuracy was {start} {where} and {end} at step {after.step}, on {after.num_prompts} prompts; in "
        "brackets, 95 % intervals."
    ]
    if before.mean_score is not None and after.mean_score is not None:
        first, last = (with_interval(one.mean_score or 0.0, one.score_low, one.score_high) for one in (before, after))
        sentences.append(f"The mean score of these answers was {first} and {last}.")
    if before.low <= after.high and after.low <= before.high:
        sentences.append("The intervals overlap: the difference may be chance.")
    return sentences


def _sampling_note(record: RunRecord) -> list[str]:
    """Why the accuracy in training differs, where it does."""
    _, last = _first_and_last(record.history.evaluations)
    if last is None or len(record.config.environments) > 1:  # several may have different sampling settings
        return []
    steps = [step for step in record.history.steps if int(step["step"]) <= last.step][-TRAINING_STEPS:]
    training = History(tuple(steps)).values("rollout/accuracy")
    note = sampling_note(held_out_of(last), training, record.config.environments[0].model_dump())
    return [note] if note else []


def _steps(summary: Summary) -> str:
    took = f" in {duration(summary.total_s)}" if summary.total_s else ""
    return f"{summary.steps_taken} of {counted(summary.steps, 'step')}{took}"


def task_in_words(summary: Summary) -> str:
    return f"{summary.env} ({summary.task})" if summary.task and summary.task != summary.env else summary.env


# ---- settings, examples, versions


def settings_of(config: RunConfig, requested: frozenset[str]) -> list[Setting]:
    """Every setting of the run by its dotted key; secret values are not shown."""
    left_out = sections_left_out(config)
    used = flatten(without_secrets(config.model_dump(mode="json", exclude=left_out)))
    default = flatten(RunConfig().model_dump(mode="json"))
    return [
        Setting(key, _shown(value), _shown(default.get(re.sub(r"^envs\.\d+\.", "env.", key))), key in requested)
        for key, value in used.items()
    ]


def _shown(value: Any) -> str:
    if value in (None, ""):
        return ""
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace(NOT_STORED, "(not shown)")


def _first_and_last(evaluations: Sequence[Evaluation]) -> tuple[Evaluation | None, Evaluation | None]:
    """The first evaluation and the newest one; the run may be unfinished."""
    first = evaluations[0] if evaluations else None
    return first, evaluations[-1] if len(evaluations) > 1 else None


def _cut_off_in_words(evaluation: Evaluation | None) -> str:
    """How an answer is marked that reached the length limit."""
    limit = None if evaluation is None else evaluation.max_tokens
    return f"cut off at {limit} tokens" if limit else "cut off"


def _versions(record: RunRecord) -> list[tuple[str, str]]:
    recorded = dict(record.versions)
    versions = [(name, recorded.pop(name, "not recorded")) for name in ("treadle", "python", "torch", "transformers")]
    versions.append(("engine", ", then ".join(record.engines) or "not recorded"))
    return [*versions, *sorted(recorded.items())]
