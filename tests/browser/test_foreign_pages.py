"""Foreign web pages that try to change a hub, in the browsers that Debian has: Chromium and Firefox."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.atropos_calls import TRAINER, group
from tests.e2e.processes import environment
from tests.hub_process import HubProcess

# Names that lead to a server on loopback. Only with 127.0.0.1 and localhost browsers send Sec-Fetch-Site.
NAMES = ("0.0.0.0", "127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "[::ffff:0.0.0.0]", "[::]", socket.gethostname())
NUM_GROUPS = 3
LOADED_WITHIN_S = 90.0

# All that a page can do without asking: images, scripts, fetches that hide where they come from, forms.
PAGE = """<!doctype html><title>foreign</title><body><script>
const targets = TARGETS, waiting = [];
for (const base of targets) {
  for (const path of ["/reset_data", "/batch", "/t/any/reset_data", "/v1/envs/0", "/seen"]) {
    for (const [tag, policy] of [["img", "no-referrer"], ["img", "unsafe-url"], ["script", "no-referrer"]]) {
      const element = document.createElement(tag);
      element.referrerPolicy = policy;
      waiting.push(new Promise((done) => { element.onload = element.onerror = done; }));
      element.src = base + path;
      document.body.append(element);
    }
    const headers = { "Accept": "*/*", "Accept-Language": "*" };
    const hidden = { mode: "no-cors", referrerPolicy: "no-referrer", credentials: "omit", cache: "no-store", headers };
    waiting.push(fetch(base + path, hidden).catch(() => {}));
  }
  for (const path of ["/v1/reset", "/scored_data"]) {
    const body = new Blob(["{}"], { type: "text/plain" });
    const post = { method: "POST", mode: "no-cors", referrerPolicy: "no-referrer", body };
    waiting.push(fetch(base + path, post).catch(() => {}));
    navigator.sendBeacon(base + path, body);
  }
}
const late = new Promise((done) => setTimeout(done, 20000));  // a name that leads nowhere
Promise.race([Promise.allSettled(waiting), late]).then(() => fetch("/done"));
</script>"""


class ForeignSite:
    """Serves the page, and notes what browsers ask of it under the names of this machine."""

    def __init__(self, hub: HubProcess) -> None:
        site = self
        self.done = threading.Event()
        self.seen: dict[str, dict[str, str]] = {}  # host -> headers of the last request

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/seen":
                    site.seen[self.headers["Host"].rpartition(":")[0]] = dict(self.headers)
                if self.path == "/done":
                    site.done.set()
                body = site.page(hub).encode() if self.path == "/" else b""
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def page(self, hub: HubProcess) -> str:
        targets = [f"http://{name}:{port}" for port in (hub.port, self.port) for name in NAMES]
        return PAGE.replace("TARGETS", json.dumps(targets))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    """One with a trainer and enough groups for a batch."""
    with HubProcess(tmp_path) as running, running.client() as client:
        assert client.post("/register", json=TRAINER | {"batch_size": 2}).status_code == 200
        for _ in range(NUM_GROUPS):
            assert client.post("/scored_data", json=group()).status_code == 200
        yield running


@pytest.fixture
def site(hub: HubProcess) -> Iterator[ForeignSite]:
    serving = ForeignSite(hub)
    yield serving
    serving.close()


def check_nothing_changed(hub: HubProcess, site: ForeignSite) -> None:
    """What the page asked of its own site shows that the browser does send such requests."""
    for name, headers in sorted(site.seen.items()):
        print(name, {key: value for key, value in headers.items() if key.startswith("Sec-") or key == "Referer"})
    assert {"127.0.0.1", "localhost"} <= set(site.seen)
    assert httpx.get(f"{hub.url}/v1/status").json()["queued_groups"] == NUM_GROUPS
    assert httpx.get(f"{hub.url}/status").json() == {"current_step": 0, "queue_size": NUM_GROUPS}
    # What real clients send is served as before.
    assert len(httpx.get(f"{hub.url}/batch", headers={"User-Agent": "python-requests/2.32.5"}).json()["batch"]) == 1
    assert httpx.get(f"{hub.url}/reset_data").text == "Reset successful"


def test_a_foreign_page_changes_nothing_in_chromium(browser: Any, hub: HubProcess, site: ForeignSite):
    context = browser.new_context()
    answers: dict[str, int] = {}
    page = context.new_page()
    page.on("response", lambda response: answers.setdefault(response.url, response.status))
    page.goto(site.url)
    page.wait_for_timeout(200)
    while not site.done.is_set():
        page.wait_for_timeout(100)  # Playwright reports responses only while it is called
    context.close()
    check_nothing_changed(hub, site)
    asked = {url: status for url, status in answers.items() if f":{hub.port}/" in url and not url.endswith("/seen")}
    assert f"http://127.0.0.1:{hub.port}/reset_data" in asked
    assert set(asked.values()) == {403}


@pytest.mark.full  # the same page as in Chromium; it needs a browser more
def test_a_foreign_page_changes_nothing_in_firefox(hub: HubProcess, site: ForeignSite, tmp_path: Path):
    found = shutil.which("firefox-esr") or shutil.which("firefox")
    if found is None:
        pytest.skip("no Firefox is installed: apt-get install firefox-esr")
    profile = tmp_path / "profile"
    profile.mkdir()
    words = [found, "--headless", "--no-remote", "--profile", str(profile), site.url]
    with (tmp_path / "firefox.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=environment(HOME=str(tmp_path)))
        try:
            assert site.done.wait(LOADED_WITHIN_S), (tmp_path / "firefox.log").read_text()[-2000:]
        finally:
            process.terminate()
            process.wait(20)
    check_nothing_changed(hub, site)
