"""Parse tool calls: <tool_call>{"name": "search", "arguments": {"query": "O'Hara"}}</tool_call>. Pure.

JSON is parsed from the opening tag to the end of its value, so quotes, braces and even tags inside its strings are
kept. Invalid calls are not repaired but returned as broken, with the reason, so that the model can be informed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_WHITE_SPACE = " \t\r\n"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BrokenCall:
    text: str  # between the tags
    problem: str


def find_tool_calls(text: str) -> list[ToolCall | BrokenCall]:
    """All calls, in order.

    >>> find_tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1})]
    """
    return list(_calls(text))


def without_tool_calls(text: str) -> str:
    """The text before the first call."""
    return text.partition(_OPEN)[0]


def _calls(text: str) -> Iterator[ToolCall | BrokenCall]:
    place = text.find(_OPEN)
    while place >= 0:
        begin = place + len(_OPEN)
        try:
            value, end = _read_value(text, begin)
            yield _as_call(value, text[begin:end])
        except (ValueError, RecursionError) as error:
            end = _end_of_broken(text, begin)
            yield BrokenCall(text[begin:end].strip(), f"not JSON: {error or type(error).__name__}")
        place = text.find(_OPEN, end)


def _read_value(text: str, begin: int) -> tuple[Any, int]:
    """The JSON value at `begin`, and its end; ValueError if there is none, or something follows it."""
    while text[begin : begin + 1] and text[begin] in _WHITE_SPACE:
        begin += 1
    value, end = _DECODER.raw_decode(text, begin)
    rest = text[end:].lstrip(_WHITE_SPACE)
    if rest and not rest.startswith((_CLOSE, _OPEN)):  # at the end of a text the closing tag may be missing
        raise ValueError(f"there is more behind the value: {rest.partition(_CLOSE)[0]!r:.40}")
    return value, end


def _as_call(value: Any, text: str) -> ToolCall | BrokenCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return BrokenCall(text.strip(), 'a call is {"name": "...", "arguments": {...}}')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some models write the object as text
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return BrokenCall(text.strip(), '"arguments" is no object')
    return ToolCall(value["name"], arguments)


def _end_of_broken(text: str, begin: int) -> int:
    ends = [place for tag in (_CLOSE, _OPEN) if (place := text.find(tag, begin)) >= 0]
    return min(ends, default=len(text))


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)  # allows line breaks within strings
