"""Summarize a run (summary.json, the printed report), and read all that it has left in its folder (RunRecord)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from treadle.config.load import load_run, replace_text
from treadle.config.schema import RunConfig
from treadle.dash.run_folder import CONFIG_FILE, read_object
from treadle.errors import MissingExtra
from treadle.formatting import (
    counted,
    duration,
    gigabytes,
    model_name,
    near,
    one_line,
    percent,
    program,
    with_interval,
)
from treadle.report.history import (
    GENERATION_S,
    SECONDS_PER_STEP,
    TOKENS_PER_SECOND,
    Evaluation,
    History,
    flatten,
    is_scored,
    reader_of,
)
from treadle.track.plot import draw_reward

SUMMARY_FILE = "summary.json"
ADAPTER_RESULT = "final_adapter"  # of a run that trains adapters; final_model may be beside it, merged
RESULTS = ("final_model", ADAPTER_RESULT)
NUM_HEALTH_LINES = 4
LONGEST_TEXT = 600  # characters of a prompt or an answer in the printed report


@dataclass(frozen=True)
class Outcome:
    """What only the launcher knows of a run, including its earlier sessions."""

    is_complete: bool
    total_s: float
    peak_memory_bytes: int = 0
    peak_memory_by_process: dict[str, int] = field(default_factory=dict)
    alarms: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    last_words: str = ""
    restarts: tuple[str, ...] = ()

    def after(self, earlier: Summary | None) -> Outcome:
        """This session of a run and the ones before it: times add up, peaks do not."""
        if earlier is None:
            return self
        names = {**earlier.peak_memory_by_process, **self.peak_memory_by_process}
        return Outcome(
            self.is_complete,
            self.total_s + earlier.total_s,
            max(self.peak_memory_bytes, earlier.peak_memory_bytes),
            {n: max(self.peak_memory_by_process.get(n, 0), earlier.peak_memory_by_process.get(n, 0)) for n in names},
            (*earlier.alarms, *self.alarms),
            (*earlier.findings, *self.findings),
            self.last_words,
            (*earlier.restarts, *self.restarts),
        )


@dataclass(frozen=True)
class Summary:
    """The content of summary.json."""

    run: str
    is_complete: bool
    model: str
    env: str
    task: str
    seed: int
    steps: int  # planned
    steps_taken: int
    held_out_before: dict[str, Any] | None
    held_out_after: dict[str, Any] | None
    examples: list[dict[str, Any]]
    total_s: float
    seconds_per_step: dict[str, float | None]
    peak_memory_bytes: int
    peak_memory_by_process: dict[str, int]
    final_model: str  # or adapter; "" while there is none
    metrics: str
    plot: str
    logs: str
    health: list[str]  # warnings of the trainer
    alarms: list[str]  # late waits that the watchdog reported
    findings: list[str]  # problems with the groups of an environment
    restarts: list[str]  # after a crash: why, and the last lines of the log
    last_words: str  # the error that ended the run
    # Share of the held-out answers that ended before the length limit; None: unknown.
    ended_before: float | None
    ended_after: float | None
    tokens_per_second: dict[str, float | None]  # {"generated": 812.0, "trained": 412.4}
    # Of several environments, by name: {"gsm8k": {"before": {...}, "after": {...}}}; held_out_* is over all prompts.
    held_out_by_env: dict[str, dict[str, dict[str, Any] | None]]

    @property
    def result_name(self) -> str:
        return "trained adapter" if Path(self.final_model).name == ADAPTER_RESULT else "trained model"


def summarize(config: RunConfig, run_folder: Path, history: History, outcome: Outcome) -> Summary:
    return Summary(
        run=str(run_folder),
        is_complete=outcome.is_complete,
        model=config.model,
        env=config.task_name if config.is_supervised else " + ".join(env.name for env in config.environments),
        task=config.task_name,
        seed=config.seed,
        steps=config.steps,
        steps_taken=history.last_step,
        held_out_before=_held_out(history.before),
        held_out_after=_held_out(history.after),
        examples=choose_examples(history.before, history.after),
        total_s=round(outcome.total_s, 1),
        seconds_per_step={
            word: _rounded(history.mean(*keys))
            for word, keys in {"total": ("perf/step_s",), **SECONDS_PER_STEP, "generation": (GENERATION_S,)}.items()
        },
        peak_memory_bytes=outcome.peak_memory_bytes,
        peak_memory_by_process=outcome.peak_memory_by_process,
        final_model=str(find_result(config.train.save_path) or ""),
        metrics=str(config.train.metrics_file),
        plot=str(run_folder / "reward.png"),
        logs=str(run_folder / "logs"),
        health=[str(line) for line in history.health],
        alarms=list(outcome.alarms),
        findings=list(dict.fromkeys([*outcome.findings, *_nothing_learned(history), *_unscored(history)])),
        restarts=list(outcome.restarts),
        last_words=outcome.last_words,
        ended_before=None if history.before is None else history.before.ended,
        ended_after=None if history.after is None else history.after.ended,
        tokens_per_second={word: _rounded(history.mean(key)) for word, key in TOKENS_PER_SECOND.items()},
        held_out_by_env={
            label: {"before": _held_out(own.before), "after": _held_out(own.after)}
            for label in history.by_env
            if (own := history.of_env(label))
        },
    )


def find_result(save_path: Path) -> Path | None:
    """The trained model or adapter in a folder of checkpoints, the newer of both; None while the run trains."""
    found = [result for name in RESULTS if (result := save_path / name).is_dir()]
    return max(found, key=lambda result: result.stat().st_mtime_ns, default=None)


def choose_examples(before: Evaluation | None, after: Evaluation | None, num: int = 3) -> list[dict[str, Any]]:
    """The same prompts before and after: first those that became right, then those right twice, then any.

    Among equals, answers that now end by themselves come first. Answers that could not be scored are left out.
    """
    if before is None or after is None:
        return []
    later = {sample.get("prompt"): sample for sample in after.samples if is_scored(sample)}
    earlier = [sample for sample in before.samples if is_scored(sample)]
    pairs = [(sample, later[sample.get("prompt")]) for sample in earlier if sample.get("prompt") in later]
    pairs.sort(
        key=lambda pair: (
            not pair[1].get("is_right"),
            bool(pair[0].get("is_right")),
            not pair[1].get("ended", True),
        )
    )
    return [
        {
            "prompt": old.get("prompt"),
            "gold": old.get("gold"),
            "before": old.get("completion"),
            "before_is_right": bool(old.get("is_right")),
            "before_ended": bool(old.get("ended", True)),
            "after": new.get("completion"),
            "after_is_right": bool(new.get("is_right")),
            "after_ended": bool(new.get("ended", True)),
        }
        for old, new in pairs[:num]
    ]


def save_summary(summary: Summary, run_folder: Path) -> None:
    replace_text(run_folder / SUMMARY_FILE, json.dumps(asdict(summary), indent=2) + "\n")


def load_summary(run_folder: Path) -> Summary | None:
    """None if the run has no summary, or it is damaged or of another format."""
    try:
        return msgspec.json.decode((run_folder / SUMMARY_FILE).read_bytes(), type=Summary)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def draw_plot(history: History, summary: Summary) -> str:
    """Draw reward.png. Returns the reason if it could not be drawn, else ""."""
    try:
        points = [e.point for e in history.evaluations]
        draw_reward(history.steps, points, title=title_of(summary)).savefig(summary.plot)
    except MissingExtra as error:
        return str(error)
    return ""


def title_of(summary: Summary) -> str:
    return f"{summary.task}, {model_name(summary.model)}"


def _nothing_learned(history: History) -> list[str]:
    shares = history.values("frac_reward_zero_std")
    if not shares or min(shares) < 1 or history.values("distill/reverse_kl"):
        return []
    remedy = "try an easier task, a higher --env.temperature or a larger --env.group-size"
    return [f"no group had different scores, so the weights did not change: {remedy}"]


def _unscored(history: History) -> list[str]:
    return [
        f"{counted(one.num_unscored, 'held-out answer')} at step {one.step} could not be scored and "
        f"{'is' if one.num_unscored == 1 else 'are'} not in the figures"
        for one in history.evaluations
        if one.num_unscored
    ]


def print_report(summary: Summary, console: Console) -> None:
    def row(name: str, value: str) -> None:
        console.print(f"  [dim]{name:<30}[/dim]  ", end="", highlight=False)
        console.print(value, highlight=False, markup=False, soft_wrap=True)

    console.print()
    steps = counted(summary.steps_taken, "step")
    console.print(f"[bold]{steps} in {duration(summary.total_s)}[/bold]", highlight=False)
    row("held-out accuracy", change_in_words(summary.held_out_before, summary.held_out_after))
    for label, held_out in summary.held_out_by_env.items():
        row(f"  {label}", change_in_words(held_out["before"], held_out["after"]))
    if scores := mean_scores_in_words(summary):
        row("held-out mean score", scores)
    if summary.ended_before is not None or summary.ended_after is not None:
        shares = ("not measured" if e is None else percent(e) for e in (summary.ended_before, summary.ended_after))
        row("answers that end by themselves", " -> ".join(shares))
    _print_examples(summary, console)
    row("seconds per step", _split_in_words(summary.seconds_per_step))
    speeds = [f"{word} {speed:,.0f}" for word, speed in summary.tokens_per_second.items() if speed is not None]
    row("tokens per second", ", ".join(speeds) or "not measured")
    row("peak memory", _memory_in_words(summary))
    for number, line in enumerate(summary.health[-NUM_HEALTH_LINES:]):
        row("" if number else "health", line)
    if len(summary.health) > NUM_HEALTH_LINES:
        row("", f"({len(summary.health) - NUM_HEALTH_LINES} earlier ones are in the trainer's log)")
    for number, line in enumerate(summary.findings[-NUM_HEALTH_LINES:]):
        row("" if number else "environment", line)
    for number, text in enumerate(summary.restarts[-NUM_HEALTH_LINES:]):
        row("" if number else "restarts", text.partition("\n")[0])
    row(summary.result_name, near(summary.final_model) if summary.final_model else "none")
    row("metrics", near(summary.metrics))
    row("reward plot", near(summary.plot) if Path(summary.plot).exists() else "none")
    row("logs", near(summary.logs))
    row("as one HTML file", f"{program()} report {near(summary.run)}")
    row("talk to it", f"{program()} chat {near(summary.run)}")


def _print_examples(summary: Summary, console: Console) -> None:
    examples = summary.examples
    num_became_right = sum(e["after_is_right"] and not e["before_is_right"] for e in examples)
    if examples:  # say how they were chosen: they are no random sample
        kinds = {len(examples): " that became right", 0: ""}
        kind = kinds.get(num_became_right, " (those that became right first)")
        shown = f"{counted(len(examples), 'held-out prompt')}{kind}; all are in evals/"
        console.print(f"\n  [dim]{shown}[/dim]", highlight=False)
    for example in examples:
        prompt = one_line(str(example["prompt"]), LONGEST_TEXT)
        console.print(f"\n  {prompt}", highlight=False, markup=False, soft_wrap=True)
        for when, held_out in (("before", summary.held_out_before), ("after", summary.held_out_after)):
            mark = "[green]right[/green]" if example[f"{when}_is_right"] else "[red]wrong[/red]"
            console.print(f"    [dim]{when:<6}[/dim] {mark} ", end="", highlight=False)
            answer = one_line(str(example[when]), LONGEST_TEXT)
            if not example.get(f"{when}_ended", True):
                limit = (held_out or {}).get("max_tokens")
                answer += f" (cut off at {limit} tokens)" if limit else " (cut off)"
            console.print(answer, highlight=False, markup=False, soft_wrap=True)
    if examples:
        console.print()


def _held_out(evaluation: Evaluation | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    low, high = evaluation.score_low, evaluation.score_high
    return {
        "step": evaluation.step,
        "accuracy": evaluation.accuracy,
        "interval_95": [evaluation.low, evaluation.high],
        "num_right": evaluation.num_right,
        "num_prompts": evaluation.num_prompts,
        "max_tokens": evaluation.max_tokens,
        "mean_score": evaluation.mean_score,
        "mean_score_interval_95": None if low is None else [low, high],
        "num_unscored": evaluation.num_unscored,
    }


def result_in_words(summary: Summary) -> str:
    """The result of the run, on one line."""
    steps = f"{counted(summary.steps_taken, 'step')} in {duration(summary.total_s)}"
    accuracy = change_in_words(summary.held_out_before, summary.held_out_after)
    scores = mean_scores_in_words(summary)
    return f"{steps}; held-out accuracy {accuracy}" + (f"; mean score {scores}" if scores else "")


def mean_scores_in_words(summary: Summary) -> str:
    """ "0.016 -> 0.720 (0.665 to 0.775), 95 % intervals"; "" where it was not measured."""
    ends = [held_out or {} for held_out in (summary.held_out_before, summary.held_out_after)]
    scores = [(end.get("mean_score"), *(end.get("mean_score_interval_95") or (None, None))) for end in ends]
    if all(score is None for score, _, _ in scores):
        return ""
    words = " -> ".join("not measured" if score is None else with_interval(score, *bounds) for score, *bounds in scores)
    return words + (", 95 % intervals" if any(low is not None for _, low, _ in scores) else "")


def change_in_words(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str:
    """ "1.6 % (0.6 to 3.9) -> 72.3 % (66.5 to 77.4), 95 % intervals, 256 prompts"."""

    def words(held_out: dict[str, Any] | None) -> str:
        if held_out is None:
            return "not measured"
        low, high = held_out["interval_95"]
        return f"{percent(held_out['accuracy'])} ({100 * low:.1f} to {100 * high:.1f})"

    if before is None and after is None:
        return "not measured"
    num_prompts = (after or before or {}).get("num_prompts")
    return f"{words(before)} -> {words(after)}, 95 % intervals, {num_prompts} prompts"


def _split_in_words(split: dict[str, float | None]) -> str:
    parts = [f"{word} {split[word]:.2f}" for word in SECONDS_PER_STEP if split.get(word) is not None]
    total = split.get("total")
    beside = split.get("generation")
    return (
        ("not measured" if total is None else f"{total:.2f}")
        + (f" ({', '.join(parts)})" if parts else "")
        + ("" if beside is None else f"; in parallel, generation of a group {beside:.2f}")
    )


def _memory_in_words(summary: Summary) -> str:
    if not summary.peak_memory_bytes:
        return "not measured"
    parts = sorted(summary.peak_memory_by_process.items(), key=lambda item: -item[1])
    each = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts)
    return f"{gigabytes(summary.peak_memory_bytes)} over all processes (each at its own peak: {each})"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


VERSIONS_FILE = "versions.json"
_LATE = re.compile(r"^(?P<when>\S+) ERROR[^\S\n]+watchdog late (?P<rest>.*)$", re.MULTILINE)
_ENGINE = re.compile(r"\bengine loaded engine=(?P<kind>\S+) version=(?P<version>\S+)")


@dataclass(frozen=True)
class RunRecord:
    folder: Path
    config: RunConfig
    requested: frozenset[str]  # dotted keys of the settings that the user gave
    history: History
    summary: Summary
    versions: Mapping[str, str]
    engines: tuple[str, ...]  # "vllm 0.32.0"; several if it changed at a resume
    alarms: tuple[str, ...]


def read_record(folder: Path) -> RunRecord:
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
            tuple(saved.restarts),
        )
    )
    logs = {log.stem: log.read_text(errors="replace") for log in sorted((folder / "logs").glob("*.log"))}
    # Waits that took longer than is normal, as the watchdog of each process logged them.
    late = [
        f"{found['when']} {process}: late {found['rest']}"
        for process, text in logs.items()
        for found in _LATE.finditer(text)
    ]
    engines = [f"{found['kind']} {found['version']}" for found in _ENGINE.finditer(logs.get("engine", ""))]
    return RunRecord(
        folder=folder,
        config=config,
        requested=frozenset(flatten(read_object(folder / "request.json"))),
        history=history,
        summary=summarize(config, folder, history, outcome),
        versions={str(name): str(version) for name, version in read_object(folder / VERSIONS_FILE).items()},
        engines=tuple(dict.fromkeys(engines)),
        # The launcher's lines say more; a run that goes on, or was started by hand, has only those in the logs.
        alarms=outcome.alarms or tuple(late),
    )
