from __future__ import annotations

import json
import os

import pytest
from starlette.testclient import TestClient

from tests.unit.hub.conftest import LOCAL
from treadle.hub.endpoint import access_of
from treadle.hub.process import app_of
from treadle.hub.state import HubState
from treadle.wire.groups import BINARY_TYPE

TOKEN = "a-token-of-the-tests-0123456789"  # noqa: S105


@pytest.fixture
def described(client):
    answer = client.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def operations(described):
    return [operation for methods in described["paths"].values() for operation in methods.values()]


def test_every_route_is_described_and_every_described_route_is_there(client, described):
    served = {(route.path, method) for route in client.app._app.routes for method in route.methods}
    listed = {(path, method.upper()) for path, methods in described["paths"].items() for method in methods}
    assert served == listed
    assert len(served) >= 26
    assert {"/register", "/v1/lease", "/v1/events", "/metrics", "/openapi.json"} <= set(described["paths"])


def test_every_reference_leads_somewhere(described):
    def walk(value):
        if isinstance(value, dict):
            if "$ref" in value:
                _, *steps = value["$ref"].split("/")
                found = described
                for step in steps:
                    found = found[step]
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(described)
    ids = [operation["operationId"] for operation in operations(described)]
    assert len(ids) == len(set(ids))
    for operation in operations(described):
        for link in operation["responses"]["200"].get("links", {}).values():
            assert link["operationId"] in ids


def test_every_route_answers_with_a_described_shape_or_media_type(described):
    for operation in operations(described):
        for media_type, content in operation["responses"]["200"]["content"].items():
            is_json = media_type == "application/json"
            assert bool(content["schema"]) or not is_json
    lease = described["paths"]["/v1/lease"]["post"]["responses"]["200"]["content"]
    assert set(lease) == {"application/json", BINARY_TYPE}
    assert set(described["paths"]["/v1/events"]["get"]["responses"]["200"]["content"]) == {"text/event-stream"}
    assert set(described["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    assert set(described["paths"]["/v1/groups"]["post"]["requestBody"]["content"]) == {BINARY_TYPE}


def test_refusals_are_those_of_the_route(described):
    def of(path, method):
        return set(described["paths"][path][method]["responses"])

    assert {"409", "413", "422", "507", "503"} <= of("/scored_data", "post")
    assert "415" not in of("/scored_data", "post")
    assert "415" in of("/v1/groups", "post")
    assert {"404", "409"} <= of("/v1/batches/{step}/ack", "post")
    assert "413" not in of("/info", "get")
    assert "500" not in of("/info", "get")
    for status, response in described["components"]["responses"].items():
        assert response["description"]
        assert response["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Refusal"}, status


def test_the_limits_of_numbers_and_texts_are_described(described):
    schemas = described["components"]["schemas"]
    assert schemas["RegisteredTrainer"]["properties"]["uuid"]["maximum"] == 2**128 - 1
    trainer = schemas["RegisterTrainer"]["properties"]
    assert trainer["batch_size"]["maximum"] == 10**18 - 1
    assert (trainer["wandb_group"]["maxLength"], trainer["checkpoint_dir"]["maxLength"]) == (255, 4096)
    lease = schemas["LeaseRequest"]["properties"]
    assert (lease["step"]["minimum"], lease["holder"]["minLength"]) == (0, 1)


def test_parameters_are_described(described):
    def names(path, method):
        return {(one["in"], one["name"]) for one in described["paths"][path][method].get("parameters", ())}

    assert names("/status-env", "get") == {("query", "env_id")}
    assert names("/v1/events", "get") == {("query", "after"), ("header", "Last-Event-ID")}
    assert names("/scored_data", "post") == {("header", "Idempotency-Key")}
    assert names("/v1/batches/{step}/nack", "post") == {("path", "step")}


def test_a_token_is_needed_where_the_hub_needs_one(described, store, config, clock, monkeypatch):
    assert described["paths"]["/info"]["get"]["security"] == [{}, {"token": []}]
    assert "401" not in described["paths"]["/info"]["get"]["responses"]
    monkeypatch.setenv("TREADLE_HUB_TOKEN", TOKEN)
    with TestClient(
        app_of(HubState.build(store, config, clock), access_of(config, os.environ)), LOCAL, client=("127.0.0.1", 50_000)
    ) as client:
        assert client.get("/openapi.json").status_code == 401
        answer = client.get(f"/t/{TOKEN}/openapi.json")
    guarded = answer.json()
    assert guarded["paths"]["/info"]["get"]["security"] == [{"token": []}]
    assert "401" in guarded["paths"]["/info"]["get"]["responses"]
    assert guarded["paths"]["/healthz"]["get"]["security"] == []
    assert "401" not in guarded["paths"]["/healthz"]["get"]["responses"]
    assert TOKEN not in answer.text


def test_the_large_integer_is_an_integer_of_json(client):
    assert f'"maximum":{2**128 - 1}' in client.get("/openapi.json").text
    assert json.loads(client.get("/openapi.json").text)["openapi"] == "3.1.0"
