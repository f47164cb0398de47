"""vLLM's scheduler with less work per token, for its engine process. Its `--scheduler-cls` is `create_scheduler`.

It schedules the same computations. Three things differ, because the GPU waits while they are done:
- tokens are sent to the API process several at a time (output_batching.py), statistics a few times per second;
- the KV cache manager is not called for a sequence whose last block has room for the next token;
- a token that is neither sent nor the last one, nor fills a block, is only appended to its sequence: vLLM's own update
  would build an output for it.
"""

from __future__ import annotations

import copy
import time
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from treadle.engines.vllm.output_batching import OutputBatching, StepLogprobs

STATS_S = 0.25  # interval of statistics; vLLM sends them with every step


def create_scheduler(vllm_config: Any, **kwargs: Any) -> LeanScheduler | LeanAsyncScheduler:
    """The scheduler for what vLLM decided: whether it schedules the next step while the present one is computed."""
    kind = LeanAsyncScheduler if vllm_config.scheduler_config.async_scheduling else LeanScheduler
    return kind(vllm_config=vllm_config, **kwargs)


class _LessWorkPerToken:
    """Mixin for both of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batching = OutputBatching()
        self._stats_due = 0.0
        self._appends_tokens = _has_one_kind_of_block(self)
        _skip_unneeded_allocations(self)

    def add_request(self, request: Any) -> None:
        params = request.sampling_params
        if params is not None:
            is_final_only = params.output_kind == RequestOutputKind.FINAL_ONLY and not request.resumable
            self._batching.add(request.request_id, params, may_wait=is_final_only and _is_plain(request))
        super().add_request(request)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        # The logprobs are added to the outputs that are sent.
        logprobs, model_runner_output.logprobs = model_runner_output.logprobs, None
        step = None if logprobs is None else StepLogprobs(logprobs)
        # While paused, no later step would send the pending tokens.
        send_all = self.pause_state != PauseState.UNPAUSED  # type: ignore[attr-defined]
        if not send_all and self._appends_tokens:
            scheduler_output = self._append_tokens(scheduler_output, model_runner_output, step)
        found: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for client, message in list(found.items()):
            message.outputs = self._batching.due(
                message.outputs, step, model_runner_output.req_id_to_index, send_all=send_all
            )
            self._batching.remove(output.request_id for output in message.outputs if output.finish_reason is not None)
            if not message.outputs and message.finished_requests is None and message.scheduler_stats is None:
                del found[client]
        return found

    def _append_tokens(self, scheduler_output: Any, output: Any, step: StepLogprobs | None) -> Any:
        """Append the tokens that need nothing else; returns the step with the other requests.

        The conditions are those under which vLLM's update would change nothing but what is changed here.
        """
        scheduled, sampled = scheduler_output.num_scheduled_tokens, output.sampled_token_ids
        if not sampled or scheduler_output.scheduled_spec_decode_tokens or output.num_nans_in_logits:
            return scheduler_output
        requests, index_of, keep = self.requests, output.req_id_to_index, self._batching.keep  # type: ignore[attr-defined]
        block_size, longest = self.block_size, self.max_model_len  # type: ignore[attr-defined]
        others = {}
        for request_id, num_tokens in scheduled.items():
            request, index = requests.get(request_id), index_of[request_id]
            tokens = sampled[index]
            if (
                num_tokens == 1
                and len(tokens) == 1
                and request is not None
                and request.status == RequestStatus.RUNNING
                and not request.events
                and not _num_stale(request)
                and (num_after := len(request._all_token_ids) + 1) % block_size
                and num_after < longest
                and num_after < request.num_prompt_tokens + request.max_tokens
                and keep(request_id, tokens[0], step, index)
            ):
                request.num_in_flight_tokens -= 1
                request._output_token_ids.append(tokens[0])
                request._all_token_ids.append(tokens[0])
                if request.num_output_placeholders:  # async scheduling
                    request.num_output_placeholders -= 1
            else:
                others[request_id] = num_tokens
        if len(others) == len(scheduled):
            return scheduler_output
        reduced = copy.copy(scheduler_output)
        reduced.num_scheduled_tokens = others
        return reduced

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        finished = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        self._batching.remove(request.request_id for request in finished)
        return finished

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        now = time.monotonic()
        # The last statistics before it is idle are always sent: the API process keeps them until the next request.
        if now < self._stats_due and self.has_unfinished_requests():  # type: ignore[attr-defined]
            return None
        self._stats_due = now + STATS_S
        return super().make_stats(*args, **kwargs)  # type: ignore[misc]


class LeanScheduler(_LessWorkPerToken, Scheduler):
    pass


class LeanAsyncScheduler(_LessWorkPerToken, AsyncScheduler):
    pass


def _num_stale(request: Any) -> int:
    """Tokens that are being sampled and are not wanted any more, since the request was preempted (0.32, 0.26)."""
    return getattr(request, "num_stale_output_tokens", 0) or getattr(request, "async_tokens_to_discard", 0)


def _is_plain(request: Any) -> bool:
    """No option of the request looks at every token."""
    params = request.sampling_params
    return (
        request.structured_output_request is None
        and not params.min_tokens
        and params.repetition_detection is None
        and not request.has_encoder_inputs
    )


def _has_one_kind_of_block(scheduler: Any) -> bool:
    """False if blocks may be freed, or come from elsewhere, at any token."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec or scheduler.connector is not None:
        return False
    return not (scheduler.num_lookahead_tokens or scheduler.need_mamba_block_aligned_split)


def _skip_unneeded_allocations(scheduler: Any) -> None:
    """A sequence needs a new KV cache block once in `block_size` tokens; vLLM checks with every token."""
    if not _has_one_kind_of_block(scheduler):
        return
    manager = scheduler.kv_cache_manager
    allocate, cache = manager.allocate_slots, manager.cache_blocks
    block_size, nothing = scheduler.block_size, manager.empty_kv_cache_blocks

    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        is_decoding = num_new_tokens == 1 and not args and request.status == RequestStatus.RUNNING
        if is_decoding and request.num_computed_tokens % block_size and not any(kwargs.values()):
            return nothing
        return allocate(request, num_new_tokens, *args, **kwargs)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if num_computed_tokens % block_size == 0:  # only full blocks are cached
            cache(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks
