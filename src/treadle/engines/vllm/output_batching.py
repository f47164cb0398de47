"""Decide which tokens vLLM's engine process sends now, and which it sends together later. Pure.

vLLM sends each token of each request to its API process separately, with three small arrays for its logprobs. With 512
sequences that is 1,536 arrays per step to slice, encode, send and decode. A request that needs only its final output
gets the same tokens in messages of TOKENS_PER_MESSAGE.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TOKENS_PER_MESSAGE = 32
_STAGGER = 7  # coprime to it: requests that start together send in different steps
_ALL = -1  # logprobs of the whole vocabulary


@dataclass
class _PendingTokens:
    """Tokens of a request that were not sent yet."""

    num_logprobs: int | None  # top tokens in addition to the sampled one; None: no logprobs requested
    num_per_message: int
    num_until_message: int  # tokens; the first token is always sent at once
    end_ids: frozenset[int] = frozenset()  # tokens that end the request
    was_sent: bool = False  # its first token
    token_ids: list[int] = field(default_factory=list)
    logprob_ids: list[list[int]] = field(default_factory=list)  # per token: the sampled token, then the top tokens
    logprobs: list[list[float]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)


class StepLogprobs:
    """The logprobs of one step (vLLM's LogprobsLists), converted to lists once for all requests."""

    def __init__(self, logprobs: Any) -> None:
        self.arrays = logprobs
        self._starts = logprobs.cu_num_generated_tokens
        self.token_ids: list[list[int]] = logprobs.logprob_token_ids.tolist()
        self.logprobs: list[list[float]] = logprobs.logprobs.tolist()
        self.ranks: list[int] = logprobs.sampled_token_ranks.tolist()

    def first_row(self, index: int) -> int:
        return index if self._starts is None else int(self._starts[index])


class OutputBatching:
    """Pending tokens of all running requests."""

    def __init__(self, tokens_per_message: int = TOKENS_PER_MESSAGE) -> None:
        self._tokens_per_message = tokens_per_message
        self._num_added = 0
        self._pending: dict[str, _PendingTokens] = {}

    def add(self, request_id: str, params: Any, *, may_wait: bool) -> None:
        """`params`: vLLM's SamplingParams. The API process searches for stop strings and needs each token at once."""
        may_wait = may_wait and not params.stop and params.num_logprobs != _ALL
        num_per_message = self._tokens_per_message if may_wait else 1
        self._num_added += _STAGGER
        end_ids = frozenset([*(params.stop_token_ids or ()), params.eos_token_id])
        self._pending[request_id] = _PendingTokens(
            params.num_logprobs, num_per_message, 1 + self._num_added % num_per_message, end_ids
        )

    def remove(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._pending.pop(request_id, None)

    def keep(self, request_id: str, token: int, step: StepLogprobs | None, index: int) -> bool:
        """Keep a token that is neither sent now nor the request's first or last; False: it may be one of those."""
        pending = self._pending.get(request_id)
        if pending is None or not pending.was_sent or token in pending.end_ids:
            return False
        if len(pending.token_ids) + 1 >= pending.num_until_message:
            return False
        pending.token_ids.append(token)
        if step is not None and pending.num_logprobs is not None:
            row = step.first_row(index)
            pending.logprob_ids.append(step.token_ids[row])
            pending.logprobs.append(step.logprobs[row])
            pending.ranks.append(step.ranks[row])
        return True

    def due(
        self, outputs: list[Any], step: StepLogprobs | None, index_of: dict[str, int], *, send_all: bool
    ) -> list[Any]:
        """The outputs of a step that are sent now, each with the pending tokens of its request.

        `step`: the logprobs of the whole step, or None. The outputs have none yet.
        """
        sent = []
        for output in outputs:
            pending = self._pending.get(output.request_id)
            if pending is None:  # it was aborted
                sent.append(output)
                continue
            new_ids = output.new_token_ids
            pending.token_ids += new_ids
            if step is not None and pending.num_logprobs is not None and new_ids:
                first = step.first_row(index_of[output.request_id])
                rows = slice(first, first + len(new_ids))
                pending.logprob_ids += step.token_ids[rows]
                pending.logprobs += step.logprobs[rows]
                pending.ranks += step.ranks[rows]
            is_due = len(pending.token_ids) >= pending.num_until_message or output.finish_reason is not None
            if is_due or send_all or _has_more_than_tokens(output):
                sent.append(_merge(output, pending, None if step is None else step.arrays))
        return sent


def _has_more_than_tokens(output: Any) -> bool:
    """True for the first output of each request."""
    return (
        output.prefill_stats is not None or output.events is not None or output.new_prompt_logprobs_tensors is not None
    )


def _merge(output: Any, pending: _PendingTokens, logprobs: Any) -> Any:
    output.new_token_ids, pending.token_ids = pending.token_ids, []
    if pending.logprobs and logprobs is not None:
        # The arrays of a step are as wide as its request with the most top tokens needs.
        width = None if pending.num_logprobs in (None, _ALL) else 1 + (pending.num_logprobs or 0)
        output.new_logprobs = logprobs._replace(
            logprob_token_ids=np.array([row[:width] for row in pending.logprob_ids], logprobs.logprob_token_ids.dtype),
            logprobs=np.array([row[:width] for row in pending.logprobs], logprobs.logprobs.dtype),
            sampled_token_ranks=np.array(pending.ranks, logprobs.sampled_token_ranks.dtype),
            cu_num_generated_tokens=None,
        )
        pending.logprob_ids, pending.logprobs, pending.ranks = [], [], []
    if output.prefill_stats is None:
        pending.num_until_message = pending.num_per_message
    pending.was_sent = True
    return output
