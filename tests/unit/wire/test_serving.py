from __future__ import annotations

import pytest

from treadle.wire.groups import common_prefix
from treadle.wire.serving import is_loopback


def test_loopback():
    assert is_loopback("http://127.0.0.1:8000/v1")
    assert is_loopback("http://[::1]:8000")
    assert not is_loopback("http://hub.example.org")


@pytest.mark.parametrize(
    ("sequences", "length"), [([[1, 2, 3], [1, 2], [1, 2, 9]], 2), ([[1], [2]], 0), ([[4, 5]], 2), ([[], [1]], 0)]
)
def test_common_prefix(sequences, length):
    assert common_prefix(sequences) == length
