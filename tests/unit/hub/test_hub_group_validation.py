from __future__ import annotations

import gzip
import json
import time
import zlib

import pytest

JSON = {"Content-Type": "application/json"}
PACKED = JSON | {"Content-Encoding": "gzip"}


@pytest.mark.parametrize(
    ("change", "loc"),
    [
        ({"tokens": [], "masks": [], "scores": []}, ["tokens"]),
        ({"scores": [1.0]}, ["scores"]),
        ({"masks": [[1, 2]]}, ["masks"]),
        ({"masks": [[1, 2], [1]]}, ["masks", 1]),
        ({"tokens": [[1, 2], []], "masks": [[1, 2], []]}, ["tokens", 1]),
        ({"inference_logprobs": [[0.0, 0.0]]}, ["inference_logprobs"]),
        ({"inference_logprobs": [[0.0, 0.0], [0.0]]}, ["inference_logprobs", 1]),
        ({"scores": [1.0, float("nan")]}, ["scores", 1]),
        ({"scores": [1.0, "inf"]}, ["scores", 1]),
        ({"scores": [1.0, None]}, ["scores", 1]),
        ({"scores": "many"}, ["scores"]),
        ({"inference_logprobs": [[0.0, float("-inf")], [0.0, 0.0]]}, ["inference_logprobs", 0, 1]),
        ({"distill_logprobs": [[[0.0], ["nan"]]]}, ["distill_logprobs", 0, 1, 0]),
        ({"metrics": {"accuracy": "nan"}}, ["metrics", "accuracy"]),
        ({"tokens": [[1, 1.5], [1, 2]]}, ["tokens", 0, 1]),
        ({"messages": [[{"role": "user"}]]}, ["messages", 0, 0]),
        ({"messages": [None]}, ["messages", 0]),
        ({"env_id": 2**70}, ["env_id"]),
        ({"env_id": 99}, ["env_id"]),
        ({"env_id": -1}, ["env_id"]),
        ({"tokens": [[1, -2], [1, 2]]}, ["tokens", 0, 1]),
        ({"tokens": [[1, 2], [10**30, 2]]}, ["tokens", 1, 0]),
        ({"policy_version": -(2**70)}, ["policy_version"]),
        ({"generation_params": {"temperature": float("nan")}}, ["generation_params"]),
        ({"generation_params": {"temperature": 10**400}}, ["generation_params"]),
        ({"overrides": [{}]}, ["overrides"]),
        ({"masks": [[2**31, 1], [1, 1]]}, ["masks", 0]),
        ({"metrics": {str(i): 0.0 for i in range(1001)}}, ["metrics"]),
        ({"metrics": {"x" * 300: 0.0}}, ["metrics", "x" * 100]),
        ({"images": json.loads("[" * 40 + "]" * 40)}, ["images"]),
    ],
)
def test_a_bad_group_is_refused_with_the_field_named(client, calls, change, loc):
    answer = client.post("/scored_data", content=json.dumps(calls.group() | change), headers=JSON)
    assert answer.status_code == 422, answer.text
    detail = answer.json()["detail"][0]
    assert set(detail) == {"type", "loc", "msg", "input"}
    assert detail["loc"] == ["body", *loc]
    assert client.get("/status").json()["queue_size"] == 0


def test_a_missing_field_is_named(client, calls):
    group = calls.group()
    del group["scores"]
    detail = client.post("/scored_data", json=group).json()["detail"]
    assert detail == [{"type": "missing", "loc": ["body", "scores"], "msg": "Field required", "input": None}]


@pytest.mark.parametrize(
    "change",
    [
        {"advantages": [[1.0], [1.0, 2.0, 3.0], [0.5]]},
        {"messages": []},
        {"masks": [[0, 1], [1, 1]]},
        {"unknown": {"deep": [1]}},
        {"env_id": None},
        {"scores": [True, False]},
        {"policy_version": False, "item": True, "distill_token_ids": [[[True]]]},
        {"scores": ["1.5", 2]},
        {"tokens": [[1.0, "2"], [2**31 - 1, 2]]},
        {"messages": [[{"role": "user", "content": [{"type": "text"}], "reward": None, "extra": 1}]]},
        {"overrides": [{"set_advantage_to_zero": True}, {}], "group_overrides": {"group_size": 2}},
        {"images": [None, ["aGk="]]},
    ],
)
def test_what_real_clients_send_is_taken_and_comes_back(client, calls, change):
    calls.register()
    sent = calls.group() | change
    assert client.post("/scored_data", json=sent).json() == {"status": "received"}
    calls.post(1)
    stored = client.get("/batch").json()["batch"][0]
    for key in change.keys() & stored.keys() - {"tokens", "scores"}:
        assert stored[key] == sent[key]


PADDING = b'"images":"' + b"x" * 20_000 + b'",'  # enough for a worker to read it


@pytest.mark.parametrize("padding", [b"", PADDING], ids=["here", "by a worker"])
@pytest.mark.parametrize(
    "fields",
    [
        b'"scores":[1,1],"messages":1%030d' % 0,
        b'"scores":[1,1],"env_id":1%030d' % 0,
        b'"scores":[true,1],"metrics":{"\\ud800":1}',
        b'"scores":[1,1],"metrics":{"\\ud800":NaN}',
        b'"scores":[true,1],"messages":[[{"role":"\\ud800","content":""}]]',
        b'"scores":[1,1],"metrics":{"\\ud800":1}',
        b'"scores":[1,NaN],"generation_params":{"\\udfff":"\\ud800"}',
        b'"scores":[1,1e400]',
        b'"scores":[1,1],"env_id":-0.5',
        b'"scores":[1,1],"images":1%05000d' % 0,
        b'"scores":[1,1],"group_overrides":{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("route", ["/scored_data", "/scored_data_list"])
def test_no_group_is_too_odd_for_an_answer(client, fields, padding, route):
    """Each of these once ended in a 500, or in the death of a worker."""
    content = b'{"tokens":[[1],[1]],"masks":[[1],[1]],%s%s}' % (padding, fields)
    answer = client.post(route, content=content if route == "/scored_data" else b"[%s]" % content, headers=JSON)
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"][0]["loc"][0] == "body"


def test_the_index_of_a_bad_group_in_a_list_is_in_the_error(client, calls):
    for bad in ({"scores": [1.0, float("nan")]}, {"scores": [1.0, None]}, {"scores": [1.0]}, {"tokens": 1}):
        content = json.dumps([calls.group(), calls.group() | {"scores": [True, 0]}, calls.group() | bad])
        answer = client.post("/scored_data_list", content=content, headers=JSON)
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["loc"][:2] == ["body", 2]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"nonsense", b'{"tokens": NaN', b"\xff\xfe", b"[]", b"null", b"3", b'"\\ud800"',
     # With short ids: pytest puts the id into an environment variable, whose size is limited.
     pytest.param(b'{"images":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="deep"),
     pytest.param(b"[" * 100_000, id="deep and open")],
)  # fmt: skip
@pytest.mark.parametrize("route", ["/scored_data", "/register", "/register-env", "/disconnect-env", "/v1/lease"])
def test_a_body_that_is_no_message_is_422(client, route, content):
    answer = client.post(route, content=content, headers=JSON)
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"][0]["loc"][0] == "body"


def test_the_content_type_must_be_json(client, calls):
    answer = client.post("/scored_data", content=json.dumps(calls.group()), headers={"Content-Type": "text/plain"})
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["type"] == "model_attributes_type"


def test_gzip_bodies_are_inflated_also_in_chunks_and_in_members(client, calls):
    body = json.dumps(calls.group()).encode()
    packed = gzip.compress(body)
    chunks = iter([packed[:7], packed[7:30], packed[30:]])
    assert client.post("/scored_data", content=packed, headers=PACKED).status_code == 200
    assert client.post("/scored_data", content=chunks, headers=PACKED).status_code == 200
    members = gzip.compress(body[:20]) + gzip.compress(body[20:])
    assert client.post("/scored_data", content=members, headers=PACKED).status_code == 200


def test_a_key_stands_for_the_inflated_body(client, calls):
    body = json.dumps(calls.group()).encode()
    headers = PACKED | {"Idempotency-Key": "k"}
    answers = [
        client.post("/scored_data", content=gzip.compress(body, level), headers=headers).json()["status"]
        for level in (1, 9)
    ]
    assert answers == ["received", "duplicate"]


@pytest.mark.parametrize("harm", ["plain", "truncated", "flipped", "trailing", "deflate"])
def test_broken_gzip_is_400(client, calls, harm):
    packed = gzip.compress(json.dumps(calls.group()).encode())
    broken = {
        "plain": b"not gzip at all",
        "truncated": packed[:-12],
        "flipped": packed[:20] + bytes([packed[20] ^ 0xFF]) + packed[21:],
        "trailing": packed + b"more",
        "deflate": zlib.compress(b"{}"),
    }[harm]
    answer = client.post("/scored_data", content=broken, headers=PACKED)
    assert (answer.status_code, answer.json()) == (400, {"detail": "Invalid gzip payload"})


def test_a_million_empty_gzip_members_are_not_inflated_one_by_one(client):
    began = time.monotonic()
    answer = client.post("/scored_data", content=gzip.compress(b"") * 500_000, headers=PACKED)
    assert (answer.status_code, answer.json()) == (400, {"detail": "Invalid gzip payload"})
    assert time.monotonic() - began < 20


def test_another_compression_is_400(client, calls):
    headers = JSON | {"Content-Encoding": "br"}
    assert client.post("/scored_data", content=json.dumps(calls.group()), headers=headers).status_code == 400


def test_an_empty_gzip_body_is_an_empty_body(client):
    assert client.post("/scored_data", content=gzip.compress(b""), headers=PACKED).status_code == 422
    assert client.post("/scored_data", content=b"", headers=PACKED).status_code == 422


def test_a_gzip_bomb_is_413(client, config):
    bomb = gzip.compress(b" " * (config.max_body_bytes + 1), 9)
    assert len(bomb) < 100_000
    assert client.post("/scored_data", content=bomb, headers=PACKED).status_code == 413


def test_bodies_over_the_limit_are_413_announced_or_not(client, config):
    announced = JSON | {"Content-Length": str(config.max_body_bytes + 1)}
    assert client.post("/scored_data", content=b"{}", headers=announced).status_code == 413
    packed = PACKED | {"Content-Length": str(config.max_packed_bytes + 1)}
    assert client.post("/scored_data", content=b"{}", headers=packed).status_code == 413
    chunks = (b" " * 2**22 for _ in range(17))
    assert client.post("/scored_data", content=chunks, headers=JSON).status_code == 413


def test_answers_are_compressed_when_asked_for_and_large_enough(client, calls):
    client.post("/scored_data", json=calls.group(size=200))
    asked = client.get("/latest_example", headers={"Accept-Encoding": "gzip"})
    assert asked.headers["content-encoding"] == "gzip"
    assert asked.headers["vary"] == "Accept-Encoding"
    assert len(asked.json()["tokens"]) == 200
    plain = client.get("/latest_example", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert "content-encoding" not in client.get("/latest_example", headers={"Accept-Encoding": "gzip;q=0"}).headers
    small = client.get("/status", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in small.headers


def test_headers_that_are_stored_have_at_most_255_characters(client, calls):
    calls.register({"Treadle-Holder": "x" * 255})
    for call, name in (("/register", "Treadle-Holder"), ("/scored_data", "Idempotency-Key")):
        body = calls.group() | {"wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 128,
            "checkpoint_dir": "c", "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 10}  # fmt: skip
        for value in ("x" * 256, ""):
            answer = client.post(call, json=body, headers={name: value})
            assert (answer.status_code, answer.json()) == (422, {"detail": f"{name} must have 1 to 255 characters"})


def test_environments_are_taken_up_to_a_number(client, calls, monkeypatch):
    monkeypatch.setattr("treadle.hub.atropos_routes.MAX_ENVS", 2)
    calls.register()
    client.get("/batch")
    assert [calls.register_env(desired_name=name)["env_id"] for name in ("a", "b")] == [0, 1]
    body = {"max_token_length": 512, "desired_name": "c", "weight": 1.0, "group_size": 2}
    answer = client.post("/register-env", json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json() == {"detail": "2 environments have registered, and no more are taken: reset the hub"}


def test_values_of_any_shape_are_looked_through_level_by_level(client, calls):
    """The first value that cannot be sent on refuses the field, wherever it stands."""
    nested = {"a": [{"b": [1, 2.5, None, True, "x", {}]}, []], "c": -(2**63)}
    answer = client.post("/scored_data", json=calls.group(images=nested, generation_params=nested))
    assert answer.status_code == 200
    for bad in (2**63, -(2**63) - 1):
        answer = client.post("/scored_data", json=calls.group(images=[nested, [[bad, 1.0]]]))
        assert answer.json()["detail"][0]["type"] == "int_out_of_range"
    answer = client.post("/scored_data", content=json.dumps(calls.group(images=[[1.0, float("nan")]])), headers=JSON)
    assert answer.json()["detail"][0]["type"] == "finite_number"
    deepest = json.loads("[" * 33 + "]" * 33)
    assert client.post("/scored_data", json=calls.group(images=deepest)).status_code == 200
    assert client.post("/scored_data", json=calls.group(images=[deepest])).json()["detail"][0]["type"] == "too_deep"
