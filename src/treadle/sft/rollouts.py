"""Take the completions of a run that scored well as examples, by their sampled tokens (rejection sampling)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from treadle.config.schema import RunConfig
from treadle.errors import ConfigError
from treadle.formatting import counted
from treadle.sft.data import Example
from treadle.store.browse import Browser, GroupFilter
from treadle.store.choice import open_recorded
from treadle.train.prepare import was_cut_off
from treadle.wire.groups import IGNORED, ScoredGroup, from_stored

AT_ONCE = 100  # groups
DAMAGED = "dead"  # state of a group whose content is not as it was written


def load_rollouts(config: RunConfig, folder: Path, min_score: float, seq_len: int) -> list[Example]:
    """The completions of the run in `folder` that ended by themselves and scored at least `min_score`, the oldest
    first. Of equal ones for the same prompt only the first is taken."""
    found: dict[bytes, Example] = {}
    num_completions = num_long = 0
    best = float("-inf")
    with open_recorded(config.hub, folder) as browser:
        for group in _groups_in(browser):
            for rollout, score in enumerate(group.scores):
                num_completions += 1
                best = max(best, score)
                is_long = len(group.tokens[rollout]) > seq_len or was_cut_off(group, rollout, seq_len)
                num_long += is_long and score >= min_score
                if score >= min_score and not is_long:
                    example = _example_of(group, rollout)
                    if example.is_trained.any():
                        found[example.tokens.tobytes()] = example  # groups come newest first
    if not num_completions:
        raise ConfigError(f"{folder} has no completions to train on", fix="name a run that has taken a step")
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


def _groups_in(browser: Browser) -> Iterator[ScoredGroup]:
    """All groups whose content is still kept, the newest first."""
    wanted = GroupFilter()
    while page := browser.find(wanted, AT_ONCE):
        contents = browser.contents([summary.id for summary in page if summary.state != DAMAGED])
        for summary in page:
            if summary.id in contents:
                yield from_stored(contents[summary.id].content())
        wanted = GroupFilter(before=page[-1].id)


def _example_of(group: ScoredGroup, rollout: int) -> Example:
    is_trained = np.array(group.masks[rollout]) != IGNORED
    is_trained[:1] = False  # nothing predicts the first token
    return Example(np.array(group.tokens[rollout], dtype=np.int32), is_trained)
