"""Bodies with too many values are refused before they are decoded; strings do not affect the count."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from treadle.errors import RequestError
from treadle.net.server import json_answer, read_json
from treadle.wire import body_limits
from treadle.wire.body_limits import TooMany, check_json, check_msgpack
from treadle.wire.generate import GenerateRequest


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits: what is tested is the counting."""
    for name, limit in (("OBJECTS", 20), ("LISTS", 40), ("STRINGS", 60), ("PACKED_VALUES", 200), ("PACKED_RUNS", 190)):
        monkeypatch.setattr(body_limits, f"MAX_{name}", limit)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ([{}] * 21, "20 objects"),
        ([[]] * 41, "40 lists"),
        (["x"] * 61, "60 strings"),
        ({str(i): i for i in range(61)}, "60 strings"),
        ([[{"content": ""}] * 21], "20 objects"),
    ],
)
def test_too_many_values_are_named_by_their_kind(body, what):
    for text in (json.dumps(body).encode(), bytearray(json.dumps(body, indent=1), "utf-8")):
        with pytest.raises(TooMany, match=f"at most {what} in one request"):
            check_json(text)


@pytest.mark.parametrize(
    "text", ["{[" * 1000, '"{"' * 100, "\\", '\\"{' * 50, "\\\\" * 9 + "{" * 99, "\u0022[" * 99, "[\\\n" * 99]
)
def test_what_stands_in_strings_does_not_count(text):
    check_json(json.dumps([text, {"a": [text]}] * 5).encode())
    with pytest.raises(TooMany):
        check_json(json.dumps([text] * 5 + [{}] * 21).encode())


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ([{}] * 21, "20 objects"),
        ([[]] * 41, "40 lists"),
        ([None] * 201, "200 values"),
        ([1, 0.5] * 98, "190 changes from one kind of value to another"),
        ({"x": [{"a": 1, "b": [1.5, -70000, 2**40]}] * 21}, "20 objects"),
    ],
)
def test_too_many_packed_values_are_named_by_their_kind(body, what):
    with pytest.raises(TooMany, match=f"at most {what} in one request"):
        check_msgpack(msgspec.msgpack.encode(body))


def test_bytes_inside_packed_values_do_not_count():
    """The codes of empty lists and objects, in all that has a length, and in numbers."""
    codes = bytes([0x80, 0x90, 0xDC, 0xDF])
    texts = [size * "\u0090" for size in (3, 20, 200, 70_000)]
    packed = [codes * size for size in (1, 100, 70_000)]
    extensions = [msgspec.msgpack.Ext(5, codes * size) for size in (1, 2, 4, 100, 20_000)]
    numbers = [-(2.0**-1022), 0x90909090, 0x80, 0x9090, -0x70, -0x7070, -0x70707070, 2**63 + 0x80, -(2**62) - 0x80]
    check_msgpack(msgspec.msgpack.encode([*texts, *packed, *extensions, *numbers, None, True, False] * 7))


def test_the_bodies_of_engines_and_recorders_are_counted_too():
    async def read(http: Request) -> Response:
        try:
            return json_answer(await read_json(http, list[Any], max_bytes=1000))
        except RequestError as error:
            return json_answer(str(error), 400)

    client = TestClient(Starlette(routes=[Route("/", read, methods=["POST"])]))
    assert client.post("/", json=[{}] * 20).status_code == 200
    answer = client.post("/", json=[{}] * 21)
    assert (answer.status_code, answer.json()) == (
        400,
        "the body has too many values: at most 20 objects in one request",
    )


def test_names_that_an_engine_keeps_have_at_most_255_characters():
    def request(name: str) -> bytes:
        return json.dumps({"prompt": "x", "wave": {"id": name, "size": 2, "index": 0}, "adapter": name}).encode()

    assert msgspec.json.decode(request("x" * 255), type=GenerateRequest).adapter == "x" * 255
    with pytest.raises(msgspec.ValidationError, match="255"):
        msgspec.json.decode(request("x" * 256), type=GenerateRequest)
