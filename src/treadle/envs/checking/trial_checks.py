"""What the scores of tried answers say about a task: does the right one pay, and does no other? Pure."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treadle.envs.base import Environment
from treadle.envs.checking.findings import Finding, Verdict
from treadle.envs.checking.trials import Kind, Trial

# Errors of code that is wrong whatever the answer is, and where a described error says that it arose.
_SLIP = re.compile(r"\b(TypeError|AttributeError|NameError|UnboundLocalError|ImportError|ModuleNotFoundError)\b")
_PLACE = re.compile(r", at (\S[^;]*:\d+)")


@dataclass(frozen=True)
class Lure:
    """An answer that must not pay, and the share of the items on which it may do so by chance."""

    name: str
    warn_above: float
    fail_above: float
    remedy: str
    min_items: int = 1  # of fewer, the share says nothing


LURES: Mapping[Kind, Lure] = {
    "empty": Lure("empty answers", 0, 0.05, "give nothing for an answer without content"),
    "garbage": Lure("garbage", 0, 0.05, "find out what the reward sees in it"),
    "unicode": Lure("random Unicode", 0, 0.05, "find out what the reward sees in it"),
    "very long": Lure("very long answers", 0, 0.05, "length alone must not pay"),
    "constant": Lure("always the same answer", 0.2, 0.5, "balance the answers: it would learn this one by heart", 10),
    "every": Lure("many answers at once", 0.05, 1.0, "look at one answer: the last, or the whole text", 3),
    "another": Lure("another item's answer", 0.05, 1.0, "see whether the reward compares with the item's own answer"),
}


def check_trials(environment: Environment, trials: Sequence[Trial]) -> list[Finding]:
    golds = {id(trial.item): trial for trial in trials if trial.kind == "right"}
    findings = [_check_right(environment, list(golds.values()))]
    for kind, lure in LURES.items():
        scored = [trial for trial in trials if trial.kind == kind and trial.score.reward is not None]
        if scored:
            findings.append(_check_lure(lure, scored, golds))
    return [*findings, _check_failures(trials), _check_time(trials, environment.config.reward_timeout_s)]


def pays(trial: Trial, gold: Trial) -> bool:
    """Whether an answer is right, or worth half as much as the right one."""
    if trial.score.is_right or not gold.score.is_right:
        return trial.score.is_right
    reward, full = trial.score.reward or 0.0, gold.score.reward or 0.0
    return reward >= (full / 2 if full > 0 else full)


def _check_right(environment: Environment, golds: Sequence[Trial]) -> Finding:
    name = "right answers"
    if not any(trial.item.answer for trial in golds):
        return Finding(name, "warning", "the items have no answers, so none was tried")
    missed = [trial for trial in golds if trial.score.reward is not None and not trial.score.is_right]
    num_unscored = sum(trial.score.reward is None for trial in golds)
    if num_unscored and not missed:
        found = f"{num_unscored:,} of {len(golds):,} could not be scored"
        return Finding(name, "problem", found, "see what is said of scoring, below")
    if not missed:
        return Finding(name, "ok", f"{len(golds):,} of {len(golds):,} are right, worth {_worth(golds)}")
    found = f"{len(missed):,} of {len(golds):,} are judged wrong: {_example(missed[0])}"
    is_default = type(environment).gold_completion is Environment.gold_completion
    if environment.has_turns and is_default:  # perhaps no single text, said in every turn, can be right
        return Finding(name, "warning", found, "if one text can be right in every turn, let gold_completion return it")
    remedy = (
        f"correct the rewards or the rows; let gold_completion write the answer as the task asks for it; or, where "
        f"less than {environment.config.right:g} is right, give --env.right"
    )
    return Finding(name, "problem", found, remedy)


def _check_lure(lure: Lure, trials: Sequence[Trial], golds: Mapping[int, Trial]) -> Finding:
    hits = [trial for trial in trials if pays(trial, golds[id(trial.item)])]
    found = f"worth {_worth(trials)}"
    if not hits:
        return Finding(lure.name, "ok", found)
    found += f"; pays on {len(hits):,} of {len(trials):,} items"
    share = len(hits) / len(trials)
    if share <= lure.warn_above or len(trials) < lure.min_items:
        return Finding(lure.name, "ok", found)
    verdict: Verdict = "problem" if share > lure.fail_above else "warning"
    return Finding(lure.name, verdict, f"{found}: {_example(hits[0])}", lure.remedy)


def _check_failures(trials: Sequence[Trial]) -> Finding:
    failed = [trial for trial in trials if trial.score.reward is None]
    if not failed:
        return Finding("scoring", "ok", f"{len(trials):,} answers scored, no failure")
    outcomes = Counter(trial.score.outcome for trial in failed)
    counted = ", ".join(f"{outcome} ({count:,} times)" for outcome, count in outcomes.items())
    first = failed[0]
    found = f"{counted}; first the {first.kind} answer {first.text!r:.60}: {first.score.error}"
    remedy = "score every text: what cannot be read is wrong, not an error"
    if _SLIP.search(first.score.error):
        remedy = where_it_failed(first.score.error)
    elif first.score.outcome == "timed_out":
        remedy = "make it quicker, or raise --env.reward-timeout-s"
    elif first.score.outcome == "out_of_memory":
        remedy = "let it take less, or raise --env.reward-memory-mb"
    return Finding("scoring", "problem", found, remedy)


def where_it_failed(error: str) -> str:
    """The remedy for a slip of the code itself; the error ends with its place, where that is known."""
    place = _PLACE.search(error)
    return f"its code failed at {place.group(1)}" if place else "its code failed: correct it"


def _check_time(trials: Sequence[Trial], limit_s: float) -> Finding:
    times = [trial.seconds for trial in trials]
    found = f"{1000 * statistics.mean(times):.1f} ms an answer, {1000 * max(times):.1f} ms at most"
    if max(times) > limit_s / 2:
        return Finding("scoring time", "warning", found, "make it quicker, or raise --env.reward-timeout-s")
    return Finding("scoring time", "ok", found)


def _worth(trials: Sequence[Trial]) -> str:
    rewards = [trial.score.reward for trial in trials if trial.score.reward is not None]
    if not rewards:
        return "nothing"
    low, high = min(rewards), max(rewards)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _example(trial: Trial) -> str:
    """The end of the prompt: that is where the question is."""
    question = " ".join(trial.item.prompt.split())[-100:]
    return f"{trial.text!r:.80} to '{question}'"
