"""Large and hostile bodies are refused with the right status, cost little memory, and do not delay other requests."""

from __future__ import annotations

import contextlib
import gzip
import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.contract.atropos_calls import JSON, TRAINER, chunked, group, raw_exchange, request_bytes, sized
from tests.hub_process import HubProcess
from treadle.wire.groups import BINARY_TYPE

MIB = 2**20
PACKED = JSON | {"Content-Encoding": "gzip"}
BINARY = {"Content-Type": BINARY_TYPE, "Content-Encoding": "gzip"}
ROOM = 100 * MIB


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(tmp_path_factory.mktemp("big")) as running:
        with httpx.Client(base_url=running.url) as client:  # code that is loaded once must not count later
            assert client.post("/register", json=TRAINER | {"max_token_len": 0}).status_code == 200
            for _ in range(3):
                client.post("/scored_data", content=gzip.compress(json.dumps(group()).encode()), headers=PACKED)
        yield running


@pytest.fixture
def client(hub: HubProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hub.url, timeout=60.0) as opened:
        yield opened


def processes(hub: HubProcess) -> list[int]:
    """The hub and its validators."""
    assert hub.process is not None
    pid = hub.process.pid
    children = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(int(child) for each in children for child in each)]


def memory(pid: int, name: str = "VmRSS") -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith(name)))


class TestSizes:
    @pytest.mark.parametrize("mib", [1, 8, 63])
    @pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
    def test_up_to_the_limit_a_body_is_taken(self, client: httpx.Client, mib: int, packed: bool):
        body = sized(mib * MIB)
        assert len(body) == mib * MIB
        content, headers = (gzip.compress(body, 1), PACKED) if packed else (body, JSON)
        answer = client.post("/scored_data", content=content, headers=headers)
        assert (answer.status_code, answer.text) == (200, '{"status":"received"}')
        client.get("/reset_data")

    @pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
    def test_over_the_limit_a_body_is_413(self, client: httpx.Client, packed: bool):
        body = sized(64 * MIB + 1)
        content, headers = (gzip.compress(body, 1), PACKED) if packed else (body, JSON)
        answer = client.post("/scored_data", content=content, headers=headers)
        assert (answer.status_code, answer.json()) == (413, {"detail": "the body is larger than 64 MiB"})

    def test_a_connection_stays_usable_after_a_refused_request(self, hub: HubProcess):
        """The end of the large body, the next head and the beginning of the next body arrive in one read."""
        large, small = b" " * (2 * MIB), b'{"env_id":0}'
        kind = "Content-Type: application/json"
        refused = request_bytes("POST", "/register", large, kind)
        served = request_bytes("POST", "/disconnect-env", small, kind)
        with socket.create_connection(("127.0.0.1", hub.port), timeout=10) as line:
            for piece in (refused[:-10], refused[-10:] + served[:-5], served[-5:]):
                line.sendall(piece)
                time.sleep(0.2)
            answers = line.recv(2**16)
        assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"413", b"200"]

    def test_the_limit_of_compressed_bytes_is_its_own(self, hub: HubProcess):
        lines = ("Content-Type: application/json", "Content-Encoding: gzip", f"Content-Length: {16 * MIB + 1}")
        answer = raw_exchange(hub.port, request_bytes("POST", "/scored_data", b"", *lines))
        assert (answer.status, answer.body) == (413, b'{"detail":"the body is larger than 16 MiB"}')

    @pytest.mark.parametrize("announced", [64 * MIB + 1, 2**31, 10**18])
    def test_an_announced_size_is_refused_before_a_byte_is_read(self, hub: HubProcess, announced: int):
        lines = ("Content-Type: application/json", f"Content-Length: {announced}")
        assert raw_exchange(hub.port, request_bytes("POST", "/scored_data", b"", *lines)).status == 413

    def test_an_unannounced_size_is_refused_when_it_is_reached(self, hub: HubProcess):
        head = request_bytes("POST", "/register", b"", "Content-Type: application/json", "Transfer-Encoding: chunked")
        assert raw_exchange(hub.port, head + chunked(b" " * (2 * MIB), 2**16)).status == 413


def bomb() -> bytes:
    return gzip.compress(bytes(64 * MIB + MIB), 9)


def deep() -> bytes:
    return b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"images":' + b"[" * 10**6 + b"]" * 10**6 + b"}"


def deep_objects() -> bytes:
    return b'{"unknown":' + b'{"a":' * 10**6 + b"1" + b"}" * 10**6 + b"}"


def long_list() -> bytes:
    return b'{"tokens":[[' + b"1," * 10**7 + b'1]],"masks":[[1]],"scores":[1]}'


def long_string_id() -> bytes:
    return b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"env_id":"' + b"7" * 10**7 + b'"}'


def empty_lists() -> bytes:
    return b'{"tokens":[' + b"[]," * (20 * 10**6) + b'[]],"masks":[],"scores":[]}'


def empty_messages() -> bytes:
    """150 kB that are 2.4 million objects."""
    messages = b",".join([b'{"role":"","content":""}'] * 2_400_000)
    return gzip.compress(b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"messages":[[' + messages + b"]]}", 6)


def packed_values(field: str, code: bytes) -> bytes:
    """In our binary form an empty object is one byte, and 64 in memory; a score may be one byte, and 32 in memory."""
    values = msgspec.Raw(b"\xdd" + (3 * 10**7).to_bytes(4, "big") + code * (3 * 10**7))
    group = {"lengths": [1], "tokens": b"0000", "masks": b"0000", "scores": [1.0]}
    group |= {"scores": values} if field == "scores" else {"rest": {field: values}}
    return gzip.compress(msgspec.msgpack.encode([msgspec.msgpack.encode(group)]), 1)


def tiny_groups() -> bytes:
    return b"[" + b'{"tokens":[[1]],"masks":[[1]],"scores":[1]},' * 10**6 + b"1]"


HOSTILE: list[tuple[str, Callable[[], bytes], str, dict[str, str], int]] = [
    ("a bomb of 1:1000", bomb, "/scored_data", PACKED, 413),
    ("10^6 levels of lists", deep, "/scored_data", JSON, 422),
    ("10^6 levels of objects", deep_objects, "/scored_data", JSON, 422),
    ("10^6 levels, bare", lambda: b"[" * 10**6, "/scored_data_list", JSON, 422),
    ("a list of 10^7 numbers", long_list, "/scored_data", JSON, 422),
    ("10^7 numbers for groups", lambda: b"[" + b"1," * 10**7 + b"1]", "/scored_data_list", JSON, 422),
    ("10^7 empty groups", lambda: b"[" + b"{}," * 10**7 + b"{}]", "/scored_data_list", JSON, 422),
    ("2 * 10^7 empty lists", empty_lists, "/scored_data", JSON, 422),
    ("10^6 tiny groups", tiny_groups, "/scored_data_list", JSON, 422),
    ("2.4 * 10^6 empty messages", empty_messages, "/scored_data", PACKED, 422),
    ("3 * 10^7 packed objects", lambda: packed_values("images", b"\x80"), "/v1/groups", BINARY, 422),
    ("3 * 10^7 packed scores", lambda: packed_values("scores", b"\x01"), "/v1/groups", BINARY, 422),
    ("an id of 10 MB", long_string_id, "/scored_data", JSON, 422),
    ("a number of 10 MB", lambda: b'{"scores":[1' + b"0" * 10**7 + b"]}", "/scored_data", JSON, 422),
    ("10 MB of a message", lambda: b'{"env_id":"' + b"7" * 10**7 + b'"}', "/disconnect-env", JSON, 413),
    ("a million gzip members", lambda: gzip.compress(b"") * (700_000), "/scored_data", PACKED, 400),
    ("garbage behind gzip", lambda: gzip.compress(sized(MIB)) + bytes(MIB), "/scored_data", PACKED, 400),
    ("half of a gzip", lambda: gzip.compress(sized(8 * MIB), 1)[:-9], "/scored_data", PACKED, 400),
    ("noise as gzip", lambda: b"\x1f\x8b\x08\x00" + bytes(range(256)) * 1000, "/scored_data", PACKED, 400),
]


class TestHostile:
    @pytest.mark.parametrize(
        ("make", "path", "headers", "status"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE]
    )
    def test_it_is_refused_by_its_kind_quickly_and_the_memory_comes_back(
        self, hub: HubProcess, client: httpx.Client, make: Callable[[], bytes], path: str, headers: dict[str, str],
        status: int,
    ):  # fmt: skip
        body = make()
        before = {pid: memory(pid) for pid in processes(hub)}
        began = time.monotonic()
        answer = client.post(path, content=body, headers=headers)
        seconds = time.monotonic() - began
        assert answer.status_code == status, answer.text
        assert "detail" in answer.json()
        assert len(answer.content) < 2000
        grown = {pid: memory(pid) - before[pid] for pid in before}
        print(
            f"{len(body) / MIB:.1f} MiB, {seconds:.2f} s, kept {[f'{more / MIB:+.0f}' for more in grown.values()]} MiB"
        )
        assert processes(hub) == list(before)  # no worker died of it
        assert max(grown.values()) < ROOM
        assert seconds < 10

    def test_a_body_at_the_limits_of_its_counts_is_checked_in_seconds(self, client: httpx.Client):
        """What is just allowed costs no more than a large body of tokens."""
        messages = b",".join([b'{"role":"","content":""}'] * 1_000_000)
        body = b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"messages":[[' + messages + b"]]}"
        began = time.monotonic()
        answer = client.post("/scored_data", content=body, headers=JSON)
        print(f"{len(body) / MIB:.1f} MiB, {time.monotonic() - began:.2f} s")
        assert (answer.status_code, answer.text) == (200, '{"status":"received"}')
        client.get("/reset_data")

    def test_members_of_gzip_are_one_body(self, client: httpx.Client):
        body = sized(MIB)
        pieces = [body[at : at + 2**16] for at in range(0, len(body), 2**16)]
        packed = b"".join(map(gzip.compress, pieces))
        assert client.post("/scored_data", content=packed, headers=PACKED).status_code == 200


def test_refused_bodies_leave_no_memory_behind_however_many_there_are(hub: HubProcess, client: httpx.Client):
    body = sized(32 * MIB).replace(b'"scores":[1.0]', b'"scores":[]   ')
    assert client.post("/scored_data", content=body, headers=JSON).status_code == 422
    before = sum(memory(pid) for pid in processes(hub))
    for _ in range(4):
        assert client.post("/scored_data", content=body, headers=JSON).status_code == 422
    after = sum(memory(pid) for pid in processes(hub))
    print(f"kept {(after - before) / MIB:+.0f} MiB; peaks {[memory(p, 'VmHWM') // MIB for p in processes(hub)]} MiB")
    assert after - before < ROOM


def test_unfinished_bodies_take_no_more_than_a_total(tmp_path: Path):
    """The total is four of the largest bodies: the fifth waits outside, small calls do not."""
    size = 4 * MIB
    request = request_bytes("POST", "/scored_data", b" " * size, "Content-Type: application/json")
    with HubProcess(tmp_path, "--max-body-bytes", str(size)) as hub, contextlib.ExitStack() as stack:

        def send(raw: bytes) -> socket.socket:
            line = stack.enter_context(socket.create_connection(("127.0.0.1", hub.port), timeout=30))
            line.sendall(raw)
            return line

        lines = [send(request[:-1]) for _ in range(12)]
        ready, _, _ = select.select(lines, [], [], 30.0)
        answers = [line.recv(2**16) for line in ready]
        assert answers
        assert all(answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 2" in answer for answer in answers)
        assert httpx.post(f"{hub.url}/register", json=TRAINER).status_code == 200
        assert httpx.get(f"{hub.url}/healthz").status_code == 200
        lines[0].sendall(request[-1:])
        assert lines[0].recv(2**16).startswith(b"HTTP/1.1 422 ")  # who was first is served: read whole, and no JSON
