"""`treadle export --push`: the Hub's own client against a server that speaks the endpoints of an upload."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file
from test_export import export as export_merged
from test_export import write_result

from tests.tiny_model import write_tiny_model
from treadle import cli, export

TOKEN = "hf_" + "a" * 34


class Hub:
    """Keeps what is pushed: {"ada/mine": {"config.json": b"..."}}."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.private: dict[str, bool] = {}
        self.repos: dict[str, dict[str, bytes]] = {}
        self._objects: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer()

            do_POST = do_PUT = do_GET

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.partition("?")[0]
                hub.calls.append(f"{self.command} {path}")
                has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}" or path.startswith("/objects/")
                found = hub.answer(self.command, path, body) if has_token else None
                status = 401 if not has_token else 404 if found is None else 200
                content = json.dumps({"error": "Invalid credentials"} if found is None else found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, method: str, path: str, body: bytes) -> dict[str, Any] | None:  # noqa: PLR0911
        parts = path.strip("/").split("/")
        if path == "/api/whoami-v2":
            return {"name": "ada", "type": "user"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'ada'}/{asked['name']}"
            self.private[name] = asked.get("private", asked.get("visibility") == "private")
            self.repos[name] = {}
            return {"url": f"{self.url}/{name}", "name": name}
        if parts[0] == "objects" and method == "PUT":
            self._objects[parts[1]] = body
            return {}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = {o["oid"]: {"upload": {"href": f"{self.url}/objects/{o['oid']}"}} for o in objects}
            return {"objects": [{**o, "actions": actions[o["oid"]]} for o in objects]}
        if "preupload" in parts:
            modes = {True: "lfs", False: "regular"}
            files = json.loads(body)["files"]
            return {
                "files": [
                    {"path": f["path"], "uploadMode": modes[f["path"].endswith(".safetensors")], "shouldIgnore": False}
                    for f in files
                ]
            }
        if "commit" in parts:
            name = "/".join(parts[2:4])
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.repos[name][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.repos[name][value["path"]] = self._objects[value["oid"]]
            return {"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.url}/{name}/commit/{'1' * 40}"}
        return None


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    started = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", started.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield started
    started.server.shutdown()
    started.server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", hidden_size=32, num_layers=2)


def push(source: Path, name: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(source), "--push", name])
    return int(ended.value.code or 0)


def test_the_merged_model_is_pushed_to_a_private_repository(
    hub: Hub,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    result = write_result(model, tmp_path / "run", "final_adapter")
    assert push(tmp_path / "run", "mine") == 0
    assert capsys.readouterr().out.strip() == f"{hub.url}/ada/mine"
    assert hub.private == {"ada/mine": True}
    assert export_merged(tmp_path / "run", tmp_path / "merged") == 0
    assert set(hub.repos["ada/mine"]) == {file.name for file in (tmp_path / "merged").iterdir()}
    (tmp_path / "pushed.safetensors").write_bytes(hub.repos["ada/mine"]["model.safetensors"])
    pushed, merged = load_file(tmp_path / "pushed.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    assert all((pushed[name] == merged[name]).all() for name in merged)
    assert [file.name for file in result.parent.iterdir()] == ["final_adapter"], "nothing is left beside it"


def test_a_trained_model_is_pushed_without_what_else_lies_there(
    hub: Hub,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    result = write_result(model, tmp_path / "run", "final_model")
    (result / "older").mkdir()
    (result / "older" / "model.safetensors").write_bytes(b"other weights")
    assert push(tmp_path / "run", "lab/mine") == 0
    assert set(hub.repos["lab/mine"]) == {file.name for file in model.iterdir()}


@pytest.mark.parametrize(
    ("token", "name", "says"),
    [
        (None, "mine", "--push needs a token of the Hugging Face Hub, and none was found"),
        ("hf_wrong", "mine", "refuses the token that was found"),
        (TOKEN, "a b", "'a b' is no name of a repository"),
    ],
)
def test_nothing_is_merged_without_a_token_that_the_hub_takes(
    token: str | None, name: str, says: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(export, "_write", lambda *_: pytest.fail("merged"))
    assert push(tmp_path, name) == 2
    error_text = capsys.readouterr().err
    assert says in error_text
    assert "  -> " in error_text
    assert not hub.repos


def test_a_hub_that_cannot_be_reached_is_named(tmp_path: Path, hub: Hub, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert push(tmp_path, "mine") == 2
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err


def test_export_asks_which_form_is_wanted(tmp_path: Path, capsys) -> None:
    for words in ([], ["--merged", "a", "--gguf", "b"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["export", str(tmp_path), *words])
        assert ended.value.code == 2
    assert "one of the arguments --merged --gguf --push is required" in capsys.readouterr().err
