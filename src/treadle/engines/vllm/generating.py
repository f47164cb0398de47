"""Inside vLLM's API process: POST /treadle/generate, token ids in and token ids with logprobs out (completions.py).

vLLM's own route writes the text of each token as it comes, and makes a dictionary of its logprobs: most of what this
process does, and all else (a pause, an adapter, the next requests) waits behind it. Here vLLM keeps numbers, and what
is to be read is written once, at the end, by whoever asked.
"""

from __future__ import annotations

import asyncio
import itertools
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
_numbers = itertools.count()


async def generate(scope: MutableMapping[str, Any], receive: Receive) -> Response:
    order = decode_order(await Request(scope, receive).body())
    answers = _answers(scope["app"].state, order)
    if order.stream:
        first = await anext(answers)  # what is refused is refused before it
        return StreamingResponse(_lines(first, answers), media_type="application/x-ndjson")
    whole = await _unless_client_leaves(_whole(answers), receive)
    return Response(b"" if whole is None else msgspec.json.encode(whole), media_type="application/json")


def status_of(error: Exception) -> int:
    """Whether the request is at fault: in 0.26 that is a ValueError, 0.32 has a base of its own for it."""
    from vllm import exceptions

    wrong = (ValueError, getattr(exceptions, "VLLMClientError", ValueError))
    return 400 if isinstance(error, wrong) else 500


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
            yield answer_of(output, has_text=params.detokenize, has_tops=bool(params.logprobs))


async def _whole(answers: AsyncGenerator[Answer, None]) -> Answer:
    async with aclosing(answers):
        async for answer in answers:
            return answer
    raise RuntimeError("vLLM ended a request without an answer")


async def _lines(first: Answer, others: AsyncGenerator[Answer, None]) -> AsyncIterator[bytes]:
    async with aclosing(others):
        yield msgspec.json.encode(first) + b"\n"
        try:
            async for answer in others:
                yield msgspec.json.encode(answer) + b"\n"
        except Exception as error:  # vLLM's errors have no common base; a stream has no status any more to tell it by
            yield msgspec.json.encode({"error": f"{type(error).__name__}: {error}"}) + b"\n"


async def _unless_client_leaves(answer: Awaitable[Answer], receive: Receive) -> Answer | None:
    """What nobody waits for any more is dropped, and vLLM with it."""
    answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await answering if answering.done() else None
    finally:
        leaving.cancel()
        answering.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def answer_of(output: Any, *, has_text: bool, has_tops: bool) -> Answer:
    """`output`: vLLM's RequestOutput, its logprobs flat."""
    prompt = output.prompt_logprobs
    return Answer(
        choices=[_choice(completion, has_text=has_text, has_tops=has_tops) for completion in output.outputs],
        prompt_tops=None if prompt is None else [_entries(prompt, *span) for span in _spans(prompt)],
    )


def _choice(completion: Any, *, has_text: bool, has_tops: bool) -> Choice:
    if completion.finish_reason == "error":
        raise RuntimeError("vLLM's engine could not finish a completion")
    flat, num_new = completion.logprobs, len(completion.token_ids)
    spans = _spans(flat)[-num_new:] if num_new else []  # 0.26 lists all that came before with a moment without tokens
    return Choice(
        index=completion.index,
        token_ids=list(completion.token_ids),
        logprobs=[_floored(flat.logprobs[start]) for start, _ in spans],  # the sampled token is the first of each
        tops=[_entries(flat, start + 1, end) for start, end in spans] if has_tops else [],
        text=completion.text if has_text else None,
        finish_reason=completion.finish_reason,
    )


def _spans(flat: Any) -> list[tuple[int, int]]:
    return list(zip(flat.start_indices, flat.end_indices, strict=True))


def _entries(flat: Any, start: int, end: int) -> dict[int, float]:
    return dict(zip(flat.token_ids[start:end], map(_floored, flat.logprobs[start:end]), strict=True))


def _floored(logprob: float) -> float:
    """
    >>> _floored(-0.5), _floored(float("-inf")), _floored(float("nan"))
    (-0.5, -9999.0, -9999.0)
    """
    return logprob if logprob > LOWEST else LOWEST
