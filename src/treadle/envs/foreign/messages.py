"""Messages as agents send them -> as a chat template takes them, and when two of them are the same. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from treadle.envs.base import Message
from treadle.errors import RequestError
from treadle.wire.generate import MAX_NAME_CHARS

T = TypeVar("T")
Key = tuple[str, str, str, tuple[tuple[str, str], ...]]  # role, name, text, (function, arguments) of each call


def plain(message: Mapping[str, Any]) -> Message:
    """What a chat template takes: one text as content, and the arguments of calls as objects.

    Clients send back what they were given with everything else that the answer's type has ("refusal": null).
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError("every message needs a role")
    found: Message = {"role": short_name(role, "the role of a message"), "content": _text(message.get("content"))}
    for name in ("name", "tool_call_id"):
        if message.get(name):
            text = _as(str, message[name], f"the {name} of a message must be text")
            found[name] = short_name(text, f"the {name} of a message")
    if message.get("tool_calls"):
        calls = _as(list, message["tool_calls"], "the tool_calls of a message must be a list")
        found["tool_calls"] = [_plain_call(call) for call in calls]
    return found


def key_of(message: Message) -> Key:
    """Two messages with the same key are the same one; takes what `plain` gives.

    An agent may strip the white space around a reply, write the arguments of a call in other words, or drop its id:
    what was sampled is in our tokens anyhow.
    """
    calls = tuple(
        (str(call["function"]["name"]), json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls", ())
    )
    text = str(message["content"])
    return (
        message["role"],
        str(message.get("name", "")),
        text.strip() if message["role"] == "assistant" else text,
        calls,
    )


def num_chars(key: Key) -> int:
    role, name, text, calls = key
    return len(role) + len(name) + len(text) + sum(len(function) + len(arguments) for function, arguments in calls)


def short_name(text: str, what: str) -> str:
    if len(text) > MAX_NAME_CHARS:
        raise RequestError(f"{what} has more than {MAX_NAME_CHARS} characters")
    return text


def _as(kind: type[T], value: object, otherwise: str) -> T:
    if not isinstance(value, kind):
        raise RequestError(otherwise)
    return value


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise RequestError("the content of a message must be text, or parts of type text", fix="leave images and audio out")


def _plain_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError("a tool call needs a function with a name")
    name = short_name(function["name"], "the name of a function")
    return {"type": "function", "function": {"name": name, "arguments": _arguments(function)}}


def _arguments(function: Mapping[str, Any]) -> Any:
    """Text on the wire, an object in templates; what is no JSON stays the text it is."""
    given = function.get("arguments")
    if not isinstance(given, str):
        return given or {}
    try:
        return json.loads(given or "{}")
    except json.JSONDecodeError:
        return given
