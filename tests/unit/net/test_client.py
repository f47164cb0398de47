"""The blocking HTTP client and the retry policy, against real sockets."""

from __future__ import annotations

import gzip
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from treadle.errors import DiskFull
from treadle.net.client import BlockingHttpClient, Failure, HttpAnswer, LateAnswer, NoAnswer, Retries, RetryPolicy


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, str, dict[str, str], bytes, int]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((self.command, self.path, dict(self.headers), body, self.client_address[1]))
        packed = gzip.compress(b"packed" * 100)
        content, encoding = (b"not gzip", "gzip") if "broken" in self.path else (packed, "gzip")
        if "gzip" not in (self.headers.get("Accept-Encoding") or ""):
            content, encoding = b"plain", "identity"
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Encoding", encoding)
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = "last" in self.path  # without saying so

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Handler.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_address[1]}"
        serving.shutdown()


def test_a_connection_is_kept_and_replaced_once_the_server_closed_it(server):
    with BlockingHttpClient(f"{server}/t/token", headers={"A": "1"}, timeout_s=5) as client:
        assert client.request("POST", "/x", body=b"hello", headers={"B": "2"}).content == b"plain"
        client.request("GET", "/last")
        threading.Event().wait(0.1)  # for the end of the connection to arrive
        client.request("GET", "/y")
    (method, path, headers, body, first), (_, _, _, _, second), (_, _, _, _, third) = Handler.asked
    assert (method, path, body) == ("POST", "/t/token/x", b"hello")
    assert (headers["A"], headers["B"]) == ("1", "2")
    assert first == second != third


def test_user_and_password_of_the_url_are_sent_as_basic_auth(server):
    BlockingHttpClient(server.replace("http://", "http://me:a%40b@"), timeout_s=5).request("GET", "/x")
    assert Handler.asked[0][2]["Authorization"] == "Basic bWU6YUBi"  # me:a@b


def test_plain_http_goes_through_the_proxy_of_the_environment(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    url = "http://hub.example:8000/t/token"
    assert BlockingHttpClient(url, timeout_s=5, trust_env=True).request("GET", "/x").text == "packed" * 100
    assert Handler.asked[0][1] == "http://hub.example:8000/t/token/x"
    with pytest.raises(NoAnswer):  # what cannot be decompressed is like a connection that broke
        BlockingHttpClient(url, timeout_s=5, trust_env=True).request("GET", "/broken")


def test_a_late_answer_is_distinguished_from_a_missing_server():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(LateAnswer, match=r"no answer within 0.1 s"):
            BlockingHttpClient(url, timeout_s=0.1).request("GET", "/")
    for missing in (url, "http://a..b:80", "http://127.0.0.1:99999"):
        with pytest.raises(NoAnswer) as error:
            BlockingHttpClient(missing, timeout_s=5).request("GET", "/")
        assert not isinstance(error.value, LateAnswer)


def test_the_launcher_can_call_servers_without_importing_aiohttp():
    code = "import sys, treadle.net.probe; print({'aiohttp', 'httpx', 'asyncio', 'uvicorn'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"detail": "no"}', "no"),
        (b'{"error": {"message": "too long", "type": "x"}}', "too long"),
        (b'{"detail": [{"loc": 1}]}', '[{"loc": 1}]'),
        (b'{"other": 1}', '{"other": 1}'),
        (b"plain text", "plain text"),
        (b"", ""),
    ],
)
def test_the_error_message_is_found_in_all_usual_formats(body, message):
    assert HttpAnswer(400, body).message == message


def test_no_answer_429_and_5xx_are_repeated_and_a_full_disk_is_not():
    policy = RetryPolicy(give_up_after_s=1.0)
    for status in (429, 500, 503):
        assert isinstance(policy.check(HttpAnswer(status, b"busy"), "hub"), Failure)
    for status in (200, 204, 404, 409):
        assert policy.check(HttpAnswer(status, b""), "hub") == HttpAnswer(status, b"")
    assert policy.check(LateAnswer("late"), "hub") == Failure("late", is_late=True)
    assert policy.check(NoAnswer("gone"), "hub") == Failure("gone")
    with pytest.raises(DiskFull, match="the disk of the hub is full"):
        policy.check(HttpAnswer(507, b""), "hub")


@pytest.mark.parametrize(("value", "seconds"), [("2", 2.0), ("9999", 60.0), ("-1", 0.0), ("Wed, 21 Oct", 0.0)])
def test_retry_after_is_obeyed_up_to_a_minute(value, seconds):
    policy = RetryPolicy(give_up_after_s=None, longest_pause_s=0.2)
    failure = policy.check(HttpAnswer(503, b"", {"retry-after": value}), "hub")
    assert isinstance(failure, Failure)
    assert failure.retry_after_s == seconds
    pause_s = Retries(policy).pause_s(failure)
    assert pause_s is not None
    assert pause_s >= seconds


def test_pauses_double_with_jitter_until_the_time_is_over():
    retries = Retries(RetryPolicy(give_up_after_s=None, first_pause_s=0.1, longest_pause_s=1.0))
    pauses = [retries.pause_s(Failure("x")) or 0.0 for _ in range(50)]
    for pause_s, longest_s in zip(pauses, [0.1, 0.2, 0.4, 0.8] + [1.0] * 46, strict=True):
        assert longest_s / 2 <= pause_s <= longest_s
    assert len(set(pauses)) > 10
    assert Retries(RetryPolicy(give_up_after_s=0.0)).pause_s(Failure("x")) is None


@pytest.mark.parametrize("variable", ["http_proxy", "all_proxy"])
def test_a_proxy_may_be_given_without_a_scheme(variable: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv(variable, server.removeprefix("http://"))
    with BlockingHttpClient("http://hub.invalid:8000", timeout_s=5, trust_env=True) as client:
        client.request("GET", "/status")
    assert Handler.asked[-1][1] == "http://hub.invalid:8000/status"
    monkeypatch.setenv("no_proxy", "hub.invalid:8000")
    with BlockingHttpClient("http://hub.invalid:8000", timeout_s=5, trust_env=True) as client, pytest.raises(NoAnswer):
        client.request("GET", "/status")
