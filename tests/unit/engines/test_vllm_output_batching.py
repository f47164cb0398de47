"""Which tokens vLLM's engine process sends now, and which it sends together later (output_batching.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from treadle.engines.vllm.output_batching import OutputBatching, StepLogprobs


class Lists(NamedTuple):
    """vLLM's LogprobsLists."""

    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    cu_num_generated_tokens: Any = None


@dataclass
class Output:
    """vLLM's EngineCoreOutput."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    new_logprobs: Any = None
    prefill_stats: Any = None
    events: Any = None
    new_prompt_logprobs_tensors: Any = None


@dataclass
class Params:
    num_logprobs: int | None = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    eos_token_id: int | None = None


def run(batching, num_tokens, width=1, send_all_at=None, rows=2):
    """One request, "a", in the second row of each step; its first output has statistics, its last a reason."""
    sent = []
    for t in range(num_tokens):
        ids = np.arange(rows * width).reshape(rows, width) + 100 * t
        lists = StepLogprobs(Lists(ids.astype(np.int32), -ids / 8, ids[:, 0] + 1))
        output = Output("a", [int(ids[1, 0])], "length" if t == num_tokens - 1 else None)
        output.prefill_stats = "first" if t == 0 else None
        sent.append(batching.due([output], lists, {"b": 0, "a": 1}, send_all=t == send_all_at))
    return sent


def all_of(sent):
    outputs = [output for step in sent for output in step]
    return [t for output in outputs for t in output.new_token_ids], outputs


def test_a_request_for_its_final_output_gets_few_messages():
    batching = OutputBatching(tokens_per_message=8)
    batching.add("a", Params(), may_wait=True)
    tokens, outputs = all_of(run(batching, 40))
    assert tokens == [100 * t + 1 for t in range(40)]
    assert len(outputs) <= 7
    for output in outputs:  # each token with its own logprob and rank
        ids = np.array(output.new_token_ids)
        assert output.new_logprobs.logprob_token_ids[:, 0].tolist() == output.new_token_ids
        assert output.new_logprobs.logprobs[:, 0].tolist() == (-ids / 8).tolist()
        assert output.new_logprobs.sampled_token_ranks.tolist() == (ids + 1).tolist()


@pytest.mark.parametrize(
    ("params", "may_wait"),
    [(Params(), False), (Params(stop=("end",)), True), (Params(num_logprobs=-1), True)],
    ids=["stream", "stop strings", "whole vocabulary"],
)
def test_other_requests_get_each_token_at_once(params, may_wait):
    batching = OutputBatching(tokens_per_message=8)
    batching.add("a", params, may_wait=may_wait)
    assert [len(step) for step in run(batching, 5)] == [1] * 5


def test_a_request_gets_no_more_logprobs_than_it_asked_for():
    batching = OutputBatching(tokens_per_message=4)
    batching.add("a", Params(num_logprobs=1), may_wait=True)
    _, outputs = all_of(run(batching, 9, width=4))  # another one in the batch asks for three
    assert {output.new_logprobs.logprobs.shape[1] for output in outputs} == {2}


def test_a_request_without_logprobs_gets_none():
    batching = OutputBatching(tokens_per_message=4)
    batching.add("a", Params(num_logprobs=None), may_wait=True)
    tokens, outputs = all_of(run(batching, 9))
    assert len(tokens) == 9
    assert all(output.new_logprobs is None for output in outputs)


def test_all_pending_tokens_are_sent_before_a_pause():
    batching = OutputBatching(tokens_per_message=100)
    batching.add("a", Params(), may_wait=True)
    sent = run(batching, 6, send_all_at=4)
    assert all_of(sent[:5])[0] == [100 * t + 1 for t in range(5)]


def test_requests_that_start_together_send_in_different_steps():
    batching = OutputBatching(tokens_per_message=32)
    names = [f"r{i}" for i in range(32)]
    for name in names:
        batching.add(name, Params(num_logprobs=None), may_wait=True)
    counts = [len(batching.due([Output(name, [t]) for name in names], None, {}, send_all=False)) for t in range(128)]
    assert max(counts) <= 2


def test_the_output_of_an_aborted_request_is_sent():
    batching = OutputBatching(tokens_per_message=4)
    batching.add("a", Params(), may_wait=True)
    batching.remove(["a", "unknown"])
    ended = Output("a", [], "abort")
    assert batching.due([ended], None, {}, send_all=False) == [ended]


def test_kept_tokens_are_sent_with_the_next_message():
    batching = OutputBatching(tokens_per_message=8)
    batching.add("a", Params(eos_token_id=7), may_wait=True)
    kept, sent = [], []
    for t in range(20):
        ids = np.array([[0], [100 * t + 1]])
        step = StepLogprobs(Lists(ids.astype(np.int32), -ids / 8, ids[:, 0] + 1))
        kept.append(batching.keep("a", 100 * t + 1, step, 1))
        if not kept[-1]:
            output = Output("a", [100 * t + 1], prefill_stats="first" if t == 0 else None)
            sent += batching.due([output], step, {"a": 1}, send_all=False)
    assert sum(kept) >= 15
    tokens = [token for output in sent for token in output.new_token_ids]
    assert tokens == [100 * t + 1 for t in range(len(tokens))]
    for output in sent:
        assert output.new_logprobs.logprob_token_ids[:, 0].tolist() == output.new_token_ids
        assert output.new_logprobs.logprobs[:, 0].tolist() == [-token / 8 for token in output.new_token_ids]


@pytest.mark.parametrize("token", [7, 9], ids=["end of text", "stop token"])
def test_a_token_that_may_end_the_request_is_not_kept(token):
    batching = OutputBatching(tokens_per_message=100)
    batching.add("a", Params(num_logprobs=None, stop_token_ids=(9,), eos_token_id=7), may_wait=True)
    assert not batching.keep("a", 5, None, 0)  # the first one
    batching.due([Output("a", [5], prefill_stats="first")], None, {}, send_all=False)
    assert batching.keep("a", 5, None, 0)
    assert not batching.keep("a", token, None, 0)
    assert not batching.keep("unknown", 5, None, 0)
