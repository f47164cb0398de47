"""Take the completions of a run that scored well as examples, by their sampled tokens (rejection sampling)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from treadle.config.schema import RunConfig
from treadle.errors import ConfigError
from treadle.formatting import counted, near
from treadle.sft.data import Example
from treadle.store.browse import Browser, GroupFilter
from treadle.store.choice import open_recorded
from treadle.train.prepare import was_cut_off
from treadle.wire.groups import IGNORED, ScoredGroup, from_stored

AT_ONCE = 100  # groups
DAMAGED = "dead"  # state of a group whose content is not as it was written
PRUNED = "their tokens are no longer kept (--hub.keep-trained-bytes), the oldest first"
UNREADABLE = "their content is damaged, or the trainer failed on it repeatedly"


def load_rollouts(
    config: RunConfig, folder: Path, min_score: float, seq_len: int, say: Callable[[str], None] = lambda _: None
) -> list[Example]:
    """The completions of the run in `folder` that ended by themselves and scored at least `min_score`, the oldest
    first. Of equal ones for the same prompt only the first is taken. `say` gets a line for everything that is left out.
    """
    found: dict[bytes, Example] = {}
    skipped: Counter[str] = Counter()
    num_completions = num_long = num_unscored = 0
    best = float("-inf")
    with open_recorded(config.hub, folder) as browser:
        for group in _groups_in(browser, skipped):
            for rollout, score in enumerate(group.scores):
                if _is_unscored(group, rollout):  # its score is the mean of the others
                    num_unscored += 1
                    continue
                num_completions += 1
                best = max(best, score)
                is_long = len(group.tokens[rollout]) > seq_len or was_cut_off(group, rollout, seq_len)
                num_long += is_long and score >= min_score
                if score >= min_score and not is_long:
                    example = _example_of(group, rollout)
                    if example.is_trained.any():
                        found[example.tokens.tobytes()] = example  # groups come newest first
    for line in _left_out(config, skipped, num_long, num_unscored, min_score, seq_len):
        say(line)
    if not num_completions:
        fix = "name a run that has taken a step"
        if skipped:
            fix = "name another run; a larger --hub.keep-trained-bytes keeps the completions of a new one"
        raise ConfigError(f"{folder} has no completions to train on", fix=fix)
    if not found and num_long:
        raise ConfigError(
            f"{counted(num_long, 'completion')} of {folder} scored at least {min_score:g}, and all were cut off "
            f"or are longer than {seq_len} tokens",
            fix="name a run whose completions end (a larger --env.max-token-length), or raise --train.seq-len",
        )
    if not found:
        raise ConfigError(
            f"no completion of {folder} scored at least {min_score:g}: the best of {num_completions} scored {best:g}",
            fix=f"--min-score {best:g}",
        )
    return list(reversed(found.values()))


def check_tokenizer(run: RunConfig, folder: Path, model: str, model_folder: Path) -> None:
    """Refuse a model whose tokenizer is not that of the run in `folder`, or cannot be compared with it."""
    own, other = (place / "tokenizer.json" for place in (Path(run.engine.model), model_folder))
    missing = [file for file in (own, other) if not file.is_file()]
    if missing and model != run.model:
        raise ConfigError(
            f"the tokenizer of {model} cannot be compared with that of {near(folder)}: there is no {missing[0]}",
            fix="leave --model out, to begin with the model that the run began with",
        )
    if not missing and own.read_bytes() != other.read_bytes():
        raise ConfigError(
            f"the completions of {near(folder)} are tokens of {run.model}, and {model} has another tokenizer",
            fix="leave --model out, or name a model with the same tokenizer",
        )


def _left_out(
    config: RunConfig, skipped: Counter[str], num_long: int, num_unscored: int, min_score: float, seq_len: int
) -> Iterator[str]:
    """What the examples lack, in words: they are a biased part of what was sampled."""
    for why, count in skipped.items():
        yield f"{counted(count, 'group')} skipped: {why}"
    if num_long:
        yield (
            f"{counted(num_long, 'completion')} with a score of at least {min_score:g} left out: cut off, or longer "
            f"than {seq_len} tokens"
        )
    if num_unscored:
        yield f"{counted(num_unscored, 'completion')} left out: they have no score"
    if any(env.ensure_scores_are_not_same for env in config.environments):
        yield (
            "groups with equal scores are missing: the run had --env.ensure-scores-are-not-same, so prompts that were "
            "always answered right are not among the rows"
        )


def _is_unscored(group: ScoredGroup, rollout: int) -> bool:
    outcome = group.overrides[rollout].get("outcome", "scored") if group.overrides else "scored"
    return bool(outcome != "scored")


def _groups_in(browser: Browser, skipped: Counter[str]) -> Iterator[ScoredGroup]:
    """All groups whose content is still kept, the newest first. Counts the others in `skipped`."""
    wanted = GroupFilter()
    while page := browser.find(wanted, AT_ONCE):
        contents = browser.contents([summary.id for summary in page if summary.state != DAMAGED])
        for summary in page:
            if summary.id in contents:
                yield from_stored(contents[summary.id].content())
            elif summary.num_bytes == 0:
                skipped[PRUNED] += 1
            else:
                skipped[UNREADABLE] += 1
        wanted = GroupFilter(before=page[-1].id)


def _example_of(group: ScoredGroup, rollout: int) -> Example:
    is_trained = np.array(group.masks[rollout]) != IGNORED
    is_trained[:1] = False  # nothing predicts the first token
    return Example(np.array(group.tokens[rollout], dtype=np.int32), is_trained)
