"""Hooks for schemathesis, which runs in a separate process. Loaded by test_hub_schemathesis.py.

A random group is never in order, and with a random batch size no batch is ever formed. So some of what was made up is
put right: then the rest of the hub gets to see the random remainder.
"""

from __future__ import annotations

from typing import Any

import msgspec
import schemathesis

from treadle.wire.groups import BINARY_TYPE

LONGEST_WAIT_S = 0.05  # a lease is held for as long as the client says
MOST = {"max_token_len": 1, "vocab_size": 1, "step": 5, "starting_step": 3}


@schemathesis.hook
def map_body(_: schemathesis.HookContext, body: Any) -> Any:
    if isinstance(body, list):
        return [_put_right(each) for each in body]
    return _put_right(body)


def _put_right(body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    mapped = dict(body)
    for name, most in MOST.items():
        if _is_number(body.get(name)) and 0 <= body[name] < 2**40:  # the extremes stay
            mapped[name] = body[name] % most
    if _is_number(body.get("batch_size")) and abs(body["batch_size"]) < 2**63:
        mapped["batch_size"] = 2
    if isinstance(body.get("sequence"), float):  # to JSON Schema 3.0 is an integer; the hub refuses it
        mapped["sequence"] = int(body["sequence"])
    if isinstance(body.get("wait_s"), int | float):
        mapped["wait_s"] = min(body["wait_s"], LONGEST_WAIT_S)
    if _are_rows(body.get("tokens")) and isinstance(body.get("masks"), list) and len(body) % 3:
        tokens = [[abs(token) % 50 for token in row] or [1] for row in body["tokens"]]
        tokens = tokens[:2] if len(tokens) > 1 else tokens * 2
        mapped |= {"tokens": tokens, "masks": tokens, "scores": [0.5, 1.0], "inference_logprobs": None, "env_id": None}
        mapped["policy_version"] = 0
    return mapped


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_rows(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, list) and all(map(_is_number, row)) for row in value)
    )


@schemathesis.serializer(BINARY_TYPE)
def in_our_binary_form(_: schemathesis.SerializationContext, value: Any) -> bytes:
    """Bytes as they are; else a list of values, each packed on its own, as groups are."""
    if isinstance(value, bytes):
        return value
    values = value if isinstance(value, list) else [value]
    return msgspec.msgpack.encode([msgspec.json.encode(each) for each in values])
