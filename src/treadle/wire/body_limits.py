"""Count the values of a JSON or msgpack body before it is decoded: as objects they may take 60 times its size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

MAX_OBJECTS = 2**20
MAX_LISTS = 2**22  # the distillation fields have one for each token
MAX_STRINGS = 2**22  # keys included
MAX_PACKED_VALUES = 2**24  # of a msgpack body, where a value may be a single byte
MAX_PACKED_RUNS = 2**22  # each takes a microsecond to count

Kind = Literal["values", "lists", "objects"]
_NO_STRUCTURE = bytes(code for code in range(256) if code not in b'"{[')


class TooMany(Exception):
    """More values of a kind than a body may have."""

    def __init__(self, limit: int, what: str) -> None:
        super().__init__(f"at most {limit} {what} in one request")


def check_json(body: bytes | bytearray) -> None:
    """Raises TooMany. What is no JSON passes, or is counted in some way: the decoder refuses it."""
    if len(body) < 2 * MAX_OBJECTS:  # the shortest values that are counted have two bytes
        return
    try:
        _check_json_counts(body, body.count(b'"'))
    except TooMany:  # maybe not, without the brackets and quotes inside of strings
        bare = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_STRUCTURE)
        _check_json_counts(b"", bare.count(b'"'))
        outside = bare.replace(b'""', b"").split(b'"')[::2]  # two quotes change nothing for what follows them
        _check_json_counts(b"".join(outside), 0)


def _check_json_counts(text: bytes | bytearray, num_quotes: int) -> None:
    counted = (
        (num_quotes // 2, MAX_STRINGS, "strings"),
        (text.count(b"{"), MAX_OBJECTS, "objects"),
        (text.count(b"["), MAX_LISTS, "lists"),
    )
    for num, limit, what in counted:
        if num > limit:
            raise TooMany(limit, what)


def check_msgpack(body: bytes) -> None:
    """Raises TooMany. The values of a list or map follow its header, so nesting need not be followed."""
    if len(body) < MAX_OBJECTS:
        return
    limits: dict[Kind, int] = {"values": MAX_PACKED_VALUES, "lists": MAX_LISTS, "objects": MAX_OBJECTS}
    counts: dict[Kind, int] = dict.fromkeys(limits, 0)
    for num_runs, (kind, num) in enumerate(_msgpack_runs(body)):
        counts[kind] += num
        if counts[kind] > limits[kind]:
            raise TooMany(limits[kind], kind)
        if num_runs > MAX_PACKED_RUNS:
            raise TooMany(MAX_PACKED_RUNS, "changes from one kind of value to another")


def _msgpack_runs(body: bytes) -> Iterator[tuple[Kind, int]]:
    """Yields (kind, number) for each run of values of one kind and size. Stops at bytes that are no msgpack."""
    at = 0
    while at < len(body):
        if run := _RUN.match(body, at):
            kind, size, _ = _FIXED[(run.lastindex or 1) - 1]
            yield kind, (run.end() - at) // size
            at = run.end()
        elif width := _LENGTH_WIDTHS.get(body[at]):
            yield "values", 1
            at += 1 + width + int.from_bytes(body[at + 1 : at + 1 + width], "big") + (body[at] in _EXTENSIONS)
        else:
            return


_EXTENSIONS = (0xC7, 0xC8, 0xC9)  # they have a type beside their length
_LENGTH_WIDTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
# All else by its first byte, with its size: of lists and objects that of the header alone.
_FIXED: list[tuple[Kind, int, Iterable[int]]] = [
    ("values", 1, [*range(0x80), 0xC0, 0xC2, 0xC3, *range(0xE0, 0x100)]),  # small integers, nil, false, true
    ("values", 9, [0xCB, 0xCF, 0xD3]),  # numbers
    ("values", 5, [0xCA, 0xCE, 0xD2]),
    ("values", 3, [0xCD, 0xD1]),
    ("values", 2, [0xCC, 0xD0]),
    ("lists", 1, range(0x90, 0xA0)),
    ("lists", 3, [0xDC]),
    ("lists", 5, [0xDD]),
    ("objects", 1, range(0x80, 0x90)),
    ("objects", 3, [0xDE]),
    ("objects", 5, [0xDF]),
    *(("values", 1 + length, [0xA0 + length]) for length in range(32)),  # short strings
    *(("values", 2 + length, [code]) for code, length in zip(range(0xD4, 0xD9), (1, 2, 4, 8, 16), strict=True)),
]
# Possessive (a second plus): backtracking would find nothing else, and takes memory for each value.
_RUN = re.compile(
    b"|".join(
        (b"([%s]++)" if size == 1 else b"((?:[%s]" + b"." * (size - 1) + b")++)") % re.escape(bytes(codes))
        for _, size, codes in _FIXED
    ),
    re.DOTALL,
)
