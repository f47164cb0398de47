"""The start page of `treadle dash FOLDER`: which hub a request is forwarded to, and when the hubs it starts end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from tests.served_app import listening
from treadle.background import awake_s
from treadle.config import load_run, save_run
from treadle.dash.web import HEADERS, PageError
from treadle.errors import ConfigError
from treadle.launch import folder as run_folders
from treadle.launch import hubs_of_runs
from treadle.launch.dash_command import RunList, open_start_page
from treadle.launch.hubs_of_runs import ChildHub, RunHubs, is_on_loopback, origin_of
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE, role_token
from treadle.store import SqliteStore

SECRET = "a-token-of-more-than-sixteen"  # noqa: S105
NAME = "20260101-000000-a"


class Foreign(ThreadingHTTPServer):
    """A server that is not a hub of Treadle: it notes the tokens that it is sent, and answers with a script."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        super().__init__(("127.0.0.1", 0), ForeignHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class ForeignHandler(BaseHTTPRequestHandler):
    server: Foreign

    def do_GET(self) -> None:
        self.server.tokens.append(self.headers.get("Authorization", ""))
        body = b'{"is": "foreign"}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json" if "api/run" in self.path else "text/html")
        self.send_header("Set-Cookie", "foreign=1")
        self.send_header("Content-Security-Policy", "default-src *")
        self.send_header("Access-Control-Allow-Origin", "*")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def foreign() -> Iterator[Foreign]:
    with Foreign() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv(HUB_TOKEN_VARIABLE, SECRET)
    with open_start_page(tmp_path) as app, TestClient(app) as client:
        yield client


def write_run(output: Path, name: str = NAME, **values: object) -> Path:
    folder = output / name
    folder.mkdir()
    save_run(load_run(None, {"hub.database": folder / "hub.sqlite", **values}), folder / "config.json")
    (folder / "request.json").write_text("{}")
    with SqliteStore.open(folder / "hub.sqlite", clock=awake_s):
        pass
    return folder


def is_locked(folder: Path) -> bool:
    """Whether a hub has the queue of the run open."""
    try:
        with SqliteStore.open(folder / "hub.sqlite", clock=awake_s):
            return False
    except ConfigError as error:
        return "in use" in error.message


def wait_until(is_so: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_request_goes_to_the_hub_that_a_folder_names(client: TestClient, tmp_path: Path, foreign: Foreign) -> None:
    write_run(tmp_path, hub_url=foreign.url, **{"train.hub_url": f"{foreign.url}/t/secret"})
    for path in ("dash/", "dash/app.js", "dash/api/run", "v1/events"):
        answer = client.get(f"/runs/{NAME}/{path}")
        assert answer.status_code == 403
        assert f"open {foreign.url}/dash/ in your browser" in answer.json()["detail"]
    assert foreign.tokens == []
    (row,) = client.get("/api/runs").json()["runs"]
    assert row["address"] == foreign.url


def test_a_live_run_is_forwarded_to_this_machine_only(client: TestClient, tmp_path: Path) -> None:
    folder = write_run(tmp_path, **{"train.hub_url": "http://gpu7.invalid:8000/t/secret"})
    with run_folders.locked(folder):
        assert client.get(f"/runs/{NAME}/dash/").status_code == 403
        (row,) = RunList(tmp_path).rows([NAME])
    assert row.address == "http://gpu7.invalid:8000"
    (row,) = RunList(tmp_path).rows([NAME])
    assert row.address == "", "its recorded groups are served here"


@pytest.mark.parametrize(
    "url",
    ["javascript:alert(1)//", "file:///etc/passwd", "http://[::1", "http://", "127.0.0.1:80", "http://127.0.0.1:x"],
)
def test_what_is_no_url_of_a_hub_becomes_no_link(url: str) -> None:
    assert origin_of(url) == ""


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://127.0.0.1:8000/t/secret", True),
        ("http://[::1]:8000", True),
        ("http://localhost", True),
        ("http://127.0.0.1@far:80", False),
        ("http://127.0.0.1.far:80", False),
        ("http://far#@127.0.0.1", False),
        ("http://10.0.0.5:8000", False),
        ("", False),
    ],
)
def test_only_loopback_addresses_are_this_machine(url: str, is_here: bool) -> None:
    assert is_on_loopback(origin_of(url)) == is_here


def test_a_hub_gives_data_and_neither_code_nor_headers(client: TestClient, tmp_path: Path, foreign: Foreign) -> None:
    folder = write_run(tmp_path, **{"train.hub_url": f"{foreign.url}/batch?x="})
    with run_folders.locked(folder):
        data = client.get(f"/runs/{NAME}/dash/api/run")
        page, script = client.get(f"/runs/{NAME}/dash/"), client.get(f"/runs/{NAME}/dash/app.js")
        other = client.get(f"/runs/{NAME}/dash/api/now")
    assert (data.status_code, data.json()) == (200, {"is": "foreign"})
    assert "<title>Treadle</title>" in page.text
    assert script.headers["content-type"].startswith("text/javascript")
    assert other.status_code == 502
    for answer in (data, page, script):
        assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
        assert not {"set-cookie", "access-control-allow-origin"} & set(answer.headers)
    assert set(foreign.tokens) == {f"Bearer {role_token(SECRET, 'observer')}"}


def test_the_token_is_not_sent_to_the_hub_of_another_user(
    client: TestClient, tmp_path: Path, foreign: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path, **{"train.hub_url": foreign.url})
    monkeypatch.setattr(os, "getuid", lambda: (folder / "config.json").stat().st_uid + 1)
    with run_folders.locked(folder):
        assert client.get(f"/runs/{NAME}/dash/api/run").status_code == 200
    assert foreign.tokens == [""]


def test_the_page_of_a_run_that_is_over_lets_it_be_resumed(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    with open_start_page(tmp_path) as app, TestClient(app) as client:
        assert client.get(f"/runs/{NAME}/dash/api/run").status_code == 200
        assert is_locked(folder)
        with run_folders.locked(folder):  # as `treadle run --resume` does
            wait_until(lambda: not is_locked(folder))


def test_the_queue_is_released_when_nobody_looks_at_the_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    with open_start_page(tmp_path, idle_s=1.0) as app, TestClient(app) as client:
        assert client.get(f"/runs/{NAME}/dash/api/run").status_code == 200
        wait_until(lambda: not is_locked(folder))


def test_the_run_that_was_used_longest_ago_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs_of_runs, "MAX_HUBS", 2)
    folders = [write_run(tmp_path, f"20260101-00000{number}-a") for number in range(3)]
    hubs = RunHubs()

    async def use(folder: Path) -> ChildHub:
        async with hubs.use(folder) as hub:
            assert isinstance(hub, ChildHub)
            return hub

    async def look() -> None:
        first, second = await use(folders[0]), await use(folders[1])
        assert await use(folders[0]) is first
        third = await use(folders[2])
        assert [hub.is_running() for hub in (first, second, third)] == [True, False, True]
        async with hubs.use(folders[0]), hubs.use(folders[2]):
            with pytest.raises(PageError, match="close a run") as caught:
                await use(folders[1])
            assert caught.value.status == 503

    try:
        asyncio.run(look())
    finally:
        hubs.close()


def test_a_page_keeps_its_hub_until_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs_of_runs, "MAX_HUBS", 1)
    first, second = (write_run(tmp_path, f"20260101-00000{number}-a").name for number in range(2))
    with open_start_page(tmp_path) as app, listening(app) as url:
        with httpx.stream("GET", f"{url}/runs/{first}/v1/events", timeout=30) as events:
            assert events.headers["content-type"].startswith("text/event-stream")
            refused = httpx.get(f"{url}/runs/{second}/dash/", timeout=30)
            assert (refused.status_code, "close a run" in refused.json()["detail"]) == (503, True)
        wait_until(lambda: httpx.get(f"{url}/runs/{second}/dash/", timeout=30).status_code == 200)
