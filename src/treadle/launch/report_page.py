"""`treadle report RUN`: what a run achieved, as one HTML file that loads nothing and runs nothing.

run folder -> gather() -> Facts -> page_of() -> Page (words, charts, tables) -> report_page.html

What models wrote is not to be trusted: the template escapes all that it is given, and the page's policy lets nothing be
loaded, sent or run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from treadle.config.load import load_run, replace_text
from treadle.config.schema import RunConfig
from treadle.config.secret_settings import NOT_STORED, without_secrets
from treadle.dash.run_folder import HeldOut
from treadle.dash.status import TRAINING_STEPS, sampling_note
from treadle.formatting import counted, duration, gigabytes, model_name, near, percent
from treadle.launch.charts import Chart, draw
from treadle.launch.folder import REQUEST_FILE, check_is_run, load_versions, requested_keys
from treadle.launch.history import TOKENS_PER_SECOND, Evaluation, History, reader_of
from treadle.launch.plan import CONFIG_FILE, LOG_FOLDER
from treadle.launch.report import Outcome, Summary, choose_examples, load_summary, summarize
from treadle.launch.report_charts import charts_of

PAGE_FILE = "report.html"
_TEMPLATE = Path(__file__).with_name("report_page.html")
# What the page shows of examples: how it was before, how it is after, and how many of these.
_KINDS = {
    (False, True): ("became right", 3),
    (True, False): ("became wrong", 2),
    (True, True): ("right both times", 1),
    (False, False): ("wrong both times", 2),
}
_LATE = re.compile(r"^(?P<when>\S+) ERROR\s+watchdog late (?P<rest>.*)$")
_ENGINE = re.compile(r"\bengine loaded engine=(?P<kind>\S+) version=(?P<version>\S+)")
_PREFIX_STEPS = 5  # a mean of so many steps is "at first" and "at last"


@dataclass(frozen=True)
class Facts:
    """All that a run has left behind."""

    folder: Path
    config: RunConfig
    asked_for: frozenset[str]
    history: History
    summary: Summary
    versions: Mapping[str, str]
    engines: tuple[str, ...]  # "vllm 0.32.0", one a life where it changed
    alarms: tuple[str, ...]


@dataclass(frozen=True)
class Drawing:
    title: str
    about: str
    legend: tuple[tuple[str, str], ...]  # (CSS class, name)
    svg: Markup


@dataclass(frozen=True)
class Setting:
    key: str
    value: str
    default: str
    is_asked_for: bool

    @property
    def differs(self) -> bool:
        return self.value != self.default


def write_report(run_folder: Path, out: Path | None) -> int:
    folder = run_folder.expanduser().resolve()
    check_is_run(folder)
    file = out.expanduser() if out is not None else folder / PAGE_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, render(gather(folder)))
    file.chmod(0o666 & ~_umask())  # it is made to be shown; settings that are secret are not in it
    print(near(file.resolve()))
    return 0


def gather(folder: Path) -> Facts:
    config = load_run(folder / CONFIG_FILE)
    history = reader_of(config, folder).read()
    saved = load_summary(folder)
    outcome = (
        Outcome(is_complete=False, total_s=history.last("time_s") or 0.0)
        if saved is None
        else Outcome(
            saved.is_complete,
            saved.total_s,
            saved.peak_memory_bytes,
            saved.peak_memory_by_process,
            tuple(saved.alarms),
            tuple(saved.findings),
            saved.last_words,
        )
    )
    logs = {log.stem: log.read_text(errors="replace") for log in sorted((folder / LOG_FOLDER).glob("*.log"))}
    engines = [f"{found['kind']} {found['version']}" for found in _ENGINE.finditer(logs.get("engine", ""))]
    return Facts(
        folder=folder,
        config=config,
        asked_for=requested_keys(folder) if (folder / REQUEST_FILE).exists() else frozenset(),
        history=history,
        summary=summarize(config, folder, history, outcome),
        versions=load_versions(folder),
        engines=tuple(dict.fromkeys(engines)),
        # The launcher's lines say more; a run that goes on, or was started by hand, has only those in the logs.
        alarms=outcome.alarms or tuple(alarm for name, text in logs.items() for alarm in _alarms(name, text)),
    )


def render(facts: Facts) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(**page_of(facts))


def page_of(facts: Facts) -> dict[str, Any]:
    """What the template is filled with. Everything but the drawings is plain text, and escaped by it."""
    summary, history = facts.summary, facts.history
    before, after = _first_and_last(history.evaluations)
    pairs = choose_examples(before, after, num=10**9)
    settings = settings_of(facts.config, facts.asked_for)
    return {
        "name": facts.folder.name,
        "status": _status(summary),
        "is_complete": summary.is_complete,
        "words": in_words(facts),
        "tiles": _tiles(facts),
        "drawings": [_drawing(chart) for chart in charts_of(history) if not chart.is_empty],
        "health": [str(line) for line in history.health],
        "alarms": facts.alarms,
        "counts": _counts(pairs),
        "examples": _chosen(pairs),
        "cut_off": {"before": _cut_off_in_words(before), "after": _cut_off_in_words(after)},
        "changed": sorted((s for s in settings if s.differs), key=lambda s: (not s.is_asked_for, s.key)),
        "settings": settings,
        "versions": _versions(facts),
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


def in_words(facts: Facts) -> list[str]:
    """The run in a few sentences, and no more certain than its figures are."""
    summary, history = facts.summary, facts.history
    took = f" in {duration(summary.total_s)}" if summary.total_s else ""
    steps = f"{summary.steps_taken} of {counted(summary.steps, 'step')}"
    sentences = [f"{model_name(summary.model)} was trained on {_task(summary)}: {steps}{took}."]
    sentences += _accuracy_in_words(*_first_and_last(history.evaluations))
    for label, evaluations in history.by_env.items():
        sentences += [f"{label}: {sentence}" for sentence in _accuracy_in_words(*_first_and_last(evaluations))]
    sentences += _sampling_note(facts)
    rewards = history.values("reward")
    if len(rewards) >= 2 * _PREFIX_STEPS:
        first, last = _mean(rewards[:_PREFIX_STEPS]), _mean(rewards[-_PREFIX_STEPS:])
        sentences.append(
            f"The mean reward was {first:.2f} in the first {_PREFIX_STEPS} steps and {last:.2f} in the last."
        )
    num = len(history.health)
    sentences.append(
        f"The trainer gave {counted(num, 'health warning')}." if num else "The trainer gave no health warnings."
    )
    sentences += [f"It ended with an error: {facts.summary.last_words}"] if facts.summary.last_words else []
    sentences += facts.summary.findings
    if facts.alarms:
        sentences.append(f"The watchdog reported {counted(len(facts.alarms), 'wait')} that took too long.")
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
        sentences.append(f"The mean score of these answers was {before.mean_score:.3f} and {after.mean_score:.3f}.")
    if before.low <= after.high and after.low <= before.high:
        sentences.append("The intervals overlap: the difference may be chance.")
    return sentences


def _sampling_note(facts: Facts) -> list[str]:
    """Why the accuracy in training is another one, where it is."""
    _, last = _first_and_last(facts.history.evaluations)
    if last is None or len(facts.config.environments) > 1:  # several may sample each in its own way
        return []
    steps = [step for step in facts.history.steps if int(step["step"]) <= last.step][-TRAINING_STEPS:]
    training = History(tuple(steps)).values("rollout/accuracy")
    held_out = HeldOut(last.step, last.accuracy, last.low, last.high)
    return list(filter(None, [sampling_note(held_out, training, facts.config.environments[0].model_dump())]))


def settings_of(config: RunConfig, asked_for: frozenset[str]) -> list[Setting]:
    """Every setting of the run by its dotted key; what is secret is not shown."""
    left_out = {"env"} if config.envs else {"envs"}
    used = _flat(without_secrets(config.model_dump(mode="json", exclude=left_out)))
    default = _flat(RunConfig().model_dump(mode="json"))

    def default_of(key: str) -> Any:
        return default.get(re.sub(r"^envs\.\d+\.", "env.", key))

    return [Setting(key, _shown(value), _shown(default_of(key)), key in asked_for) for key, value in used.items()]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        tables = {str(place): table for place, table in enumerate(value)} if name == "envs" else value
        is_section = isinstance(tables, dict) and name != "args"
        flat |= _flat(tables, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return flat


def _shown(value: Any) -> str:
    if value in (None, ""):
        return ""
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace(NOT_STORED, "(not shown)")


def _status(summary: Summary) -> str:
    return "complete" if summary.is_complete else f"not complete: {summary.steps_taken} of {summary.steps} steps"


def _task(summary: Summary) -> str:
    return f"{summary.env} ({summary.task})" if summary.task and summary.task != summary.env else summary.env


def _tiles(facts: Facts) -> list[tuple[str, str]]:
    summary, history = facts.summary, facts.history
    _, last = _first_and_last(history.evaluations)
    step_s = history.mean("perf/step_s")
    mean_score = None if last is None else last.mean_score
    speeds = {f"{word} tokens per second": history.mean(key) for word, key in TOKENS_PER_SECOND.items()}
    tiles = [
        ("held-out accuracy", percent(last.accuracy) if last is not None else ""),
        ("held-out mean score", "" if mean_score is None else f"{mean_score:.3f}"),
        ("steps", f"{summary.steps_taken} of {summary.steps}"),
        ("time", duration(summary.total_s) if summary.total_s else ""),
        ("seconds per step", f"{step_s:.2f}" if step_s is not None else ""),
        *((name, f"{speed:,.0f}" if speed is not None else "") for name, speed in speeds.items()),
        ("peak memory", gigabytes(summary.peak_memory_bytes) if summary.peak_memory_bytes else ""),
    ]
    return [(name, value or "not measured") for name, value in tiles]


def _drawing(chart: Chart) -> Drawing:
    kind = "area" if chart.is_stacked else "line"
    legend = [(f"{kind} c{series.colour}", series.name) for series in chart.series if series.points]
    if chart.held_out:
        legend.append(("held-out", "held-out accuracy (95 % interval)"))
    notes = [
        "the shaded band is the healthy range" if chart.healthy is not None else "",
        "the highest values are cut off" if chart.cut_at is not None else "",
    ]
    shown = legend if legend[0][1] != chart.title else []  # a single line that the title names already
    about = "; ".join(filter(None, (chart.unit, *notes)))
    return Drawing(chart.title, about, tuple(shown), Markup(draw(chart)))  # noqa: S704 - numbers, and names escaped


def _first_and_last(evaluations: Sequence[Evaluation]) -> tuple[Evaluation | None, Evaluation | None]:
    """Of an unfinished run too: what was measured last."""
    first = evaluations[0] if evaluations else None
    return first, evaluations[-1] if len(evaluations) > 1 else None


def _kind_of(example: Mapping[str, Any]) -> tuple[bool, bool]:
    return bool(example["before_is_right"]), bool(example["after_is_right"])


def _counts(pairs: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    return [(words, sum(_kind_of(pair) == kind for pair in pairs)) for kind, (words, _) in _KINDS.items()]


def _chosen(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Some of each kind, and not only the flattering ones."""
    chosen = []
    for kind, (words, most) in _KINDS.items():
        chosen += [dict(pair) | {"kind": words} for pair in pairs if _kind_of(pair) == kind][:most]
    return chosen


def _cut_off_in_words(evaluation: Evaluation | None) -> str:
    """As the printed report says it of an answer that did not end by itself."""
    limit = None if evaluation is None else evaluation.max_tokens
    return f"cut off at {limit} tokens" if limit else "cut off"


def _versions(facts: Facts) -> list[tuple[str, str]]:
    recorded = dict(facts.versions)
    versions = [(name, recorded.pop(name, "not recorded")) for name in ("treadle", "python", "torch", "transformers")]
    versions.append(("engine", ", then ".join(facts.engines) or "not recorded"))
    return [*versions, *sorted(recorded.items())]


def _alarms(process: str, log: str) -> list[str]:
    """Waits that took longer than is normal, as its watchdog wrote them."""
    found = (_LATE.match(line) for line in log.splitlines())
    return [f"{match['when']} {process}: late {match['rest']}" for match in found if match is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
