"""Record per-token logprob differences and advantages of the newest steps, for the colours on the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from treadle.config import TrainConfig
from treadle.log import get_logger
from treadle.track.token_files import FOLDER, RolloutTokens, TokenFiles
from treadle.train.loop import NO_TOKENS, FrozenLogprobs, TokenRecord
from treadle.train.pack import Micro, PackedBatch
from treadle.wire.groups import fingerprint

LARGEST = float(np.finfo(np.float16).max)
log = get_logger("trainer")


class RecentTokenRecord:
    """One rank's tokens of the newest steps. A write error is logged and does not stop the training."""

    def __init__(self, folder: Path, num_steps: int, rank: int = 0) -> None:
        self._files = TokenFiles(folder)
        self._num_steps = num_steps
        self._rank = rank

    def keep(self, step: int, batch: PackedBatch, frozen: FrozenLogprobs) -> None:
        """`frozen`: the logprobs of `batch` from before the update."""
        try:
            self._files.write(step, self._rank, list(tokens_of(batch, frozen)))
            self._files.forget_before(step - self._num_steps + 1)
        except OSError as error:
            log.warning("tokens_not_kept", step=step, problem=str(error))


def open_token_record(config: TrainConfig, metrics_file: Path, rank: int) -> TokenRecord:
    if config.keep_token_steps == 0:
        return NO_TOKENS
    return RecentTokenRecord(metrics_file.parent / FOLDER, config.keep_token_steps, rank)


def tokens_of(batch: PackedBatch, frozen: FrozenLogprobs) -> Iterator[RolloutTokens]:
    names: dict[int, int] = {id(group): fingerprint(group) for group in batch.groups}
    for index, logprobs_L in frozen.own.items():
        yield from _tokens_of_micro(batch.micros[index], logprobs_L, names)


def _tokens_of_micro(micro: Micro, logprobs_L: Tensor, names: dict[int, int]) -> Iterator[RolloutTokens]:
    tokens = micro.loss_tokens
    differences_L = _small(logprobs_L.float().cpu() - tokens.rollout_logprobs_L)
    advantages_L = _small(tokens.advantages_L)
    positions_L = micro.rollout_positions_L.numpy()
    ends_S = np.bincount(tokens.sequences_L.numpy(), minlength=tokens.num_sequences).cumsum().tolist()
    for (group, rollout), start, end in zip(micro.origins, [0, *ends_S], ends_S, strict=False):
        advantages = advantages_L[start:end]
        are_alike = bool((advantages == advantages[:1]).all())
        yield RolloutTokens(
            group=names[id(group)],
            rollout=rollout,
            runs=_runs(positions_L[start:end]),
            differences=differences_L[start:end].tobytes(),
            advantages=(advantages[:1] if are_alike else advantages).tobytes(),
        )


def _small(values_L: Tensor) -> np.ndarray:
    return values_L.numpy().clip(-LARGEST, LARGEST).astype("<f2")


def _runs(positions: np.ndarray) -> list[int]:
    """(start, length) of each run of consecutive positions, flat: `_runs([4, 5, 6, 9])` is [4, 3, 9, 1]."""
    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(positions))
    return np.stack([positions[starts], lengths], axis=1).ravel().tolist()
