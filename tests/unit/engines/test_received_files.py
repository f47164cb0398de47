"""Files that a trainer sends: only those of published versions, complete, as they were sent, and deleted in the end."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from treadle.engines.api.context import ApiContext
from treadle.engines.api.received_files import MAX_PART_BYTES, ReceivedFiles, read_part
from treadle.engines.api.weights import BridgeRoutes
from treadle.errors import EngineError, RequestError
from treadle.net.access import Access, AccessMiddleware, AccessRules
from treadle.net.access_tokens import role_token
from treadle.wire.bridge import TOKEN_VARIABLE, SentFile

CONTENT = bytes(range(256)) * 40
SIZE = len(CONTENT)
TOKEN = "engine-token-0123456789"  # noqa: S105 - of a test


@pytest.fixture
def received(tmp_path):
    files = ReceivedFiles(tmp_path / "received")
    yield files
    files.close()


def part(offset=0, *, folder="weights_v7", name="model.safetensors", size=SIZE):
    return read_part(folder, name, {"offset": str(offset), "size": str(size)})


def sent(content=CONTENT, name="model.safetensors"):
    return SentFile(name=name, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def load(received, path, *files):
    """The content of what is loaded."""

    async def scenario():
        async with received.taken(path, files) as folder:
            assert folder.name == path.rpartition("/")[2]
            assert oct(folder.parents[1].stat().st_mode & 0o777) == "0o700"
            return (folder / files[0].name).read_bytes()

    return asyncio.run(scenario())


def kept(tmp_path):
    return sorted(file.name for file in (tmp_path / "received").rglob("*") if file.is_file())


def test_a_file_that_arrived_in_parts_is_loaded_and_deleted(received, tmp_path):
    assert received.write(part(0), CONTENT[:4000]) == 4000
    assert received.write(part(4000), CONTENT[4000:]) == len(CONTENT)
    assert load(received, "/runs/a/live/weights_v7", sent()) == CONTENT
    assert kept(tmp_path) == []
    with pytest.raises(RequestError, match="are not those that were sent: nothing"):
        load(received, "weights_v7", sent())


def test_what_arrived_otherwise_than_it_was_sent_is_not_loaded(received):
    received.write(part(0), CONTENT[:-1] + b"x")
    with pytest.raises(RequestError, match="sha256"):
        load(received, "weights_v7", sent())
    with pytest.raises(RequestError, match="send all files"):
        load(received, "weights_v7", sent(), sent(name="b"))
    with pytest.raises(RequestError, match="send all files"):
        load(received, "weights_v8", sent())


def test_parts_come_in_order_and_never_exceed_what_was_announced(received):
    received.write(part(0), CONTENT[:100])
    for offset in (50, 200):
        with pytest.raises(RequestError, match="from offset 0"):
            received.write(part(offset), CONTENT[offset : offset + 10])
    with pytest.raises(RequestError, match="announced with 90 bytes, and more were sent"):
        received.write(part(0, size=90), CONTENT[:100])
    with pytest.raises(RequestError, match="larger than 64 MiB"):
        part(size=10**12).check_length(MAX_PART_BYTES + 1)
    received.write(part(0), CONTENT)  # from the beginning
    assert load(received, "weights_v7", sent()) == CONTENT


def test_another_version_replaces_what_was_not_loaded(received, tmp_path):
    received.write(part(0), CONTENT)
    received.write(part(0, folder="delta_v8", name="b.safetensors"), CONTENT)
    assert kept(tmp_path) == ["b.safetensors"]


def test_a_file_without_room_is_refused_before_it_is_sent(received, tmp_path):
    with pytest.raises(EngineError, match=r"has room for .* GB") as error:
        received.write(part(0, size=10**15 - 1), b"")
    assert "TREADLE_CACHE" in error.value.fix
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="cannot be kept in"):
        ReceivedFiles(tmp_path / "file").write(part(0), b"")


@pytest.mark.parametrize(
    ("folder", "name"),
    [("weights_v7", "../model.safetensors"), ("weights_v7", "..json"), ("..", "model.safetensors"),
     ("weights_v", "m.json"), ("other_v7", "m.json"), ("weights_v7", "run.py"), ("weights_v7/..", "m.json"),
     ("weights_v7", "m.json\n"), ("weights_v7", ".json"), ("weights_v7", "a" * 300 + ".json")],
)  # fmt: skip
def test_only_names_of_published_files_are_accepted(folder, name):
    with pytest.raises(RequestError, match="is not a file of a published version"):
        read_part(folder, name, {"offset": "0", "size": "1"})


@pytest.mark.parametrize("query", [{}, {"offset": "0"}, {"offset": "-1", "size": "2"}, {"offset": "0", "size": "1e9"}])
def test_a_part_without_its_place_is_refused(query):
    with pytest.raises(RequestError, match="offset and size"):
        read_part("weights_v7", "model.safetensors", query)


def test_what_a_killed_engine_left_is_deleted_by_the_next(received, tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from treadle.engines.api.received_files import ReceivedFiles, read_part\n"
        "files = ReceivedFiles(Path(sys.argv[1]))\n"
        "files.write(read_part('weights_v1', 'left.safetensors', {'offset': '0', 'size': '1'}), b'x')\n"
        "print('there', flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "received")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ) as other:
        assert other.stdout.readline() == b"there\n"
        received.write(part(0), CONTENT)
        assert kept(tmp_path) == ["left.safetensors", "model.safetensors"], "it runs"
        other.kill()
    ReceivedFiles(tmp_path / "received").write(part(0, name="b.safetensors"), CONTENT)
    assert kept(tmp_path) == ["b.safetensors", "model.safetensors"]


# ---- over HTTP


def test_only_a_trainer_may_send_files(tmp_path):
    context = ApiContext(
        engine=None, model_name="m", adapter_root=tmp_path, model_folder=tmp_path,
        received=ReceivedFiles(tmp_path / "received"),
    )  # fmt: skip
    rules = AccessRules(process="engine", host="0.0.0.0", token_variable=TOKEN_VARIABLE)
    app = AccessMiddleware(Starlette(routes=BridgeRoutes(context).routes()), Access.of(rules, {TOKEN_VARIABLE: TOKEN}))
    api = TestClient(app, base_url="http://127.0.0.1")
    url = "/bridge/files/weights_v7/model.safetensors?offset=0&size=4"

    def post(token, body=b"four", path=url):
        return api.post(path, content=body, headers={"Authorization": f"Bearer {token}"})

    assert api.post(url, content=b"four").status_code == 401
    assert post(role_token(TOKEN, "environment")).status_code == 403
    assert kept(tmp_path) == []
    trainer = role_token(TOKEN, "trainer")
    assert post(trainer).json() == {"num_bytes": 4}
    assert post(trainer, b"longer").status_code == 400
    assert post(trainer, path=url.replace("weights_v7", "%2e%2e")).status_code == 400
    assert post(trainer, path=url.replace("weights_v7", "..%2f..%2fa")).status_code == 404
    assert kept(tmp_path) == ["model.safetensors"]
    context.received.close()
    assert kept(tmp_path) == []
