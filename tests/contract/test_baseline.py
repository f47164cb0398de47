"""Known faults of Atropos' API, one per test, and what the hub must do instead.

The last tests collect every refusal as a client sees it; `pytest -s` prints them as docs/hub-refusals.md has them.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.contract.atropos_calls import JSON, Atropos, group, raw_exchange, request_bytes
from tests.hub_process import HubProcess
from treadle.net.access_tokens import role_token

LEASE_S = 3.0  # on a busy machine a few calls take a second
TOKEN, ADMIN = "ordinary-token-of-a-test", "admin-token-of-a-test"
PACKED = JSON | {"Content-Encoding": "gzip"}
PAGE = Path(__file__).parents[2] / "docs" / "hub-refusals.md"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    flags = ("--lease-s", str(LEASE_S), "--queue-limit-groups", "5", "--read-timeout-s", "1")
    with HubProcess(tmp_path_factory.mktemp("open"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    env = {"TREADLE_HUB_TOKEN": TOKEN, "TREADLE_HUB_ADMIN_TOKEN": ADMIN}
    with HubProcess(tmp_path_factory.mktemp("guarded"), env=env) as running:
        yield running


@pytest.fixture
def calls(hub: HubProcess) -> Iterator[Atropos]:
    with httpx.Client(base_url=hub.url, timeout=20.0) as client:
        client.get("/reset_data")
        yield Atropos(client)


def lease(calls: Atropos, step: int, holder: str) -> httpx.Response:
    return calls.send("/v1/lease", {"step": step, "holder": holder})


# ---- the rows


def test_same_group_posted_twice(calls: Atropos):
    """Original: 200 and 200, and the queue holds two."""
    headers = JSON | {"Idempotency-Key": "env-0:1"}
    answers = [calls.send("/scored_data", group(), headers) for _ in range(2)]
    assert [(answer.status_code, answer.json()["status"]) for answer in answers] == [
        (200, "received"),
        (200, "duplicate"),
    ]
    assert calls.get("/status")["queue_size"] == 1


def test_batch_taken_then_the_trainer_dies(calls: Atropos):
    """Original: the batch is gone, and the step has counted it."""
    calls.register(batch_size=2)
    calls.post(tag=1)
    calls.post(tag=2)
    first = lease(calls, 1, "first life").json()["batch"]
    assert calls.get("/status")["current_step"] == 0
    assert lease(calls, 1, "second life").status_code == 409
    time.sleep(LEASE_S + 0.1)
    again = lease(calls, 1, "second life").json()["batch"]
    assert again["groups"] == first["groups"]
    late = calls.send("/v1/batches/1/ack", {"token": first["token"]})
    assert late.status_code == 409
    assert calls.get("/status")["current_step"] == 0
    assert calls.send("/v1/batches/1/ack", {"token": again["token"]}).status_code == 200
    assert calls.get("/status")["current_step"] == 1


def test_one_score_is_nan(calls: Atropos):
    """Original: accepted; the next /batch is 500 and the whole batch is lost, other groups too."""
    calls.register(batch_size=4)
    calls.post(tag=1)
    refused = calls.refusal("/scored_data", group() | {"scores": [1.0, float("nan")]})
    assert refused == (422, "finite_number", ["scores", 1])
    calls.post(tag=2)
    assert calls.tags() == [1, 2]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokens": [[1, 2]]}, "masks"),
        ({"masks": [[1, 2]]}, "masks"),
        ({"scores": [1.0]}, "scores"),
        ({"env_id": 99}, "env_id"),
        ({"env_id": -1}, "env_id"),
        ({"tokens": [], "masks": [], "scores": []}, "tokens"),
    ],
    ids=["tokens", "masks", "scores", "unknown_env", "env_minus_one", "empty_group"],
)
def test_unequal_lengths_unknown_env_minus_one_and_empty_group(calls: Atropos, change: dict[str, object], field: str):
    """Original: 200 accepted."""
    status, _, loc = calls.refusal("/scored_data", group() | change)
    assert (status, loc[0]) == (422, field)


def test_reset_data_without_credentials(calls: Atropos, guarded: HubProcess):
    """Original: anybody wipes everything with a GET.

    Ours keeps the GET for old clients on this machine. A web page cannot make it, a proxy cannot make it for
    somebody else, and with tokens it takes the admin's.
    """
    calls.post()
    for header in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example"},
                   {"X-Forwarded-For": "10.0.0.9"}):  # fmt: skip
        assert calls.client.get("/reset_data", headers=header).status_code == 403
    assert calls.get("/status")["queue_size"] == 1
    assert httpx.get(f"{guarded.url}/reset_data").status_code == 401
    as_admin = {"Authorization": f"Bearer {ADMIN}", "X-Forwarded-For": "10.0.0.9"}
    assert httpx.get(f"{guarded.url}/reset_data", headers=as_admin).status_code == 200
    as_anyone = {"Authorization": f"Bearer {TOKEN}", "X-Forwarded-For": "10.0.0.9"}
    assert httpx.get(f"{guarded.url}/reset_data", headers=as_anyone).status_code == 403


@pytest.mark.parametrize("cut", [2, 12, 40])
def test_bad_or_truncated_gzip(calls: Atropos, cut: int):
    """Original: 500."""
    packed = gzip.compress(json.dumps(group()).encode())
    answer = calls.send("/scored_data", packed[:-cut], PACKED)
    assert (answer.status_code, answer.json()) == (400, {"detail": "Invalid gzip payload"})


def test_254_kib_of_gzip_that_expand_to_256_mib(hub: HubProcess, calls: Atropos):
    """Original: +512 MiB of memory and 5.7 s of the one event loop."""
    bomb = gzip.compress(bytes(2**28), 9)
    assert len(bomb) < 270_000
    answer = calls.send("/scored_data", bomb, PACKED)
    assert (answer.status_code, answer.json()) == (413, {"detail": "the body is larger than 64 MiB"})


def test_status_env_with_a_bad_or_only_disconnected_environments(calls: Atropos):
    """Original: 500 (IndexError, ZeroDivisionError)."""
    assert calls.env_status(3).status_code == 404
    calls.start()
    calls.register_env()
    calls.send("/disconnect-env", {"env_id": 0})
    answer = calls.env_status(0)
    assert (answer.status_code, answer.json()["queue_size"]) == (200, 0)


def test_order(calls: Atropos):
    """Original: posted 100, 101, 102; served 102, 101, 100."""
    calls.register(batch_size=2)
    for tag in (100, 101, 102):
        calls.post(tag=tag)
    assert [calls.tags() for _ in range(3)] == [[100], [101], [102]]


def test_bind_cors_auth(hub: HubProcess, calls: Atropos, guarded: HubProcess, tmp_path: Path):
    """Original: 0.0.0.0:8000, CORS * with credentials, no authentication."""
    wanted = f":{hub.port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert [line[1] for line in lines if line[1].endswith(wanted) and line[3] == "0A"] == [f"0100007F{wanted}"]
    answer = calls.client.get("/info")
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert httpx.get(f"{guarded.url}/info").status_code == 401
    assert httpx.get(f"{guarded.url}/info", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert httpx.get(f"{guarded.url}/t/{TOKEN}/info").status_code == 200


# ---- what old clients see


def test_every_refusal_as_a_client_sees_it(hub: HubProcess, calls: Atropos, guarded: HubProcess):
    """The table of docs/hub-refusals.md: each refusal with its real status and body."""
    calls.start(batch_size=8, max_token_len=128, vocab_size=50_000)
    calls.register_env()
    rows: list[tuple[str, int, str, bytes]] = []

    def note(name: str, answer: httpx.Response) -> None:
        extra = "".join(f" `{key}: {answer.headers[key]}`" for key in ("Retry-After", "Allow") if key in answer.headers)
        rows.append((name, answer.status_code, extra, answer.content))
        assert 400 <= answer.status_code < 600
        assert answer.status_code not in (429, 500)
        assert answer.headers["content-type"] == "application/json"
        assert "detail" in answer.json()

    def post(name: str, **change: object) -> None:
        note(name, calls.send("/scored_data", group() | change))

    note("a field is missing", calls.send("/scored_data", {"tokens": [[1]], "masks": [[1]]}))
    post("a number is no integer", tokens=[[1, 1.5], [1, 2]])
    post("a score is null", scores=[1.0, None])
    post("NaN or Infinity", scores=[1.0, float("nan")])
    post("lengths that differ", scores=[1.0])
    post("an empty group", tokens=[], masks=[], scores=[])
    post("an unknown environment", env_id=99)
    post("a negative token id", tokens=[[1, -1], [1, 2]])
    post("a token id beyond the vocabulary", tokens=[[1, 50_000], [1, 2]])
    post("a longer sequence than the trainer takes", tokens=[[1] * 129] * 2, masks=[[1] * 129] * 2)
    note("a larger group than a batch", calls.send("/scored_data", group(9)))
    post("a policy version from the future", policy_version=10)
    post("a message without role or content", messages=[[{"role": "user"}]])
    post("too deep", images=json.loads("[" * 40 + "]" * 40))
    note("too many groups at once", calls.send("/scored_data_list", b"[" + b",".join([b"{}"] * 10_001) + b"]"))
    note("a name that is too long", calls.send("/register-env", {
        "max_token_length": 1, "desired_name": "x" * 300, "weight": 1.0, "group_size": 1}))  # fmt: skip
    note("not JSON", calls.send("/scored_data", b"{"))
    note("not sent as JSON", calls.send("/scored_data", b"{}", {"Content-Type": "text/plain"}))
    note("broken gzip", calls.send("/scored_data", b"no gzip", PACKED))
    note("another compression", calls.send("/scored_data", b"x", JSON | {"Content-Encoding": "br"}))
    for name, announced in (("too large", 2**30), ("too slow", 9)):
        lines = ("Content-Type: application/json", f"Content-Length: {announced}")
        raw = raw_exchange(hub.port, request_bytes("POST", "/scored_data", b"", *lines))
        note(name, httpx.Response(raw.status, headers=raw.headers, content=raw.body))
    key = JSON | {"Idempotency-Key": "k"}
    calls.send("/scored_data", group(), key)
    note("the same key for another body", calls.send("/scored_data", group(tag=8), key))
    note("status of an unknown environment", calls.env_status(99))
    note("an unknown path", calls.client.get("/nothing"))
    note("another method", calls.client.post("/batch"))
    note("a web page", calls.client.get("/info", headers={"Origin": "http://evil.example"}))
    note("another Host", calls.client.get("/info", headers={"Host": "evil.example"}))
    note("reset through a proxy", calls.client.get("/reset_data", headers={"X-Forwarded-For": "10.0.0.9"}))
    note("a GET with effects, by a browser", calls.client.get("/batch", headers={"User-Agent": "Mozilla/5.0"}))
    environment = {"Authorization": f"Bearer {role_token(TOKEN, 'environment')}"}
    note("the token of another role", httpx.get(f"{guarded.url}/batch", headers=environment))
    note("no token", httpx.get(f"{guarded.url}/info"))
    note("a wrong token", httpx.get(f"{guarded.url}/info", headers={"Authorization": "Bearer wrong"}))
    for _ in range(4):
        calls.send("/scored_data", group())
    note("a full queue", calls.send("/scored_data", group()))
    calls.client.get("/reset_data")
    calls.register(batch_size=2)
    calls.post()
    lease(calls, 1, "one")
    note("a step far ahead", lease(calls, 10**17, "one"))
    note("a step that another trainer holds", lease(calls, 1, "two"))
    note("an acknowledgement that comes too late", calls.send("/v1/batches/1/ack", {"token": "old"}))

    table = [f"| {name} | {status}{extra} | `` {body.decode()} `` |" for name, status, extra, body in rows]
    print("\n".join(table))
    documented = PAGE.read_text().splitlines()
    assert [line for line in table if line not in documented] == [], f"not in {PAGE.name}"
