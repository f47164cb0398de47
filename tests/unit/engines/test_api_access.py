"""Access rules of the engine's API, and the choice of the engine."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig
from treadle.config.schema import has_vllm
from treadle.engines.api import create_app, engine_access
from treadle.engines.transformers_engine import TransformersEngine
from treadle.errors import ConfigError
from treadle.net.access import CLIENTS
from treadle.net.access_tokens import role_token

TOKEN = "engine-token-0123456789"  # noqa: S105 - of a test


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return EngineConfig(model=str(folder), dtype="float32", threads=1, device="cpu")


@pytest.fixture(scope="module")
def engine(config):
    made = TransformersEngine(config, Path(config.model))
    yield made
    asyncio.run(made.close())


def client(engine, config, env, base="http://127.0.0.1:9001"):
    return TestClient(create_app(engine, config, engine_access(config, env)), base_url=base, client=("10.1.2.3", 5000))


def test_an_address_that_others_can_reach_needs_a_token(config):
    open_to_all = config.model_copy(update={"host": "0.0.0.0"})
    with pytest.raises(ConfigError, match=r"engine .* needs a token") as error:
        engine_access(open_to_all, {})
    assert "TREADLE_ENGINE_TOKEN" in error.value.fix
    assert not engine_access(open_to_all, {"TREADLE_ENGINE_TOKEN": TOKEN}).is_open


def test_with_a_token_every_route_but_health_asks_for_it(engine, config):
    api = client(engine, config, {"TREADLE_ENGINE_TOKEN": TOKEN})
    assert api.get("/health").status_code == 200
    for method, path in (("GET", "/v1/models"), ("POST", "/generate"), ("POST", "/bridge/pause"), ("GET", "/metrics")):
        assert api.request(method, path).status_code == 401
        assert api.request(method, path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    known = {"Authorization": f"Bearer {TOKEN}"}
    assert api.get("/v1/models", headers=known).status_code == 200
    answer = api.post("/generate", headers=known, json={"prompt": "hi", "max_tokens": 2})
    assert answer.status_code == 200


def test_a_missing_token_file_is_created(config, tmp_path):
    file = tmp_path / "token"
    access = engine_access(config.model_copy(update={"token_file": file}), {})
    assert access.roles_of(file.read_text().strip().encode(), is_local=False) == CLIENTS


ENVIRONMENTS = (("POST", "/generate"), ("POST", "/v1/completions"), ("GET", "/health_generate"))
TRAINERS = (("POST", "/bridge/pause"), ("POST", "/bridge/receive"), ("POST", "/lora/load"), ("POST", "/reload_weights"))


def test_environments_sample_observers_read_and_only_trainers_publish(engine, config):
    api = client(engine, config, {"TREADLE_ENGINE_TOKEN": TOKEN})

    def status(role, method, path):
        headers = {"Authorization": f"Bearer {role_token(TOKEN, role)}"}
        return api.request(method, path, headers=headers, content=b"{" if method == "POST" else None).status_code

    for role in ("environment", "trainer", "observer"):
        assert status(role, "GET", "/bridge/info") == 200
    for call in ENVIRONMENTS:
        assert status("observer", *call) == 403
        assert status("environment", *call) != 403
    for call in TRAINERS:
        assert status("observer", *call) == status("environment", *call) == 403
        assert status("trainer", *call) == 400  # the body is no JSON


def test_a_cross_origin_page_reaches_no_route(engine, config):
    for headers in ({"Host": "0.0.0.0:9001"}, {"Referer": "http://evil.example/"}, {"Origin": "null"}):
        assert client(engine, config, {}).get("/health", headers=headers).status_code == 403
        assert client(engine, config, {}).post("/bridge/pause", headers=headers, json={}).status_code == 403
    by_browser = {"User-Agent": "Mozilla/5.0"}
    assert client(engine, config, {}).get("/health_generate", headers=by_browser).status_code == 403


def test_a_foreign_host_header_is_refused(engine, config):
    answer = client(engine, config, {}, base="http://evil.example").get("/health")
    assert answer.status_code == 403
    assert "engine is not known as" in answer.json()["detail"]
    allowed = config.model_copy(update={"allowed_hosts": "gpu7"})
    assert client(engine, allowed, {}, base="http://gpu7:9001").get("/health").status_code == 200


@pytest.mark.parametrize(
    ("named", "python", "is_vllm"),
    [("transformers", "", False), ("vllm", "", True), ("auto", "/opt/vllm/bin/python", True)],
)
def test_the_engine_that_is_named_is_chosen(config, named, python, is_vllm):
    assert has_vllm(config.model_copy(update={"engine": named, "vllm_python": python})) == is_vllm


def test_without_a_name_vllm_is_chosen_where_it_is_installed(config):
    is_installed = importlib.util.find_spec("vllm") is not None
    assert has_vllm(config) == is_installed
