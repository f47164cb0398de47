"""Inside vLLM's API process: POST /treadle/generate, token ids in and token ids with logprobs out (completions.py).

vLLM's own route writes the text of each token as it comes, and makes a dictionary of its logprobs: most of what this
process does, and all else (a pause, an adapter, the next requests) waits behind it. Here vLLM keeps numbers. It writes
text only where it must be seen while it grows: for stop strings, and in streams.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from treadle.engines.vllm.command import MODEL_NAME
from treadle.engines.vllm.completions import Answer, Choice, Order, decode_order

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

LOWEST = -9999.0  # for "never", which JSON has no number for; vLLM's own routes say it so
_NO_ANSWER = "vLLM ended a request without an answer"
_DEAD = "EngineDeadError"
log = logging.getLogger("vllm.treadle")  # beside vLLM's own lines
_numbers = itertools.count()


async def generate(scope: MutableMapping[str, Any], receive: Receive) -> Response:
    order = decode_order(await Request(scope, receive).body())
    answers = _answers(scope["app"].state, order)
    # What is refused is refused before the first answer, so a stream begins when it is there.
    first = await _unless_client_leaves(_first(answers) if order.stream else _whole(answers), receive)
    if first is None:
        return Response()
    if order.stream:
        return StreamingResponse(_lines(first, answers), media_type="application/x-ndjson")
    return Response(msgspec.json.encode(first), media_type="application/json")


def failure_of(error: Exception) -> tuple[int, str]:
    """Status and words of an error; what is not the request's fault goes to vLLM's log too.

    vLLM wraps what it did not expect into an error without words. That a request is at fault, 0.26 says by a
    ValueError, and 0.32 by an error with a base of its own.
    """
    from vllm import exceptions

    at_fault = (ValueError, getattr(exceptions, "VLLMClientError", ValueError))
    for found in (error, error.__cause__):
        if isinstance(found, at_fault):
            return 400, str(found)
    found = error.__cause__ or error
    if type(found).__name__ != _DEAD:  # of that, everybody hears
        log.error("a completion failed", exc_info=found)
    return 500, f"{type(found).__name__}: {found}".rstrip(": ")


async def _answers(state: Any, order: Order) -> AsyncGenerator[Answer, None]:
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kind = RequestOutputKind.DELTA if order.stream else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(**order.sampling, flat_logprobs=True, output_kind=kind)
    adapter = None
    if order.model != MODEL_NAME:
        adapter = state.openai_serving_models.lora_requests.get(order.model)
        if adapter is None:
            raise ValueError(f"no adapter {order.model} is loaded")
    outputs = state.engine_client.generate(
        tokens_input(order.prompt_ids, cache_salt=order.cache_salt),
        params,
        f"treadle-{next(_numbers)}",
        lora_request=adapter,
        priority=order.priority,
    )
    async with aclosing(outputs):
        async for output in outputs:
            yield answer_of(output, has_text=params.detokenize, num_top=params.logprobs or 0)


async def _first(answers: AsyncGenerator[Answer, None]) -> Answer:
    async for answer in answers:
        return answer
    raise RuntimeError(_NO_ANSWER)


async def _whole(answers: AsyncGenerator[Answer, None]) -> Answer:
    last = None
    async for answer in answers:  # one, and to the end: a generator that is left early is a request that is dropped
        last = answer
    if last is None:
        raise RuntimeError(_NO_ANSWER)
    return last


async def _lines(first: Answer, others: AsyncGenerator[Answer, None]) -> AsyncIterator[bytes]:
    async with aclosing(others):
        yield msgspec.json.encode(first) + b"\n"
        try:
            async for answer in others:
                yield msgspec.json.encode(answer) + b"\n"
        except Exception as error:  # vLLM's errors have no common base; a stream has no status any more to tell it by
            yield msgspec.json.encode({"error": failure_of(error)[1]}) + b"\n"


async def _unless_client_leaves(answer: Awaitable[Answer], receive: Receive) -> Answer | None:
    """What nobody waits for any more is dropped, in vLLM too: None."""
    answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await answering if answering.done() else None
    finally:
        leaving.cancel()
        answering.cancel()
        await asyncio.wait({answering})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def answer_of(output: Any, *, has_text: bool, num_top: int) -> Answer:
    """`output`: vLLM's RequestOutput, its logprobs flat."""
    prompt = output.prompt_logprobs
    return Answer(
        choices=[_choice(completion, has_text=has_text, num_top=num_top) for completion in output.outputs],
        prompt_tops=None if prompt is None else [_entries(prompt, *span) for span in _spans(prompt)],
    )


def _choice(completion: Any, *, has_text: bool, num_top: int) -> Choice:
    if completion.finish_reason == "error":
        raise RuntimeError("vLLM's engine could not finish a completion")
    flat, num_new = completion.logprobs, len(completion.token_ids)
    spans = _spans(flat)[-num_new:] if num_new else []  # 0.26 lists all that came before with a moment without tokens
    return Choice(
        index=completion.index,
        token_ids=list(completion.token_ids),
        logprobs=[_number(flat.logprobs[start]) for start, _ in spans],
        tops=[_tops(flat, start, end, num_top) for start, end in spans] if num_top else [],
        text=completion.text if has_text else None,
        finish_reason=completion.finish_reason,
    )


def _spans(flat: Any) -> list[tuple[int, int]]:
    return list(zip(flat.start_indices, flat.end_indices, strict=True))


def _tops(flat: Any, start: int, end: int, num_top: int) -> dict[int, float]:
    """The sampled token is the first of each position. Where it is one of the likeliest it is listed with them again,
    but not where vLLM has put two moments of a stream together."""
    return _entries(flat, start + (end - start > num_top), end)


def _entries(flat: Any, start: int, end: int) -> dict[int, float]:
    return dict(zip(flat.token_ids[start:end], map(_number, flat.logprobs[start:end]), strict=True))


def _number(logprob: float) -> float:
    """
    >>> _number(-0.5), _number(float("-inf"))
    (-0.5, -9999.0)
    """
    if math.isnan(logprob):
        raise RuntimeError("vLLM's logprobs are not numbers: the model's weights may have diverged")
    return max(logprob, LOWEST)
