"""Parse rows of JSONL, JSON and CSV files, each with its location; broken rows carry the problem. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec

from treadle.errors import ConfigError

SUFFIXES = (".jsonl", ".json", ".csv")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RowError(ValueError):
    """A row cannot be used: `RowError("has no field 'answer'")`; `fix` is shown if this holds for all rows."""

    def __init__(self, problem: str, *, fix: str = "") -> None:
        super().__init__(problem)
        self.fix = fix


@dataclass(frozen=True)
class Row:
    """`Row({"question": "1 + 1?"}, place="train.jsonl:17")`."""

    fields: Mapping[str, Any]
    place: str

    def text(self, *names: str) -> str:
        """The first of these fields that the row has, as text. Numbers are converted: 51.0 is "51"."""
        name = self.has(*names)
        if name is None:
            raise RowError(self.lacks(*names), fix=f"say which column it is: --env.data-columns {names[0]}=COLUMN")
        value = self.fields[name]
        if isinstance(value, int | float) and not isinstance(value, bool):
            text = format(Decimal(str(value)), "f")  # no exponent: 1e-7 is "0.0000001"
            return text.rstrip("0").rstrip(".") if "." in text else text
        if not isinstance(value, str):
            raise RowError(f"the field '{name}' is {value!r:.60}, not text")
        if not value.strip():
            raise RowError(f"the field '{name}' is empty")
        return value

    def has(self, *names: str) -> str | None:
        """The first of these fields that the row has."""
        return next((name for name in names if self.fields.get(name) is not None), None)

    def lacks(self, *names: str) -> str:
        """The message for missing fields, with the existing ones."""
        missing = "has no field" if len(names) == 1 else "has none of the fields"
        wanted, there = (", ".join(f"'{name}'" for name in each) for each in (names, filter(self.has, self.fields)))
        return f"{missing} {wanted}; it has {there or 'none at all'}"

    def rest(self, *used: str) -> dict[str, Any]:
        """The other fields, for rewards."""
        others = {name: value for name, value in self.fields.items() if name not in used}
        try:
            msgspec.msgpack.encode(others)  # as for the reward workers
        except (TypeError, OverflowError, ValueError) as error:
            raise RowError(f"cannot be sent to the processes that score: {error}") from None
        return others


@dataclass(frozen=True)
class BrokenRow:
    place: str
    problem: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.place} {self.problem}"


def parse_rows(data: bytes, name: str) -> Iterator[Row | BrokenRow]:
    """The rows of a file, by its suffix; content that starts with "[" is parsed as an array in any case."""
    data = data.removeprefix(_BYTE_ORDER_MARK)
    if name.endswith(".csv"):
        yield from _parse_csv(data, name)
    elif data.lstrip()[:1] == b"[":
        yield from _parse_array(data, name)
    else:
        for number, line in enumerate(data.split(b"\n"), start=1):
            if line.strip():
                yield _parse_row(line, f"{name}:{number}")


def _parse_array(data: bytes, name: str) -> Iterator[Row | BrokenRow]:
    """Parse each element separately, so that each has its own line and error."""
    try:
        elements = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}", fix="correct the file, or write one row a line") from None
    place, line = 0, 1
    for element in map(bytes, elements):
        start = data.index(element, place)
        line += data.count(b"\n", place, start)
        yield _parse_row(element, f"{name}:{line}")
        line += element.count(b"\n")
        place = start + len(element)


def _parse_csv(data: bytes, name: str) -> Iterator[Row | BrokenRow]:
    try:
        reader = csv.DictReader(io.StringIO(data.decode(), newline=""), strict=True)
        for fields in reader:
            place = f"{name}:{reader.line_num}"
            if None in fields or None in fields.values():
                yield BrokenRow(place, f"does not have the {len(reader.fieldnames or ())} fields of the first line")
            else:
                yield Row(fields, place)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} is not CSV: {error}", fix="correct the file, or write it as JSONL") from None


def _parse_row(text: bytes, place: str) -> Row | BrokenRow:
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return BrokenRow(place, f"is not JSON: {error}")
    return Row(fields, place) if isinstance(fields, dict) else BrokenRow(place, "is no JSON object")
