"""Compare runs: figures, settings that differ, held-out answers that differ, and curves over seeds.

run folders -> read_record() -> group_runs() -> compare() -> Comparison -> comparison_output.py

Runs that differ only by seed form a group. Where a run ran (addresses, ports, devices, folders) makes no difference. A
seed that was run twice is one sample: means and intervals have one run for each seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from treadle.config.load import load_run
from treadle.dash.charts import Chart
from treadle.dash.run_folder import CONFIG_FILE, HeldOut
from treadle.errors import ConfigError
from treadle.formatting import counted, model_name
from treadle.report.comparison_curves import HELD_OUT_CHART, METRIC_CHARTS, Curves, curves_of
from treadle.report.history import Evaluation, History, check_is_run, held_out_of, is_scored
from treadle.report.page import settings_of, task_in_words
from treadle.report.statistics import Estimate, mcnemar_p, mean_of_seeds
from treadle.report.summary import RunRecord, read_record

MEAN_STEPS = 5  # the final reward is the mean over this many last steps
NUM_EXAMPLES = 5  # of each kind, in the page and as JSON
LONGEST_NAME = 50  # characters of the settings in the name of a group
# Where a run ran, and what its files are called.
_PLACE = re.compile(
    r"(^|\.)(output|host|port|gpus|threads|allowed_hosts|(admin_)?token_file|hub_url|engine_url|base_url|router_url)$"
)
_SEED = re.compile(r"(^|\.)seed$")


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `number` stands for it in the other tables."""

    number: int
    name: str
    folder: str
    seed: int
    is_complete: bool
    steps: int  # planned
    steps_taken: int
    before: HeldOut | None  # held-out accuracy before training
    after: HeldOut | None  # the newest one
    final_reward: float | None  # mean of the last steps
    total_s: float
    peak_memory_bytes: int


class SeedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that differ only by seed, one for each seed. Of one the intervals are None: its own are in its figures."""

    name: str
    runs: tuple[int, ...]  # their numbers
    repeated: tuple[int, ...]  # further runs with the same settings and seeds, which are in no mean
    before: Estimate | None
    after: Estimate | None
    score_before: Estimate | None  # the mean score of the held-out answers
    score_after: Estimate | None
    final_reward: Estimate | None


class DifferingSetting(msgspec.Struct, frozen=True):
    key: str
    values: tuple[str, ...]  # one for each group


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, or its last message, that one run answered right and the other wrong."""

    prompt: str
    gold: str
    first: str
    second: str
    is_first_right: bool


class AnswerComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The newest held-out answers of two runs to the same prompts, as far as both could be scored."""

    first: int  # the number of the run
    second: int
    num_prompts: int
    num_unscored: int  # prompts that are left out: one of the runs has no scored answer
    both_right: int
    only_first: int
    only_second: int
    both_wrong: int
    p_value: float  # exact McNemar test, two-sided
    examples: tuple[Answer, ...] = ()


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    words: tuple[str, ...]
    runs: tuple[RunFigures, ...]
    groups: tuple[SeedGroup, ...]
    settings: tuple[DifferingSetting, ...]
    answers: tuple[AnswerComparison, ...]
    charts: tuple[Chart, ...]
    curves: tuple[Curves, ...]


@dataclass(frozen=True)
class ComparedRun:
    number: int
    name: str
    record: RunRecord
    settings: Mapping[str, str]

    @property
    def history(self) -> History:
        return self.record.history

    @property
    def newest(self) -> Evaluation:
        return self.history.evaluations[-1]


def compare_folders(folders: Sequence[Path]) -> Comparison:
    """Read the runs and compare them; ConfigError if there are not two with evaluations."""
    paths = list(dict.fromkeys(folder.expanduser().resolve() for folder in folders))
    if len(paths) < 2:
        raise ConfigError(
            "a comparison needs two runs or more, and one was named" if paths else "no run was named",
            fix="name the folders of two runs; treadle report RUN shows one",
        )
    for path in paths:
        check_is_run(path)
    return compare([_read(number, path, paths) for number, path in enumerate(paths, start=1)])


def compare(runs: Sequence[ComparedRun]) -> Comparison:
    repeats = group_runs(runs)  # with several runs of one seed
    groups = [one_per_seed(group) for group in repeats]
    settings = differing_settings(groups)
    names = [_name_of(group, place, settings) for place, group in enumerate(groups)]
    answers = [compare_answers(first, second) for first, second in pairs_of(repeats)]
    return Comparison(
        words=_words(runs, groups, repeats),
        runs=tuple(map(_figures, runs)),
        groups=tuple(_summary(*each) for each in zip(names, groups, repeats, strict=True)),
        settings=tuple(settings),
        answers=tuple(one for one in answers if one is not None),
        charts=(HELD_OUT_CHART, *METRIC_CHARTS),
        curves=tuple(
            curves_of(name, [run.history for run in group]) for name, group in zip(names, groups, strict=True)
        ),
    )


def _read(number: int, folder: Path, folders: Sequence[Path]) -> ComparedRun:
    record = read_record(folder)
    if not record.history.steps and not record.history.evaluations:
        raise ConfigError(
            f"{folder} has no results yet: no step and no evaluation", fix="leave it out, or wait for its first step"
        )
    if not record.history.evaluations:
        raise ConfigError(
            f"{folder} has no evaluation, so its answers cannot be compared",
            fix="leave it out, or run it with --env.num-eval; treadle dash shows its curves beside those of other runs",
        )
    is_unique = [path.name for path in folders].count(folder.name) == 1
    chosen = load_run(folder / CONFIG_FILE, with_derived=False)  # without ports and folders that the launcher chose
    settings = {
        one.key: one.value.replace(str(folder), "RUN")
        for one in settings_of(chosen, frozenset())
        if not _PLACE.search(one.key)
    }
    return ComparedRun(number, folder.name if is_unique else f"{folder.parent.name}/{folder.name}", record, settings)


def group_runs(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Runs whose settings are equal but for the seed, in the order of the first of each group."""
    groups: dict[tuple[tuple[str, str], ...], list[ComparedRun]] = {}
    for run in runs:
        key = tuple(sorted((key, value) for key, value in run.settings.items() if not _SEED.search(key)))
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def one_per_seed(group: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Of the runs with one seed that with the most steps, else the first: repeating a seed adds no sample."""
    chosen: dict[int, ComparedRun] = {}
    for run in group:
        best = chosen.setdefault(run.record.config.seed, run)
        if run.history.last_step > best.history.last_step:
            chosen[run.record.config.seed] = run
    return list(chosen.values())


def _repeated(group: Sequence[ComparedRun], repeats: Sequence[ComparedRun]) -> tuple[int, ...]:
    counted_ones = {run.number for run in group}
    return tuple(run.number for run in repeats if run.number not in counted_ones)


def differing_settings(groups: Sequence[Sequence[ComparedRun]]) -> list[DifferingSetting]:
    """The settings that differ between the groups. A shared setting is listed once: `model`, not `train.model` too."""
    tables = [group[0].settings for group in groups]
    keys = dict.fromkeys(key for table in tables for key in table if not _SEED.search(key))
    found = {key: values for key in keys if len(set(values := tuple(table.get(key, "") for table in tables))) > 1}
    return [
        DifferingSetting(key, values)
        for key, values in found.items()
        if "." not in key or found.get(key.rpartition(".")[2]) != values
    ]


# ---- figures


def _figures(run: ComparedRun) -> RunFigures:
    summary, (before, after) = run.record.summary, _before_and_after(run.history)
    return RunFigures(
        number=run.number,
        name=run.name,
        folder=str(run.record.folder),
        seed=run.record.config.seed,
        is_complete=summary.is_complete,
        steps=summary.steps,
        steps_taken=summary.steps_taken,
        before=before,
        after=after,
        final_reward=_final_reward(run),
        total_s=summary.total_s,
        peak_memory_bytes=summary.peak_memory_bytes,
    )


def _ends(history: History) -> tuple[Evaluation | None, Evaluation | None]:
    """The evaluation before the first step, and the newest one after it."""
    newest = history.evaluations[-1]
    return history.before, newest if newest.step > 0 else None


def _before_and_after(history: History) -> tuple[HeldOut | None, HeldOut | None]:
    before, after = _ends(history)
    return held_out_of(before) if before else None, held_out_of(after) if after else None


def _final_reward(run: ComparedRun) -> float | None:
    rewards = run.history.values("reward")[-MEAN_STEPS:]
    return fmean(rewards) if rewards else None


def _summary(name: str, group: Sequence[ComparedRun], repeats: Sequence[ComparedRun]) -> SeedGroup:
    ends = [_before_and_after(run.history) for run in group]
    before = _over_seeds([one.accuracy if one else None for one, _ in ends])
    after = _over_seeds([one.accuracy if one else None for _, one in ends])
    return SeedGroup(
        name=name,
        runs=tuple(run.number for run in group),
        repeated=_repeated(group, repeats),
        before=before.as_share() if before else None,
        after=after.as_share() if after else None,
        score_before=_over_seeds([one.mean_score if one else None for one, _ in ends]),
        score_after=_over_seeds([one.mean_score if one else None for _, one in ends]),
        final_reward=_over_seeds([_final_reward(run) for run in group]),
    )


def _over_seeds(values: Sequence[float | None]) -> Estimate | None:
    """None if one of the runs has no value."""
    known = [value for value in values if value is not None]
    return mean_of_seeds(known) if known and len(known) == len(values) else None


def _name_of(group: Sequence[ComparedRun], place: int, settings: Sequence[DifferingSetting]) -> str:
    """ "run 1, 2: train.lr 1e-05"; the name of the first run instead of settings that are long."""
    what = ", ".join(f"{one.key} {one.values[place] or 'empty'}" for one in settings)
    if not what or len(what) > LONGEST_NAME:
        what = group[0].name if len(group) == 1 else f"{group[0].name} and {counted(len(group) - 1, 'other seed')}"
    return f"run {', '.join(str(run.number) for run in group)}: {what}"


# ---- answers


def pairs_of(groups: Sequence[Sequence[ComparedRun]]) -> list[tuple[ComparedRun, ComparedRun]]:
    """Every run with the run of the first group that has its seed, else with the first run.

    Of one group: with its first run.
    """
    base = groups[0]
    if len(groups) == 1:
        return [(base[0], run) for run in base[1:]]
    by_seed = {run.record.config.seed: run for run in reversed(base)}
    return [(by_seed.get(run.record.config.seed, base[0]), run) for group in groups[1:] for run in group]


def compare_answers(first: ComparedRun, second: ComparedRun) -> AnswerComparison | None:
    """None if they were asked no common prompt. Of several answers to a prompt the first one with a score counts."""
    ours, theirs = _answers(first), _answers(second)
    asked = [(ours[key], theirs[key]) for key in ours if key in theirs]
    if not asked:
        return None
    common = [pair for pair in asked if all(map(is_scored, pair))]
    counts = {(mine, other): 0 for mine in (True, False) for other in (True, False)}
    for one, other in common:
        counts[_is_right(one), _is_right(other)] += 1
    differing = [(one, other) for one, other in common if _is_right(one) != _is_right(other)]
    chosen = [
        [pair for pair in differing if _is_right(pair[0]) is is_first_right][:NUM_EXAMPLES]
        for is_first_right in (False, True)
    ]
    return AnswerComparison(
        first=first.number,
        second=second.number,
        num_prompts=len(common),
        num_unscored=len(asked) - len(common),
        both_right=counts[True, True],
        only_first=counts[True, False],
        only_second=counts[False, True],
        both_wrong=counts[False, False],
        p_value=mcnemar_p(counts[True, False], counts[False, True]),
        examples=tuple(_example(one, other) for kind in chosen for one, other in kind),
    )


def _answers(run: ComparedRun) -> dict[tuple[str, str], dict[str, Any]]:
    """The first answer with a score to each prompt, else the first one; by prompt and right answer."""
    answers: dict[tuple[str, str], dict[str, Any]] = {}
    for sample in sorted(run.newest.samples, key=is_scored, reverse=True):  # stable
        answers.setdefault((str(sample.get("prompt")), str(sample.get("gold"))), sample)
    return answers


def _is_right(sample: Mapping[str, Any]) -> bool:
    return bool(sample.get("is_right"))


def _example(one: Mapping[str, Any], other: Mapping[str, Any]) -> Answer:
    return Answer(
        prompt=str(one.get("question") or one.get("prompt")),
        gold=str(one.get("gold")),
        first=str(one.get("completion")),
        second=str(other.get("completion")),
        is_first_right=_is_right(one),
    )


def _words(
    runs: Sequence[ComparedRun],
    groups: Sequence[Sequence[ComparedRun]],
    repeats: Sequence[Sequence[ComparedRun]],
) -> tuple[str, ...]:
    models = dict.fromkeys(model_name(run.record.summary.model) for run in runs)
    tasks = dict.fromkeys(task_in_words(run.record.summary) for run in runs)
    what = f"{counted(len(runs), 'run')}: {', '.join(models)} on {', '.join(tasks)}."
    num_seeded = sum(len(group) > 1 for group in groups)
    seeds = [f"Runs that differ only by seed are grouped: {counted(len(groups), 'group')}."] if num_seeded else []
    unfinished = [str(run.number) for run in runs if not run.record.summary.is_complete]
    note = [f"Not complete: {', '.join(unfinished)}."] if unfinished else []
    unscored = [
        f"{counted(one.num_unscored, 'answer')} of run {run.number} at step {one.step}"
        for run in runs
        for one in _ends(run.history)
        if one is not None and one.num_unscored
    ]
    left_out = [f"Could not be scored, and are in no figure: {', '.join(unscored)}."] if unscored else []
    again = [str(number) for each in zip(groups, repeats, strict=True) for number in _repeated(*each)]
    repeated = [f"In no mean, because another run has the same settings and seed: {', '.join(again)}."] if again else []
    return (what, *seeds, *repeated, *note, *left_out)
