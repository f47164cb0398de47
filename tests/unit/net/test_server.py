from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from msgspec.inspect import CollectionType, Field, StrType, StructType, TupleType, Type, UnionType, type_info

from treadle.net.address import is_loopback
from treadle.wire import bridge
from treadle.wire.groups import common_prefix


def test_loopback():
    assert is_loopback("http://127.0.0.1:8000/v1")
    assert is_loopback("http://[::1]:8000")
    assert not is_loopback("http://hub.example.org")


@pytest.mark.parametrize(
    ("sequences", "length"), [([[1, 2, 3], [1, 2], [1, 2, 9]], 2), ([[1], [2]], 0), ([[4, 5]], 2), ([[], [1]], 0)]
)
def test_common_prefix(sequences, length):
    assert common_prefix(sequences) == length


REQUESTS = [each for each in vars(bridge).values() if (getattr(each, "__doc__", "") or "").startswith("POST ")]


def unbounded(name: str, found: Type) -> Iterator[str]:
    """Texts and lists without a longest length."""
    if isinstance(found, StrType | CollectionType) and found.max_length is None:
        yield name
    inner: list[Type] = []
    if isinstance(found, UnionType):
        inner = list(found.types)
    elif isinstance(found, TupleType):
        inner = list(found.item_types)
    elif isinstance(found, CollectionType):
        inner = [found.item_type]
    for each in inner:
        yield from unbounded(name, each)


@pytest.mark.parametrize("request_type", REQUESTS, ids=lambda each: each.__name__)
def test_every_text_of_a_request_to_the_bridge_is_bounded(request_type: type[msgspec.Struct]):
    assert len(REQUESTS) >= 10
    described = type_info(request_type)
    assert isinstance(described, StructType)
    fields: tuple[Field, ...] = described.fields
    assert [name for field in fields for name in unbounded(field.encode_name, field.type)] == []
