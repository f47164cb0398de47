"""The limits of our HTTP servers, over real sockets, against a small server whose limits are short."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from treadle.net.connections import connections_that_fit

SERVER = """
import asyncio, json, os, resource, sys
from treadle.log import set_up_logging
from treadle.net.connections import HttpLimits
from treadle.net.address import take_port
from treadle.net.server import serve_until_stopped

gone = num_waiting = 0
released = asyncio.Event()

async def app(scope, receive, send):
    global gone, num_waiting
    if scope["type"] != "http":
        return
    path, status, body = scope["path"], 200, b"hello"
    if path == "/gone":
        body = b"%d" % gone
    elif path.startswith("/file-limit/"):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(path.split("/")[2]), hard))
    elif path == "/big":
        body = b"x" * (32 << 20)
    elif path.startswith("/wait"):
        num_waiting += 1
        await asyncio.sleep(float(path[6:] or 0.5))
        num_waiting -= 1
    elif path == "/num-waiting":
        body = b"%d" % num_waiting
    elif path == "/release":
        released.set()
    elif path == "/keep":
        while (await receive())["type"] != "http.disconnect":
            pass
        num_waiting += 1
        await released.wait()
    elif path == "/too-large":
        status = 413
    elif path == "/echo":
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                gone += 1
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        body = json.dumps([len(body), [name.decode() for name, _ in scope["headers"]], scope["client"][0]]).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(body))]})
    if path == "/stream":
        await released.wait()
    await send({"type": "http.response.body", "body": body})

set_up_logging()
listener = take_port("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
serve_until_stopped(app, listener, lambda: None, HttpLimits(**json.loads(sys.argv[1])))
"""

LIMITS = {"max_connections": 20, "linger_s": 0.3, "max_parting": 4, "sweep_s": 0.05}
PATIENT = {"read_timeout_s": 30.0, "idle_s": 30.0, "write_timeout_s": 30.0}  # where the time is not what is tested
SHORT = {"read_timeout_s": 0.4, "idle_s": 2.0, "write_timeout_s": 1.0}
SOON_S = 10.0  # what takes a second on an idle machine
HOST = b"Host: 127.0.0.1\r\n"


class SmallServer:
    def __init__(self, setup="", **limits) -> None:
        command = [sys.executable, "-c", setup + SERVER, json.dumps(LIMITS | SHORT | limits)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())
        self.errors = ""
        with self.connect() as client:
            client.sendall(get())
            assert read_answer(client)[1] == b"hello"
            self.files_of_its_own = self.num_files() - 1

    def connect(self, timeout=30.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def talk(self, raw: bytes, timeout=30.0) -> bytes:
        """Everything that comes back until the server closes."""
        with self.connect(timeout) as client:
            client.sendall(raw)
            return read_to_end(client)

    def get(self, path: str) -> tuple[int, bytes]:
        answer = self.talk(f"GET {path} HTTP/1.1\r\n".encode() + HOST + b"Connection: close\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def has_closed_all(self, within_s=20.0) -> bool:
        """Whether every connection's file goes back."""
        end = time.monotonic() + within_s
        while (found := self.num_files()) > self.files_of_its_own and time.monotonic() < end:
            time.sleep(0.02)
        return found <= self.files_of_its_own

    def stop(self) -> tuple[int, float]:
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        _, self.errors = self.process.communicate(timeout=30)
        return self.process.returncode, time.monotonic() - began


def read_to_end(client: socket.socket) -> bytes:
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(1 << 20):
            received += data
    return bytes(received)


def read_answer(client: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of one answer on a connection that stays open."""
    received = b""
    while b"\r\n\r\n" not in received:
        data = client.recv(65536)
        assert data, received
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split()[0])
    while len(body) < length:
        body += client.recv(65536)
    return head, body


def seconds_until_closed(client: socket.socket) -> tuple[bytes, float]:
    began = time.monotonic()
    return read_to_end(client), time.monotonic() - began


@pytest.fixture(scope="module")
def server() -> Iterator[SmallServer]:
    """It waits for its clients: nothing here depends on how fast the machine is."""
    yield from started_and_stopped(**PATIENT)


@pytest.fixture(scope="module")
def hasty() -> Iterator[SmallServer]:
    """Its limits are short: for tests of what happens when time is up."""
    yield from started_and_stopped(**SHORT)


def started_and_stopped(**limits) -> Iterator[SmallServer]:
    started = SmallServer(**limits)
    yield started
    code, _ = started.stop()
    assert code == 0, started.errors
    assert "Traceback" not in started.errors, started.errors


@pytest.fixture
def start() -> Iterator[Callable[..., SmallServer]]:
    """A server of the test's own; ended with it, however it ends."""
    started: list[SmallServer] = []

    def start_one(setup="", **limits) -> SmallServer:
        started.append(SmallServer(setup, **limits))
        return started[-1]

    yield start_one
    for each in started:
        each.process.kill()
        each.process.communicate()


def get(path: str = "/hello", *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]).encode()


def post(path: str, body: bytes, *headers: str) -> bytes:
    fields = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(fields).encode() + body


def chunked(path: str, body: bytes, *headers: str) -> bytes:
    fields = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Transfer-Encoding: chunked", *headers, "", ""]
    return "\r\n".join(fields).encode() + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def detail(answer: bytes) -> str:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["detail"]


# Ordinary use


def test_small_answers_on_a_kept_connection_come_at_once(server):
    with server.connect() as client:
        seconds = []
        for _ in range(50):
            began = time.perf_counter()
            client.sendall(get())
            _, body = read_answer(client)
            seconds.append(time.perf_counter() - began)
        assert body == b"hello"
    assert sorted(seconds)[5] < 0.02  # Nagle and delayed acknowledgements make every one 0.04


def test_the_answer_tells_nothing_about_the_server(server):
    head = server.talk(get("/hello", "Connection: close")).partition(b"\r\n\r\n")[0].lower()
    assert b"server:" not in head
    assert b"date:" not in head


def test_a_header_cannot_say_where_a_client_is(server):
    answer = server.talk(post("/echo", b"", "X-Forwarded-For: 10.0.0.1", "Connection: close"))
    assert json.loads(answer.partition(b"\r\n\r\n")[2])[2] == "127.0.0.1"


def test_requests_sent_ahead_are_answered_in_order(server):
    answer = server.talk(post("/echo", b"abc") + get("/wait") + post("/echo", b"", "Connection: close"))
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.index(b"[3, ") < answer.index(b"hello") < answer.index(b"[0, ")


def test_too_many_requests_sent_ahead_end_the_connection_after_some(server):
    answer = server.talk(get("/wait") + get() * 200)
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 200") == answer.count(b"hello") == 33


def test_a_bad_request_behind_a_good_one_does_not_spoil_its_answer(server):
    for bad in (b"rubbish\r\n\r\n", chunked("/echo", b"zz\r\n")):
        answer = server.talk(get("/wait") + bad)
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"hello")


def test_expect_100_continue(server):
    with server.connect() as client:
        request = post("/echo", b"abc", "Expect: 100-continue")
        client.sendall(request[:-3])
        assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"abc")
        assert b"[3, " in read_to_end(client)
    assert status(server.talk(post("/echo", b"abc", "Expect: the-unexpected"))) == 417


def test_a_refusal_before_the_body_was_asked_for_ends_the_connection(server):
    """Or else the next request of a client that never sends it would be taken for its body."""
    with server.connect() as client:
        client.sendall(post("/too-large", b"abc", "Expect: 100-continue")[:-3])
        answer = read_to_end(client)
    assert status(answer) == 413
    assert b"connection: close" in answer


def test_upgrades_are_not_followed_and_end_the_connection(server):
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA==")
    answer = server.talk(get("/hello", *upgrade) + get("/other"))
    assert status(answer) == 200
    assert answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer
    assert status(server.talk(post("/echo", get("/other"), "Connection: Upgrade", "Upgrade: h2c"))) == 400


# Heads


@pytest.mark.parametrize("piece", [1 << 20, 1400, 7])
def test_a_head_of_16_kib_is_the_largest(server, piece):
    def send(num_bytes: int) -> bytes:
        request = get("/hello", "Connection: close", "X-Long: " + "x" * num_bytes)
        with server.connect() as client:
            with contextlib.suppress(ConnectionError):
                for start in range(0, len(request), piece):
                    client.sendall(request[start : start + piece])
            return read_to_end(client)

    assert status(send(16_000)) == 200
    refused = send(17_000)
    assert status(refused) == 431
    assert "16384 bytes" in detail(refused)
    assert status(send(70_000)) == 431


def test_a_hundred_headers_are_the_most(server):
    assert status(server.talk(get("/hello", "Connection: close", *["X: y"] * 98))) == 200
    assert status(server.talk(get("/hello", "Connection: close", *["X: y"] * 99))) == 431
    with server.connect() as client:  # a head with exactly 100 headers that is not complete yet
        client.sendall(get("/hello", "Connection: close", *["X: y"] * 98)[:-2])
        time.sleep(0.05)
        client.sendall(b"\r\n")
        assert status(read_to_end(client)) == 200


def test_trailers_do_not_become_headers_and_have_an_end(server):
    answer = server.talk(chunked("/echo", b"1\r\na\r\n0\r\nX-Late: 1\r\nHost: evil\r\n\r\n", "Connection: close"))
    length, names, _ = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (length, names) == (1, ["host", "transfer-encoding", "connection"])
    with server.connect() as client:
        client.sendall(chunked("/echo", b"1\r\na\r\n0\r\nX-Late: "))
        with contextlib.suppress(ConnectionError):
            for _ in range(60):
                client.sendall(b"x" * 1000)
                time.sleep(0.002)
        answer = read_to_end(client)
    assert status(answer) == 400
    assert "framing" in detail(answer)


def test_the_smallest_chunks_are_accepted(server):
    answer = server.talk(chunked("/echo", b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n", "Connection: close"))
    assert b"[20000, " in answer


# Time


def test_headers_that_trickle_are_ended_with_408(hasty):
    began = time.monotonic()
    with hasty.connect() as client:
        client.settimeout(0.1)
        answer = b""
        for byte in get("/hello", "X-Long: " + "x" * 100):
            client.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                answer = client.recv(1000)
                break
    assert 0.3 < time.monotonic() - began < SOON_S
    assert status(answer) == 408


@pytest.mark.parametrize("drip", [b"", b"\r\n"])
def test_a_connection_that_never_asks_for_anything_is_closed(hasty, drip):
    with hasty.connect() as client:
        client.settimeout(0.1)
        began = time.monotonic()
        while time.monotonic() - began < SOON_S:
            try:
                client.sendall(drip)
                assert client.recv(100) == b""
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert 0.3 < time.monotonic() - began < SOON_S


def test_a_kept_connection_may_be_idle_for_a_while(hasty):
    with hasty.connect() as client:
        client.sendall(get())
        read_answer(client)
        time.sleep(0.55)  # longer than a request may take to arrive
        client.sendall(get())
        assert read_answer(client)[1] == b"hello"
        rest, seconds = seconds_until_closed(client)
    assert rest == b""
    assert 1.5 < seconds < SOON_S


def test_a_head_does_not_wait_for_a_body_that_comes_late(server):
    with server.connect() as client:
        client.sendall(get("/stream"))
        assert client.recv(1000).endswith(b"\r\n\r\n")
        server.get("/release")
        assert client.recv(1000) == b"hello"


def test_an_answer_may_take_longer_than_any_limit_on_the_client(hasty):
    assert hasty.talk(get("/wait/2.5", "Connection: close")).endswith(b"hello")


def test_a_body_that_stops_is_answered_408_and_the_application_notified(hasty):
    before = int(hasty.get("/gone")[1])
    with hasty.connect() as client:
        client.sendall(post("/echo", b"x" * 100)[:-50])
        answer, seconds = seconds_until_closed(client)
    assert status(answer) == 408
    assert 0.35 < seconds < SOON_S
    assert int(hasty.get("/gone")[1]) == before + 1


def test_a_body_that_comes_byte_by_byte_is_answered_408(hasty):
    """However long it was announced to be: a byte now and then must not keep it open."""
    with hasty.connect() as client:
        client.settimeout(0.1)
        client.sendall(post("/echo", b"")[:-4].replace(b"Content-Length: 0", b"Content-Length: 60000000") + b"\r\n\r\n")
        answer, began = b"", time.monotonic()
        while not answer and time.monotonic() - began < SOON_S:
            with contextlib.suppress(TimeoutError):
                client.sendall(b"x")
                answer = client.recv(1000)
    assert status(answer) == 408
    assert "bytes a second" in detail(answer)


def test_a_body_that_is_slow_but_fast_enough_is_taken(start):
    server = start(read_timeout_s=1.0, min_body_bytes_per_s=10)
    with server.connect() as client:
        whole = post("/echo", b"x" * 500)
        client.sendall(whole[:-500])
        for _ in range(25):  # 200 bytes a second, over more than two of the times in which a body must bring enough
            client.sendall(b"x" * 20)
            time.sleep(0.1)
        assert json.loads(read_answer(client)[1])[0] == 500


def test_a_pause_of_the_server_takes_nothing_of_a_bodys_time(start):
    server = start(read_timeout_s=2.5)
    with server.connect() as client:
        whole = post("/echo", b"x" * 500)
        client.sendall(whole[:-250])
        time.sleep(0.1)  # the application has begun to read it
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        server.process.send_signal(signal.SIGCONT)
        time.sleep(0.3)  # the limits have been looked at
        client.sendall(whole[-250:])
        assert json.loads(read_answer(client)[1])[0] == 500


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_who_sends_a_large_body_still_reads_the_refusal(server, connection):
    """A plain close would reset the connection, and the client would see that instead of the 413."""
    with server.connect() as client:
        client.sendall(post("/too-large", b"x" * (8 << 20), f"Connection: {connection}"))
        assert b" 413 " in read_answer(client)[0]
        if connection == "keep-alive":
            client.sendall(get())
            assert read_answer(client)[1] == b"hello"


def test_a_refused_body_that_never_ends_is_closed(hasty):
    assert hasty.has_closed_all()
    with hasty.connect() as client:
        client.sendall(post("/too-large", b"x" * 100)[:-50])
        assert b" 413 " in read_answer(client)[0]
        client.sendall(b"x")
        _, seconds = seconds_until_closed(client)
    assert seconds < SOON_S
    assert hasty.has_closed_all()


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_a_client_that_never_reads_is_cut_off(hasty, connection):
    assert hasty.has_closed_all()
    with hasty.connect() as client:
        client.sendall(get("/big", f"Connection: {connection}"))
        deadline = time.monotonic() + SOON_S
        while hasty.num_files() == hasty.files_of_its_own:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert hasty.has_closed_all()
        received = read_to_end(client)
    assert len(received) < 32 << 20


def test_a_client_that_reads_slowly_gets_everything(hasty):
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        client.settimeout(30.0)
        client.connect(("127.0.0.1", hasty.port))
        client.sendall(get("/big", "Connection: close"))
        received, began = 0, time.monotonic()
        while data := client.recv(1 << 20):
            received += len(data)
            time.sleep(0.05)
        assert time.monotonic() - began > 1.2  # longer than a client may take nothing
    assert received > 32 << 20


# Numbers


def test_one_connection_too_many_is_answered_503(server):
    assert server.has_closed_all()
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(server.connect()) for _ in range(20)]
        for client in held:
            client.sendall(get())
            read_answer(client)
        with server.connect() as one_more:
            time.sleep(0.05)
            one_more.sendall(post("/echo", b"x" * 100_000))
            answer = read_to_end(one_more)
        assert status(answer) == 503
        assert b"retry-after: 2\r\n" in answer
        assert "too many connections" in detail(answer)
        with server.connect() as silent:
            assert status(read_to_end(silent)) == 503
        held[0].sendall(get())  # those who are in are served
        assert read_answer(held[0])[1] == b"hello"
        flood = [stack.enter_context(server.connect()) for _ in range(200)]
        assert all(status(read_to_end(client) or b"- 503 ") == 503 for client in flood)
        held[1].sendall(get())
        assert read_answer(held[1])[1] == b"hello"
    assert server.has_closed_all()


def unfinished(path: str, num_bytes: int) -> bytes:
    return post(path, b"x" * num_bytes)[:-1]


def answered(server: SmallServer, raw: bytes, wanted: int) -> bytes:
    """The answer, once it has this status: bytes are given back a moment after a connection is gone."""
    end = time.monotonic() + SOON_S
    while status(answer := server.talk(raw)) != wanted and time.monotonic() < end:
        time.sleep(0.02)
    return answer


def test_bodies_that_are_too_much_together_are_answered_503(start):
    server = start(**PATIENT, max_body_bytes_in_flight=1 << 20)
    large = post("/echo", b"x" * 600_000, "Connection: close")
    with server.connect() as hoarder:
        hoarder.sendall(unfinished("/echo", 900_000))
        answer = answered(server, large, 503)
        assert status(answer) == 503
        assert b"retry-after: 2\r\n" in answer
        assert "1 MiB already" in detail(answer)
        small = server.talk(post("/echo", b"x" * 10_000, "Connection: close"))
        assert status(small) == 200
        hoarder.sendall(b"x")
        assert json.loads(read_answer(hoarder)[1])[0] == 900_000  # who was first is served
    assert status(answered(server, large, 200)) == 200


def test_a_body_sent_ahead_that_is_refused_is_given_back(start):
    server = start(**PATIENT, max_body_bytes_in_flight=1 << 16)
    with server.connect() as client:
        client.sendall(get("/stream") + chunked("/echo", b"7530\r\n" + b"x" * 30_000 + b"\r\nrubbish\r\n"))
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")  # the head of the first answer: all was read by now
        assert status(server.talk(post("/echo", b"x" * 60_000, "Connection: close"))) == 200


def test_large_bodies_that_take_long_make_room_for_others(start):
    """Fast enough to be kept otherwise: they would hold all the room for as long as they like."""
    server = start(read_timeout_s=1.0, min_body_bytes_per_s=1, max_body_bytes_in_flight=1 << 20)
    large = post("/echo", b"x" * 600_000, "Connection: close")
    with server.connect() as hoarder:
        hoarder.sendall(post("/echo", b"x" * 1_000_000)[:-100_000])
        end = time.monotonic() + SOON_S
        while status(answer := server.talk(large)) != 200 and time.monotonic() < end:
            hoarder.send(b"x" * 100)
            time.sleep(0.05)
        assert status(answer) == 200
        assert status(hoarder.recv(1000)) == 503


def test_a_body_counts_until_the_application_is_done_with_it(start):
    """Also when its client is gone: whoever sends and leaves must not be able to fill the memory."""
    server = start(**PATIENT, max_body_bytes_in_flight=1 << 20)
    large = post("/echo", b"x" * 600_000, "Connection: close")
    with server.connect() as leaving:
        leaving.sendall(post("/keep", b"x" * 900_000))
        assert status(answered(server, large, 503)) == 503
    end = time.monotonic() + SOON_S
    while server.get("/num-waiting")[1] != b"1" and time.monotonic() < end:
        time.sleep(0.02)
    assert status(server.talk(large)) == 503
    server.get("/release")
    assert status(answered(server, large, 200)) == 200


def test_bodies_sent_ahead_count_and_are_given_back(start):
    server = start(**PATIENT, max_body_bytes_in_flight=1 << 18)
    large = post("/echo", b"x" * 200_000, "Connection: close")
    with server.connect() as client:
        client.sendall(get("/stream") + post("/echo", b"x" * 100_000))
        assert status(answered(server, large, 503)) == 503
    server.get("/release")
    assert status(answered(server, large, 200)) == 200


def test_the_process_outlives_its_open_files(start):
    """The limit is lowered under the server's feet: accept() fails, nothing crashes or spins, and it recovers."""
    server = start(max_connections=500, read_timeout_s=5.0)
    server.get(f"/file-limit/{server.files_of_its_own + 10}")
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            with contextlib.suppress(OSError):
                stack.enter_context(server.connect(0.2))
        used = _cpu_seconds(server.process.pid)
        time.sleep(0.5)
        assert _cpu_seconds(server.process.pid) - used < 0.25
        assert server.process.poll() is None
    assert server.has_closed_all()
    assert server.get("/hello") == (200, b"hello")
    assert server.stop()[0] == 0
    assert "Traceback" not in server.errors


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_connections_over_the_open_files_limit_are_refused(start):
    few_files = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"
    server = start(few_files, max_connections=1000, read_timeout_s=5.0)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(server.connect()) for _ in range(400)]
        served = refused = 0
        for client in clients:
            client.sendall(get())
        for client in clients:
            head = read_answer(client)[0]
            served, refused = served + (b" 200 " in head), refused + (b" 503 " in head)
    assert served + refused == 400
    assert 80 <= served <= 128
    assert server.stop()[0] == 0
    assert "ulimit -n" in server.errors
    assert "connections_refused" in server.errors


# The end


def test_sigterm_finishes_active_requests_and_drops_the_others(start):
    server = start(write_timeout_s=60.0, read_timeout_s=60.0, idle_s=60.0)
    with server.connect() as working, server.connect() as idle, server.connect() as slow, server.connect() as deaf:
        deaf.sendall(get("/big"))
        slow.sendall(b"GET / HT")
        idle.sendall(get())
        read_answer(idle)
        working.sendall(get("/wait/0.8"))  # it has a second, once the server is asked to stop
        deadline = time.monotonic() + SOON_S
        while server.get("/num-waiting")[1] != b"1":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        code, seconds = server.stop()
        assert read_answer(working)[1] == b"hello"
        assert read_to_end(idle) == b""
    assert code == 0
    assert seconds < SOON_S


def test_ctrl_c_ends_it_too(start):
    server = start()
    server.process.send_signal(signal.SIGINT)
    _, errors = server.process.communicate(timeout=30)
    assert (server.process.returncode, errors) == (0, "")


@pytest.mark.parametrize(("limit", "warns"), [(20_000, False), (4096, True)])
def test_a_few_connections_less_than_wanted_are_no_warning(
    limit: int, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine wants 20,000, and some files are the process's own."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with caplog.at_level("WARNING"):
        room = connections_that_fit(20_000)
    assert limit - 1000 < room < limit
    assert ("fewer_connections" in caplog.text) == warns
