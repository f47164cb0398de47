from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from treadle.wire.groups import common_prefix
from treadle.wire.serving import RefuseWebPages, is_loopback


@pytest.fixture
def client():
    async def hello(_):
        return PlainTextResponse("hello")

    return TestClient(RefuseWebPages(Starlette(routes=[Route("/reset_data", hello)])))


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://example.org"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},  # what an <img> of another page sends: no Origin
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_requests_of_web_pages_are_refused(client, headers):
    assert client.get("/reset_data", headers=headers).status_code == 403


@pytest.mark.parametrize("headers", [{}, {"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-origin"}])
def test_our_clients_and_typed_addresses_are_served(client, headers):
    assert client.get("/reset_data", headers=headers).status_code == 200


def test_loopback():
    assert is_loopback("http://127.0.0.1:8000/v1")
    assert is_loopback("http://[::1]:8000")
    assert not is_loopback("http://hub.example.org")


@pytest.mark.parametrize(
    ("sequences", "length"), [([[1, 2, 3], [1, 2], [1, 2, 9]], 2), ([[1], [2]], 0), ([[4, 5]], 2), ([[], [1]], 0)]
)
def test_common_prefix(sequences, length):
    assert common_prefix(sequences) == length
