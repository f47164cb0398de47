"""Atropos' wire format, statement by statement, over a real hub process and real sockets.

The classes follow the sections of the description of Atropos 0.4.0's API: 1.0 process, 1.1 transport, 1.2 endpoints,
1.3 queueing, 1.4 packing, 1.5 minimums, 1.6 /status-env, 1.7 steps, 1.8 overrides, 1.9 faults. A docstring that
begins with "Original:" says what Atropos did there; the test holds what we do instead, and why.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from tests.contract.atropos_calls import (
    ENV,
    JSON,
    TRAINER,
    Atropos,
    chunked,
    group,
    raw_exchange,
    request_bytes,
)
from tests.hub_process import HubProcess
from treadle.config.schema import HubConfig
from treadle.hub.endpoint import access_of
from treadle.hub.process import app_of
from treadle.hub.state import HubState
from treadle.store import SqliteStore

GROUP_KEYS = [
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs",
    "overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs",
]  # fmt: skip
JSON_LINE = "Content-Type: application/json"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(tmp_path_factory.mktemp("wire")) as running:
        yield running


@pytest.fixture(scope="module")
def client(hub: HubProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hub.url, timeout=20.0) as opened:
        yield opened


@pytest.fixture
def calls(client: httpx.Client) -> Atropos:
    """A hub that knows nothing: whatever an earlier test left is forgotten."""
    assert client.get("/reset_data").text == "Reset successful"
    return Atropos(client)


class Test10Process:
    def test_the_default_port_is_8000_and_only_this_machine_is_served(self):
        """Original: 0.0.0.0:8000 (S11)."""
        assert (HubConfig().host, HubConfig().port) == ("127.0.0.1", 8000)

    def test_the_openapi_description_is_served(self, calls: Atropos):
        assert "/scored_data" in calls.get("/openapi.json")["paths"]

    @pytest.mark.parametrize("page", ["/docs", "/redoc"])
    def test_the_interactive_pages_are_not_served(self, calls: Atropos, page: str):
        """Original: served; they load scripts from other machines."""
        assert calls.client.get(page).status_code == 404


class Test11Transport:
    @pytest.mark.parametrize("line", ["Content-Type: text/plain", "X-Nothing: 1", "Content-Type: text/json"])
    def test_a_body_without_the_json_content_type_is_422(self, hub: HubProcess, calls: Atropos, line: str):
        answer = raw_exchange(hub.port, request_bytes("POST", "/disconnect-env", b'{"env_id":0}', line))
        assert answer.status == 422
        assert json.loads(answer.body)["detail"][0]["type"] == "model_attributes_type"

    @pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json"])
    def test_the_json_content_type_in_its_spellings_is_taken(self, calls: Atropos, kind: str):
        assert calls.send("/scored_data", group(), {"Content-Type": kind}).status_code == 200

    def test_unknown_fields_are_ignored_not_stored_and_not_returned(self, calls: Atropos):
        assert calls.post(new_field={"deep": [1]}, policy_version=0, item=3, metrics={"a": 1.0}) == {
            "status": "received"
        }
        assert list(calls.get("/latest_example")) == GROUP_KEYS
        calls.register(new_field=1)

    @pytest.mark.parametrize(("sent", "read"), [("1.0", 1), ('"1"', 1), ("true", 1), ("false", 0), ("1e1", 10)])
    def test_integers_are_taken_in_other_clothes(self, calls: Atropos, sent: str, read: int):
        body = json.dumps(TRAINER | {"batch_size": "?"}).replace('"?"', sent)
        assert calls.send("/register", body.encode()).status_code == 200
        assert calls.get("/info")["batch_size"] == read

    @pytest.mark.parametrize(
        ("sent", "kind"),
        [("1.5", "int_from_float"), ("null", "int_type"), ('"one"', "int_parsing"), ("[1]", "int_type")],
    )
    def test_what_is_no_integer_is_422(self, calls: Atropos, sent: str, kind: str):
        body = json.dumps(TRAINER | {"batch_size": "?"}).replace('"?"', sent)
        assert calls.refusal("/register", body.encode()) == (422, kind, ["batch_size"])

    def test_floats_are_taken_as_integers_strings_and_truth_values(self, calls: Atropos):
        body = group() | {"scores": [3, "1.5"]}
        assert calls.send("/scored_data", body).status_code == 200
        assert calls.get("/latest_example")["scores"] == [3.0, 1.5]
        assert calls.send("/scored_data", group() | {"scores": [True, False]}).status_code == 200
        assert calls.get("/latest_example")["scores"] == [1.0, 0.0]

    def test_truth_values_count_as_numbers_in_every_field_of_a_group(self, calls: Atropos):
        calls.start()
        calls.register_env()
        body = group(env_id=False, distill_token_ids=[[[True]]], tokens=[[True, 2]] * 2)
        assert calls.send("/scored_data", body).json() == {"status": "received"}
        example = calls.get("/latest_example")
        assert (example["env_id"], example["distill_token_ids"], example["tokens"][0]) == (0, [[[1]]], [1, 2])

    def test_integers_of_any_size_are_refused_beyond_what_everyone_can_read(self, calls: Atropos):
        """Original: arbitrarily large integers are accepted and echoed, and fail in the trainer."""
        assert calls.refusal("/register", TRAINER | {"num_steps": 10**30}) == (422, "int_out_of_range", ["num_steps"])
        assert calls.refusal("/scored_data", group(env_id=10**30)) == (422, "int_out_of_range", ["env_id"])
        assert calls.refusal("/scored_data", group() | {"tokens": [[10**30, 2]] * 2})[1] == "out_of_vocabulary"

    def test_a_validation_error_names_type_place_message_and_input(self, calls: Atropos):
        answer = calls.send("/scored_data", group() | {"scores": [1.0, None]})
        assert (answer.status_code, answer.headers["content-type"]) == (422, "application/json")
        (detail,) = answer.json()["detail"]
        assert detail == {
            "type": "float_type", "loc": ["body", "scores", 1], "msg": "expected float, got null", "input": None,
        }  # fmt: skip

    def test_a_missing_field_is_named(self, calls: Atropos):
        assert calls.refusal("/scored_data", {"tokens": [], "masks": []}) == (422, "missing", ["scores"])

    def test_bad_json_is_named_with_its_offset(self, calls: Atropos):
        assert calls.refusal("/scored_data", b'{"tokens": [[1,}') == (422, "json_invalid", [15])

    def test_nothing_answers_500(self, calls: Atropos):
        """Original: an uncaught error is 500 text/plain "Internal Server Error"; each known way there is closed."""
        bodies = [b'{"env_id":NaN}', b'{"env_id":1e400}', b'{"env_id":"\\ud800"}', b'{"env_id":{"a":NaN}}']
        for body in bodies:
            for method, path in (("POST", "/disconnect-env"), ("GET", "/status-env"), ("POST", "/scored_data")):
                answer = calls.client.request(method, path, content=body, headers=JSON)
                assert (answer.status_code, answer.headers["content-type"]) == (422, "application/json")

    def test_an_unknown_path_is_404(self, calls: Atropos):
        answer = calls.client.get("/nothing")
        assert (answer.status_code, answer.content) == (404, b'{"detail":"Not Found"}')

    @pytest.mark.parametrize(
        ("method", "path"), [("POST", "/batch"), ("GET", "/register"), ("PUT", "/scored_data"), ("OPTIONS", "/info"),
                             ("DELETE", "/reset_data"), ("POST", "/reset_data"), ("POST", "/status-env")]
    )  # fmt: skip
    def test_another_method_is_405(self, calls: Atropos, method: str, path: str):
        answer = calls.client.request(method, path)
        assert (answer.status_code, answer.content) == (405, b'{"detail":"Method Not Allowed"}')
        assert answer.headers["allow"] in ("GET", "POST")

    def test_head_is_405_and_takes_no_batch(self, hub: HubProcess, calls: Atropos):
        calls.register(batch_size=2)
        calls.post()
        assert raw_exchange(hub.port, request_bytes("HEAD", "/batch"), has_body=False).status == 405
        assert calls.tags() == [7]

    def test_a_trailing_slash_redirects_with_307(self, calls: Atropos):
        answer = calls.client.post("/scored_data/", json=group())
        assert answer.status_code == 307
        assert answer.headers["location"].endswith("/scored_data")
        followed = calls.client.post("/scored_data/", json=group(), follow_redirects=True)
        assert followed.json() == {"status": "received"}

    @pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip", "identity, gzip", "gzip,gzip"])
    def test_a_gzip_body_is_inflated_under_any_header_that_says_gzip(self, calls: Atropos, encoding: str):
        packed = gzip.compress(json.dumps(group()).encode())
        answer = calls.send("/scored_data", packed, JSON | {"Content-Encoding": encoding})
        assert answer.json() == {"status": "received"}

    @pytest.mark.parametrize("size", [1, 7, 4096])
    def test_a_gzip_body_may_come_in_chunks(self, hub: HubProcess, calls: Atropos, size: int):
        packed = gzip.compress(json.dumps(group()).encode())
        head = request_bytes("POST", "/scored_data", b"", JSON_LINE, "Content-Encoding: gzip",
                             "Transfer-Encoding: chunked")  # fmt: skip
        answer = raw_exchange(hub.port, head + chunked(packed, size))
        assert (answer.status, answer.body) == (200, b'{"status":"received"}')

    def test_gzip_works_on_every_route_with_a_body(self, calls: Atropos):
        headers = JSON | {"Content-Encoding": "gzip"}
        assert calls.send("/register", gzip.compress(json.dumps(TRAINER).encode()), headers).status_code == 200
        calls.get("/batch")
        assert calls.send("/register-env", gzip.compress(json.dumps(ENV).encode()), headers).json()["env_id"] == 0
        asked = calls.client.request("GET", "/status-env", content=gzip.compress(b'{"env_id":0}'), headers=headers)
        assert asked.json()["queue_size"] == 0

    def test_bytes_that_are_no_gzip_are_400(self, calls: Atropos):
        """Original: the same status and words, as text/plain."""
        answer = calls.send("/scored_data", b"not gzip", JSON | {"Content-Encoding": "gzip"})
        assert (answer.status_code, answer.json()) == (400, {"detail": "Invalid gzip payload"})

    @pytest.mark.parametrize("harm", ["truncated", "corrupt", "bad_checksum", "trailing"])
    def test_broken_gzip_is_400(self, calls: Atropos, harm: str):
        """Original: 500."""
        packed = gzip.compress(json.dumps(group()).encode())
        broken = {
            "truncated": packed[:-9],
            "corrupt": packed[:15] + b"\xff\xff\xff" + packed[18:],
            "bad_checksum": packed[:-8] + b"1234" + packed[-4:],
            "trailing": packed + b"rest",
        }[harm]
        answer = calls.send("/scored_data", broken, JSON | {"Content-Encoding": "gzip"})
        assert (answer.status_code, answer.json()) == (400, {"detail": "Invalid gzip payload"})

    @pytest.mark.parametrize("body", [b"", gzip.compress(b"", mtime=0)])
    def test_an_empty_gzip_body_is_an_empty_body(self, calls: Atropos, body: bytes):
        assert calls.send("/scored_data", body, JSON | {"Content-Encoding": "gzip"}).status_code == 422

    def test_deflate_is_not_supported(self, calls: Atropos):
        """Original: the same status; its message is the beginning of this hub's message."""
        packed = zlib.compress(json.dumps(group()).encode())
        answer = calls.send("/scored_data", packed, JSON | {"Content-Encoding": "deflate"})
        assert answer.status_code == 400
        assert answer.json()["detail"].startswith("There was an error parsing the body")

    def test_inflating_has_a_limit(self, calls: Atropos):
        """Original: none (S7)."""
        bomb = gzip.compress(b" " * (HubConfig().max_body_bytes + 1), 1)
        answer = calls.send("/scored_data", bomb, JSON | {"Content-Encoding": "gzip"})
        assert (answer.status_code, answer.json()) == (413, {"detail": "the body is larger than 64 MiB"})

    @pytest.mark.parametrize("accepted", ["gzip", "gzip, deflate", "deflate, gzip;q=0.5"])
    def test_a_large_answer_is_compressed_when_asked_for(self, hub: HubProcess, calls: Atropos, accepted: str):
        calls.post(size=100)
        answer = raw_exchange(hub.port, request_bytes("GET", "/latest_example", b"", f"Accept-Encoding: {accepted}"))
        assert (answer.headers["content-encoding"], answer.headers["vary"]) == ("gzip", "Accept-Encoding")
        assert len(json.loads(gzip.decompress(answer.body))["tokens"]) == 100

    @pytest.mark.parametrize("line", ["Accept-Encoding: identity", "X-Nothing: 1", "Accept-Encoding: gzip;q=0"])
    def test_a_large_answer_is_plain_when_not(self, hub: HubProcess, calls: Atropos, line: str):
        """Original: `gzip;q=0` is read as a wish for gzip."""
        calls.post(size=100)
        answer = raw_exchange(hub.port, request_bytes("GET", "/latest_example", b"", line))
        assert "content-encoding" not in answer.headers
        assert answer.headers["vary"] == "Accept-Encoding"  # a cache must not give this one to the other kind
        assert len(json.loads(answer.body)["tokens"]) == 100

    def test_answers_are_compressed_from_1000_bytes_on(self, hub: HubProcess, calls: Atropos):
        def encoding_of(num_bytes: int) -> tuple[int, str]:
            calls.post()
            spare = num_bytes - len(
                calls.client.get("/latest_example", headers={"Accept-Encoding": "identity"}).content
            )
            calls.post(images="x" * (spare + len("null") - len('""')))
            answer = raw_exchange(hub.port, request_bytes("GET", "/latest_example", b"", "Accept-Encoding: gzip"))
            body = gzip.decompress(answer.body) if "content-encoding" in answer.headers else answer.body
            return len(body), answer.headers.get("content-encoding", "plain")

        assert encoding_of(999) == (999, "plain")
        assert encoding_of(1000) == (1000, "gzip")

    @pytest.mark.parametrize("header", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
    def test_web_pages_are_refused_and_no_cors_header_is_ever_sent(self, calls: Atropos, header: dict[str, str]):
        """Original: every origin is echoed, with credentials (S11)."""
        answer = calls.client.get("/info", headers=header)
        assert answer.status_code == 403
        for each in (answer, calls.client.get("/info")):
            assert not [name for name in each.headers if name.startswith("access-control")]

    def test_json_comes_compact_and_in_utf_8(self, hub: HubProcess, calls: Atropos):
        calls.register(wandb_project="möhre", wandb_group="😀")
        answer = raw_exchange(hub.port, request_bytes("GET", "/wandb_info"))
        assert answer.headers["content-type"] == "application/json"
        assert answer.body == '{"group":"😀","project":"möhre"}'.encode()


class Test12Endpoints:
    def test_root(self, calls: Atropos):
        assert calls.client.get("/").content == b'{"message":"AtroposLib API"}'

    # POST /register

    @pytest.mark.parametrize("field", list(TRAINER))
    def test_register_needs_each_of_its_eight_fields(self, calls: Atropos, field: str):
        without = {name: value for name, value in TRAINER.items() if name != field}
        assert calls.refusal("/register", without) == (422, "missing", [field])

    @pytest.mark.parametrize("field", ["wandb_group", "wandb_project", "checkpoint_dir"])
    def test_register_rejects_null_and_takes_the_empty_string(self, calls: Atropos, field: str):
        assert calls.refusal("/register", TRAINER | {field: None}) == (422, "string_type", [field])
        calls.register(**{field: ""})

    @pytest.mark.parametrize("number", [0, -1])
    def test_register_checks_no_ranges(self, calls: Atropos, number: int):
        fields = ("batch_size", "max_token_len", "save_checkpoint_interval", "starting_step", "num_steps")
        calls.register(**dict.fromkeys(fields, number))
        assert calls.get("/info") == {"batch_size": number, "max_token_len": number}
        assert calls.get("/batch") == {"batch": None}

    def test_register_answers_a_128_bit_integer_as_a_bare_number(self, calls: Atropos):
        answers = [calls.send("/register", TRAINER).text for _ in range(8)]
        numbers = [json.loads(answer)["uuid"] for answer in answers]
        assert answers == [f'{{"uuid":{number}}}' for number in numbers]
        assert all(isinstance(number, int) and number < 2**128 for number in numbers)
        assert max(numbers) > 2**64
        assert len(set(numbers)) == 8

    def test_a_second_register_updates_the_first(self, calls: Atropos):
        """Original: once anything was posted, another /register is silently ignored (S10)."""
        calls.register(batch_size=8)
        calls.post()
        calls.register(batch_size=2, wandb_group="other", starting_step=5)
        assert calls.get("/info")["batch_size"] == 2
        assert calls.get("/wandb_info")["group"] == "other"
        assert calls.get("/status") == {"current_step": 5, "queue_size": 1}
        assert calls.tags() == [7]

    def test_data_before_the_registration_is_kept_for_it(self, calls: Atropos):
        """Original: wedged for ever, until /reset_data (S1)."""
        calls.post(tag=1)
        calls.register(batch_size=2)
        assert calls.tags() == [1]

    # POST /register-env

    @pytest.mark.parametrize("field", list(ENV))
    def test_register_env_needs_its_four_fields(self, calls: Atropos, field: str):
        without = {name: value for name, value in ENV.items() if name != field}
        assert calls.refusal("/register-env", without) == (422, "missing", [field])

    def test_register_env_takes_null_for_name_and_weight(self, calls: Atropos):
        """Original: 422, although its own client sends null when no name is set."""
        calls.start()
        assert calls.register_env(desired_name=None, weight=None)["wandb_name"] == "env_0"
        assert calls.env_status(0).json()["env_weight"] == 1.0

    def test_environments_wait_until_the_trainer_has_asked_for_a_batch(self, calls: Atropos):
        waiting = {"status": "wait for trainer to start"}
        assert calls.register_env() == waiting
        calls.register()
        assert calls.register_env() == waiting
        calls.get("/batch")
        assert calls.register_env()["env_id"] == 0  # nothing of the earlier ones was kept

    def test_register_env_answers_the_run(self, calls: Atropos):
        """Ours adds `groups_accepted`, the cursor of an environment that comes back, `run_id`, and of the trainer how
        often it publishes and where it logs to."""
        calls.start(starting_step=3)
        registered = calls.register_env(min_batch_allocation=5.0)
        assert len(registered.pop("run_id")) == 32
        assert registered == {
            "status": "success", "env_id": 0, "wandb_name": "math_0", "checkpoint_dir": "c", "starting_step": 3,
            "checkpoint_interval": 5, "num_steps": 10, "groups_accepted": 0, "publish_interval": 1,
            "trackers": {"sinks": [], "project": "", "group": ""},
        }  # fmt: skip

    def test_register_env_tells_the_current_step(self, calls: Atropos):
        calls.start(batch_size=2)
        calls.post()
        calls.batch()
        assert calls.register_env()["starting_step"] == 1

    def test_names_count_their_namesakes_and_ids_count_everyone(self, calls: Atropos):
        calls.start()
        names = ["math", "math", "code", "math"]
        answers = [calls.register_env(desired_name=name) for name in names]
        assert [answer["wandb_name"] for answer in answers] == ["math_0", "math_1", "code_0", "math_2"]
        assert [answer["env_id"] for answer in answers] == [0, 1, 2, 3]
        calls.send("/disconnect-env", {"env_id": 3})
        assert calls.register_env(desired_name="new")["env_id"] == 4  # never used again

    def test_after_a_reset_environments_wait_for_a_trainer_again(self, calls: Atropos):
        """Original: after /reset_data and /batch they could register with a run that did not exist."""
        calls.start()
        calls.client.get("/reset_data")
        calls.client.get("/batch")
        assert calls.register_env() == {"status": "wait for trainer to start"}

    # POST /disconnect-env

    def test_disconnect_env(self, calls: Atropos):
        calls.start()
        calls.register_env()
        calls.post(env_id=0)
        assert calls.send("/disconnect-env", {"env_id": 0}).json() == {"status": "success"}
        assert calls.get("/status")["queue_size"] == 1
        assert calls.post(env_id=0) == {"status": "received"}

    @pytest.mark.parametrize("env_id", [0, 99, -1])
    def test_disconnect_env_of_an_unknown_id_is_a_failure_with_status_200(self, calls: Atropos, env_id: int):
        answer = calls.send("/disconnect-env", {"env_id": env_id})
        error = f"no environment has the id {env_id}"
        assert (answer.status_code, answer.json()) == (200, {"status": "failure", "error": error})

    def test_a_negative_id_is_nobodys(self, calls: Atropos):
        """Original: -1 is the environment that registered last (S10)."""
        calls.start()
        calls.register_env()
        assert calls.send("/disconnect-env", {"env_id": -1}).json()["status"] == "failure"
        assert calls.env_status(-1).status_code == 404

    # GET /wandb_info, /info, /status

    def test_wandb_info(self, calls: Atropos):
        assert calls.client.get("/wandb_info").content == b'{"group":null,"project":null}'
        calls.register()
        assert calls.client.get("/wandb_info").content == b'{"group":"g","project":"p"}'
        calls.client.get("/reset_data")
        assert calls.get("/wandb_info") == {"group": None, "project": None}

    def test_info(self, calls: Atropos):
        """Original: max_token_len keeps its old value after a reset."""
        assert calls.client.get("/info").content == b'{"batch_size":-1,"max_token_len":-1}'
        calls.register()
        assert calls.get("/info") == {"batch_size": 8, "max_token_len": 128}
        calls.client.get("/reset_data")
        assert calls.get("/info") == {"batch_size": -1, "max_token_len": -1}

    def test_status_counts_groups(self, calls: Atropos):
        assert calls.client.get("/status").content == b'{"current_step":0,"queue_size":0}'
        calls.post(size=4)
        calls.post(size=4)
        assert calls.get("/status") == {"current_step": 0, "queue_size": 2}

    def test_status_counts_groups_of_an_odd_size_too(self, calls: Atropos):
        """Original: what waits in the buffer of an environment is not counted."""
        calls.start()
        calls.register_env(group_size=4)
        calls.post(size=2, env_id=0)
        assert calls.get("/status")["queue_size"] == 1

    # GET /latest_example

    def test_latest_example_of_nothing_has_nine_empty_lists(self, tmp_path: Path):
        with HubProcess(tmp_path) as fresh:
            example = httpx.get(f"{fresh.url}/latest_example").json()
        keys = ["tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs",
                "messages", "images"]  # fmt: skip
        assert list(example.items()) == [(key, []) for key in keys]

    def test_latest_example_is_the_last_group_and_survives_a_reset(self, calls: Atropos):
        calls.post(tag=1)
        calls.post(tag=2)
        for _ in range(2):
            example = calls.get("/latest_example")
            assert list(example) == GROUP_KEYS
            assert example == dict.fromkeys(GROUP_KEYS) | group(tag=2)
            calls.client.get("/reset_data")

    # POST /scored_data

    FULL = group() | {
        "advantages": [[0.5, 0.5], [0.25, 0.25]],
        "ref_logprobs": [[0.0, -0.5], [0.0, -0.5]],
        "messages": [
            [{"role": "user", "content": "hi", "reward": 1.0, "name": "x"}],
            [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        ],
        "generation_params": {"temperature": 0.7, "stop": ["\n"]},
        "inference_logprobs": [[1.0, -0.25], [1.0, -0.5]],
        "overrides": [{"set_advantage_to_zero": True}, {}],
        "group_overrides": {"group_size": 2},
        "images": ["aGk=", None],
        "distill_token_ids": [[[1, 2], [3, 4]], [[1, 2], [3, 4]]],
        "distill_logprobs": [[[-0.5, -1.0], [-0.5, -1.0]], [[-0.5, -1.0], [-0.5, -1.0]]],
    }

    def test_a_group_comes_back_as_it_was_sent_in_the_order_of_the_keys(self, calls: Atropos):
        calls.start(batch_size=2)
        calls.register_env()
        sent = self.FULL | {"env_id": 0}
        assert calls.send("/scored_data", sent).json() == {"status": "received"}
        (back,) = calls.get("/batch")["batch"]
        assert list(back) == GROUP_KEYS
        assert back == sent

    @pytest.mark.parametrize("field", [key for key in GROUP_KEYS if key not in ("tokens", "masks", "scores")])
    def test_each_other_field_may_be_null_or_absent(self, calls: Atropos, field: str):
        calls.register(batch_size=2)
        assert calls.post(**{field: None}) == {"status": "received"}
        assert calls.post() == {"status": "received"}
        assert calls.get("/batch")["batch"][0][field] is None

    @pytest.mark.parametrize(
        ("fields", "kind", "loc"),
        [
            ({"tokens": [1, 2]}, "list_type", ["tokens", 0]),
            ({"scores": [[1.0], [1.0]]}, "float_type", ["scores", 0]),
            ({"advantages": [1.0, 2.0]}, "list_type", ["advantages", 0]),
            ({"ref_logprobs": {}}, "list_type", ["ref_logprobs"]),
            ({"messages": [[{"role": "user"}]]}, "value_error", ["messages", 0, 0]),
            ({"messages": [[{"content": "hi"}]]}, "value_error", ["messages", 0, 0]),
            ({"generation_params": []}, "model_attributes_type", ["generation_params"]),
            ({"inference_logprobs": [[None, 1.0], [1.0, 1.0]]}, "float_type", ["inference_logprobs", 0, 0]),
            ({"overrides": {}}, "list_type", ["overrides"]),
            ({"overrides": [None, {}]}, "model_attributes_type", ["overrides", 0]),
            ({"group_overrides": [1]}, "model_attributes_type", ["group_overrides"]),
            ({"env_id": "first"}, "int_parsing", ["env_id"]),
            ({"distill_token_ids": [[1]]}, "list_type", ["distill_token_ids", 0, 0]),
            ({"distill_logprobs": [[["x"]]]}, "float_parsing", ["distill_logprobs", 0, 0, 0]),
        ],
    )
    def test_a_field_of_another_type_is_422(
        self, calls: Atropos, fields: dict[str, Any], kind: str, loc: list[str | int]
    ):
        assert calls.refusal("/scored_data", group() | fields) == (422, kind, loc)

    @pytest.mark.parametrize("messages", [[None], [[None]], ["hi"], 1])
    def test_messages_of_another_type_are_422(self, calls: Atropos, messages: Any):
        """Original: 500."""
        assert calls.refusal("/scored_data", group(messages=messages))[0] == 422

    @pytest.mark.parametrize("images", [1, "x", {"a": [None]}, [[[]]], True])
    def test_images_may_be_anything(self, calls: Atropos, images: Any):
        calls.post(images=images)
        assert calls.get("/latest_example")["images"] == images

    @pytest.mark.parametrize(
        ("fields", "kind", "loc"),
        [
            ({"tokens": [], "masks": [], "scores": []}, "too_short", ["tokens"]),
            ({"tokens": [[1], []], "masks": [[1], []]}, "too_short", ["tokens", 1]),
            ({"scores": [1.0]}, "length_mismatch", ["scores"]),
            ({"masks": [[1, 2]]}, "length_mismatch", ["masks"]),
            ({"masks": [[1, 2], [1]]}, "length_mismatch", ["masks", 1]),
            ({"inference_logprobs": [[1.0, 1.0], [1.0]]}, "length_mismatch", ["inference_logprobs", 1]),
            ({"overrides": [{}]}, "length_mismatch", ["overrides"]),
            ({"env_id": 0}, "unknown_env", ["env_id"]),
            ({"env_id": -1}, "unknown_env", ["env_id"]),
            ({"scores": [1.0, float("nan")]}, "finite_number", ["scores", 1]),
            ({"tokens": [[1, -2], [1, 2]]}, "negative_id", ["tokens", 0, 1]),
        ],
    )
    def test_what_does_not_fit_together_is_refused_at_the_door(
        self, calls: Atropos, fields: dict[str, Any], kind: str, loc: list[str | int]
    ):
        """Original: all of it is 200, and breaks the trainer or is lost later (S2, S5)."""
        assert calls.refusal("/scored_data", group() | fields) == (422, kind, loc)
        assert calls.get("/status")["queue_size"] == 0

    def test_ragged_groups_are_fine(self, calls: Atropos):
        ragged = {"tokens": [[1], [1, 2, 3]], "masks": [[1], [-100, 2, 3]], "scores": [0.0, 1.0]}
        assert calls.send("/scored_data", ragged).json() == {"status": "received"}

    @pytest.mark.parametrize("advantages", [[[1.0], [1.0]], [[1.0]], [], [[], [1.0, 2.0, 3.0]]])
    def test_advantages_of_any_length_are_taken(self, calls: Atropos, advantages: list[list[float]]):
        assert calls.post(advantages=advantages) == {"status": "received"}

    # POST /scored_data_list

    def test_a_list_tells_how_many_groups_it_had(self, calls: Atropos):
        answer = calls.send("/scored_data_list", [group(tag=1), group(tag=2)])
        assert answer.content == b'{"status":"received","groups_processed":2}'
        assert calls.send("/scored_data_list", []).json() == {"status": "received", "groups_processed": 0}
        assert calls.get("/status")["queue_size"] == 2

    def test_a_list_tells_how_many_were_of_an_odd_size(self, calls: Atropos):
        calls.start()
        calls.register_env(group_size=2)
        posted = [group(2, env_id=0), group(1, env_id=0), group(3, env_id=0)]
        expected = {"status": "received", "groups_processed": 3, "buffered": 2, "last_buffer_size": 4}
        assert calls.send("/scored_data_list", posted).json() == expected

    @pytest.mark.parametrize("bad", [{"scores": [1.0]}, {"scores": [float("nan"), 0.0]}, {"tokens": 1}])
    def test_one_bad_group_refuses_the_whole_list(self, calls: Atropos, bad: dict[str, Any]):
        status, _, loc = calls.refusal("/scored_data_list", [group(), group() | bad])
        assert (status, loc[0]) == (422, 1)
        assert calls.get("/status")["queue_size"] == 0

    def test_a_list_where_a_group_belongs_is_422_and_the_reverse(self, calls: Atropos):
        assert calls.refusal("/scored_data", [group()])[:2] == (422, "model_attributes_type")
        assert calls.refusal("/scored_data_list", group())[:2] == (422, "list_type")

    # GET /batch

    def test_batch_without_a_trainer_is_an_error_in_words_with_status_200(self, calls: Atropos):
        message = "Trainer not registered. Call /register first."
        assert calls.get("/batch") == {"status": "error", "message": message, "batch": []}

    def test_batch_is_null_until_one_can_be_formed(self, calls: Atropos):
        calls.register(batch_size=4)
        assert calls.client.get("/batch").content == b'{"batch":null}'
        calls.post(tag=1)
        assert calls.tags() is None
        calls.post(tag=2)
        assert calls.tags() == [1, 2]
        assert calls.tags() is None

    def test_batches_come_in_the_order_of_arrival_and_the_step_counts_each(self, calls: Atropos):
        """Original: the last formed comes first, 5,4,3,2,1,0; the step is 6 after the first call (S4)."""
        calls.register(batch_size=2)
        for tag in range(6):
            calls.post(tag=tag)
        seen = []
        for step in range(1, 7):
            seen.append(calls.tags())
            assert calls.get("/status") == {"current_step": step, "queue_size": 6 - step}
        assert seen == [[0], [1], [2], [3], [4], [5]]

    def test_several_trainers_share_the_stream(self, hub: HubProcess, calls: Atropos):
        calls.register(batch_size=2)
        for tag in range(4):
            calls.post(tag=tag)
        with httpx.Client(base_url=hub.url) as other:
            assert [calls.tags(), Atropos(other).tags(), calls.tags(), Atropos(other).tags()] == [[0], [1], [2], [3]]

    # GET /status-env

    def test_status_env_takes_the_id_in_a_body_or_in_the_query(self, calls: Atropos):
        """Original: only in the body of the GET (#449)."""
        calls.start()
        calls.register_env()
        answer = calls.env_status(0)
        assert answer.content == (
            b'{"current_step":0,"queue_size":0,"unallocated_fraction":1.0,"self_queue_size":0,"max_group_size":1,'
            b'"env_weight":1.0}'
        )
        assert calls.client.get("/status-env?env_id=0").content == answer.content

    def test_status_env_without_an_id_is_422(self, hub: HubProcess, calls: Atropos):
        assert calls.client.get("/status-env").status_code == 422
        assert calls.client.get("/status-env?env_id=first").status_code == 422
        unnamed = raw_exchange(
            hub.port, request_bytes("GET", "/status-env", b'{"env_id":0}', "Content-Type: text/plain")
        )
        assert unnamed.status == 422

    def test_status_env_of_nobody_is_404(self, calls: Atropos):
        """Original: 500, which ends the environment after three tries (E5)."""
        for env_id in (0, 99, 2**40):
            answer = calls.env_status(env_id)
            assert (answer.status_code, answer.json()) == (404, {"detail": f"no environment has the id {env_id}"})

    def test_status_env_when_all_are_disconnected_is_answered(self, calls: Atropos):
        """Original: 500, a division by zero."""
        calls.start()
        calls.register_env()
        calls.send("/disconnect-env", {"env_id": 0})
        assert calls.env_status(0).json()["env_weight"] == 0.01

    # GET /reset_data

    def test_reset_data_answers_plain_text_whether_there_was_anything_or_not(self, calls: Atropos):
        for _ in range(2):
            answer = calls.client.get("/reset_data")
            assert (answer.status_code, answer.text) == (200, "Reset successful")
            assert answer.headers["content-type"].startswith("text/plain")

    def test_reset_data_forgets_the_run(self, calls: Atropos):
        """Original: /batch is 500 afterwards."""
        calls.start(starting_step=4)
        calls.register_env()
        calls.post(env_id=0)
        calls.client.get("/reset_data")
        assert calls.get("/status") == {"current_step": 0, "queue_size": 0}
        assert calls.get("/batch")["status"] == "error"
        calls.start(batch_size=2)
        assert calls.register_env()["wandb_name"] == "math_0"


class Test13Queueing:
    def test_groups_of_another_than_the_registered_size_are_buffered(self, calls: Atropos):
        calls.start()
        calls.register_env(group_size=4)
        assert calls.post(4, env_id=0) == {"status": "received"}
        assert calls.post(2, env_id=0) == {"status": "buffered", "buffer_size": 2}

    def test_without_an_environment_every_size_is_received(self, calls: Atropos):
        calls.start()
        calls.register_env(group_size=4)
        assert [calls.post(size, env_id=None)["status"] for size in (1, 3, 4)] == ["received"] * 3

    def test_the_worked_example(self, calls: Atropos):
        """Original: sets that sum to group_size move on, 1 and 3 are then stuck for ever, and so is 8 (S6).

        Ours keeps one queue: `buffer_size` tells how many sequences wait in groups of an odd size. All are used.
        """
        calls.start(batch_size=8)
        calls.register_env(group_size=4)
        posted = [(1, 1), (2, 3), (3, 6), (4, None), (1, 7), (8, 15), (2, 17), (2, 19)]
        for tag, (size, buffered) in enumerate(posted):
            expected = {"status": "received"} if buffered is None else {"status": "buffered", "buffer_size": buffered}
            assert calls.post(size, tag, env_id=0) == expected
        assert calls.batch() == [(0, 1), (1, 2), (2, 3), (6, 2)]
        assert calls.batch() == [(5, 8)]
        assert calls.batch() is None  # 4, 1 and 2 wait for a last sequence
        calls.post(1, 9, env_id=0)
        assert calls.batch() == [(3, 4), (4, 1), (7, 2), (9, 1)]
        assert calls.get("/status")["queue_size"] == 0

    def test_a_larger_group_does_not_change_what_size_is_odd(self, calls: Atropos):
        """Original: the registered size ratchets up with the largest queued group."""
        calls.start()
        calls.register_env(group_size=2)
        calls.post(4, env_id=0)
        calls.env_status(0)
        assert calls.post(2, env_id=0) == {"status": "received"}


class Test14PackingWithoutMinimums:
    def test_the_verified_example(self, calls: Atropos):
        calls.register(batch_size=8)
        for tag, size in enumerate((4, 2, 1)):  # a, b, c
            calls.post(size, tag)
        assert calls.batch() is None
        calls.post(2, 3)  # d
        assert calls.tags() == [0, 1, 3]
        for tag, size in enumerate((1, 1, 1, 4), start=4):
            calls.post(size, tag)
        assert calls.tags() == [2, 4, 5, 6, 7]

    def test_a_batch_has_exactly_batch_size_sequences(self, calls: Atropos):
        calls.register(batch_size=8)
        for tag in range(12):
            calls.post((5, 2, 3, 1)[tag % 4], tag)
        batches = [calls.batch(), calls.batch(), calls.batch()]
        assert all(batch is not None and sum(size for _, size in batch) == 8 for batch in batches)

    def test_group_sizes_that_do_not_divide_the_batch_wait_until_they_fit(self, calls: Atropos):
        """Original: a silent deadlock (S6)."""
        calls.register(batch_size=8)
        for tag in range(5):
            calls.post(3, tag)
        assert calls.batch() is None
        assert "choose a group size that divides 8" in calls.get("/v1/explain")["reason"]
        calls.post(2, 9)
        assert calls.batch() == [(0, 3), (1, 3), (9, 2)]

    def test_a_group_larger_than_a_batch_is_refused_and_blocks_nobody(self, calls: Atropos):
        """Original: null for ever, also for every group of 4 behind it (S6)."""
        calls.register(batch_size=4)
        assert calls.refusal("/scored_data", group(8)) == (422, "oversize", ["tokens"])
        calls.post(4, 1)
        assert calls.tags() == [1]

    def test_a_group_that_became_too_large_is_dropped_with_a_reason(self, calls: Atropos):
        calls.post(8, 1)
        calls.post(4, 2)
        calls.register(batch_size=4)
        assert calls.tags() == [2]
        assert calls.get("/v1/status")["dropped_groups"] == 1

    def test_weights_decide_between_environments(self, calls: Atropos):
        """Original: weights play no part (S10)."""
        calls.start(batch_size=8)
        for weight in (1.0, 3.0):
            calls.register_env(weight=weight)
        for tag in range(8):
            calls.post(2, tag, env_id=tag % 2)
        batch = calls.get("/batch")["batch"]
        assert [each["env_id"] for each in batch].count(1) == 3


class Test15Minimums:
    def test_the_verified_example(self, calls: Atropos):
        calls.start(batch_size=8)
        calls.register_env(desired_name="A", min_batch_allocation=0.5, group_size=2)
        calls.register_env(desired_name="B", group_size=4)
        for tag in range(3):
            calls.post(4, tag, env_id=1)
        assert calls.batch() is None
        assert "waiting for A_0: its minimum is 4 of 8" in calls.get("/v1/explain")["reason"]
        calls.post(2, 10, env_id=0)
        assert calls.batch() is None
        calls.post(2, 11, env_id=0)
        assert calls.batch() == [(10, 2), (11, 2), (0, 4)]

    def test_minimums_over_one_are_scaled_down(self, calls: Atropos):
        calls.start(batch_size=8)
        for name in ("A", "B"):
            calls.register_env(desired_name=name, min_batch_allocation=0.75, group_size=2)
        for tag in range(8):
            calls.post(2, tag, env_id=0 if tag < 6 else 1)
        assert calls.tags() == [0, 1, 6, 7]

    def test_a_minimum_of_less_than_one_sequence_is_not_waited_for(self, calls: Atropos):
        calls.start(batch_size=8)
        calls.register_env(min_batch_allocation=0.1)
        calls.post(8, 1)
        assert calls.tags() == [1]

    def test_the_minimum_is_met_in_full(self, calls: Atropos):
        """Original: one pack of an environment satisfies any minimum (S10)."""
        calls.start(batch_size=8)
        calls.register_env(desired_name="A", min_batch_allocation=0.75, group_size=2)
        calls.post(8, 1)
        for tag in (10, 11):
            calls.post(2, tag, env_id=0)
        assert calls.batch() is None
        calls.post(2, 12, env_id=0)
        calls.post(2, 13)
        assert calls.tags() == [10, 11, 12, 13]

    def test_a_disconnected_environment_is_not_waited_for(self, calls: Atropos):
        calls.start(batch_size=8)
        calls.register_env(min_batch_allocation=0.5)
        calls.post(8, 1)
        assert calls.batch() is None
        calls.send("/disconnect-env", {"env_id": 0})
        assert calls.tags() == [1]

    def test_an_environment_that_fell_silent_is_not_waited_for(self, tmp_path: Path):
        """Original: a dead environment with a minimum stops the trainer for ever (S6)."""
        now_s = 1000.0
        config = HubConfig(database=tmp_path / "hub.sqlite")
        with SqliteStore.open(config.database, clock=lambda: now_s) as store:
            app = app_of(HubState.build(store, config, lambda: now_s), access_of(config, os.environ))
            with TestClient(app, "http://127.0.0.1:8000", client=("127.0.0.1", 50_000)) as client:
                calls = Atropos(client)
                calls.start(batch_size=8)
                calls.register_env(min_batch_allocation=0.5)
                calls.post(8, 1)
                now_s += 9
                assert calls.batch() is None
                now_s += 2
                assert calls.tags() == [1]

    def test_data_without_an_environment_fills_up_beside_a_minimum(self, calls: Atropos):
        """Original: groups with env_id null are never packed when anybody has a minimum (S6)."""
        calls.start(batch_size=4)
        calls.register_env(min_batch_allocation=0.5)
        calls.post(2, 1)
        calls.post(2, 2, env_id=0)
        assert calls.tags() == [2, 1]


class Test16StatusEnv:
    def figures(self, calls: Atropos, env_id: int) -> dict[str, Any]:
        return calls.env_status(env_id).json()

    def test_the_verified_example(self, calls: Atropos):
        calls.start(batch_size=8)
        calls.register_env(desired_name="A", min_batch_allocation=0.5, group_size=2)
        calls.register_env(desired_name="B", group_size=4)
        calls.post(2, env_id=0)
        for _ in range(3):
            calls.post(4, env_id=1)
        assert self.figures(calls, 0) == {
            "current_step": 0, "queue_size": 7, "unallocated_fraction": 0.5, "self_queue_size": 1,
            "max_group_size": 4, "env_weight": 0.5,
        }  # fmt: skip
        of_b = self.figures(calls, 1)
        assert (of_b["queue_size"], of_b["self_queue_size"], of_b["max_group_size"]) == (3, 3, 4)

    def test_env_weight_is_the_share_of_length_times_weight(self, calls: Atropos):
        calls.start()
        for weight, length in ((1, 512), (3, 512), (1, 2048), (-1, 512)):
            calls.register_env(weight=weight, max_token_length=length)
        shares = [self.figures(calls, env_id)["env_weight"] for env_id in range(4)]
        assert shares == [0.125, 0.375, 0.5, 0.01]

    def test_env_weight_counts_the_connected_ones(self, calls: Atropos):
        calls.start()
        for _ in range(2):
            calls.register_env()
        calls.send("/disconnect-env", {"env_id": 1})
        assert self.figures(calls, 0)["env_weight"] == 1.0

    @pytest.mark.parametrize(("minimums", "left"), [((0.25, 0.5), 0.25), ((0.75, 0.75), 0.0), ((5.0, None), 0.0)])
    def test_unallocated_fraction(self, calls: Atropos, minimums: tuple[float, float], left: float):
        calls.start()
        for minimum in minimums:
            calls.register_env(min_batch_allocation=minimum)
        assert self.figures(calls, 0)["unallocated_fraction"] == left

    def test_others_are_rounded_up_to_the_largest_group(self, calls: Atropos):
        calls.start()
        calls.register_env(group_size=2)
        calls.post(4)
        calls.post(1)
        assert self.figures(calls, 0)["queue_size"] == (0 + 8) // 2  # 5 sequences of others, in fours

    def test_others_count_also_when_all_groups_have_one_sequence(self, calls: Atropos):
        """Original: they do not (#488)."""
        calls.start()
        calls.register_env(group_size=1)
        for _ in range(3):
            calls.post(1)
        assert self.figures(calls, 0)["queue_size"] == 3

    def test_a_large_group_of_ones_own_counts_while_it_waits_and_not_after(self, calls: Atropos):
        """Original: the size ratchets up for good."""
        calls.start(batch_size=4)
        calls.register_env(group_size=2)
        calls.post(4, env_id=0)
        assert self.figures(calls, 0)["self_queue_size"] == 1  # 4 // max(2, 4)
        calls.batch()
        calls.post(2, env_id=0)
        assert self.figures(calls, 0)["self_queue_size"] == 1  # 2 // 2

    def test_current_step_is_that_of_status(self, calls: Atropos):
        calls.start(batch_size=2, starting_step=5)
        calls.register_env()
        calls.post(env_id=0)
        calls.batch()
        assert self.figures(calls, 0)["current_step"] == calls.get("/status")["current_step"] == 6


class Test17Steps:
    def test_the_step_starts_at_starting_step_and_counts_delivered_batches(self, calls: Atropos):
        """Original: counts batches when they are formed, all at the first call (S10)."""
        calls.register(batch_size=2, starting_step=7)
        for _ in range(3):
            calls.post()
        assert calls.get("/status")["current_step"] == 7
        calls.batch()
        assert calls.get("/status")["current_step"] == 8

    def test_num_steps_is_echoed_and_stops_nothing(self, calls: Atropos):
        calls.start(batch_size=2, num_steps=1)
        assert calls.register_env()["num_steps"] == 1
        for tag in range(3):
            calls.post(tag=tag)
        assert [calls.tags() for _ in range(3)] == [[0], [1], [2]]


class Test18Overrides:
    @pytest.mark.parametrize(
        "fields",
        [
            {"group_overrides": {"group_size": 2, "temperature": 0.5, "sft": True, "other": [1]}},
            {"overrides": [{"set_advantage_to_zero": True}, {"temperature": 0.7, "sft": False}]},
            {"overrides": []},
            {"overrides": [{}, {}], "group_overrides": {}},
        ],
    )
    def test_overrides_are_stored_and_returned(self, calls: Atropos, fields: dict[str, Any]):
        calls.register(batch_size=2)
        calls.post(**fields)
        (back,) = calls.get("/batch")["batch"]
        assert {key: back[key] for key in fields} == fields


class Test19Faults:
    @pytest.mark.parametrize(
        "body", [b"", b"{", b"nonsense", b"\xff\xfe\x00", b"{}trailing", b"[[", b'"text"', b"null"]
    )
    @pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list", "/register", "/register-env"])
    def test_malformed_and_empty_bodies_are_422(self, calls: Atropos, path: str, body: bytes):
        assert calls.send(path, body).status_code == 422

    @pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", '"nan"', '"inf"'])
    def test_numbers_that_are_not_finite_are_refused_and_harm_nobody(self, calls: Atropos, number: str):
        """Original: 200, then /batch is 500, the step advanced, the whole batch gone, /latest_example 500 (S2)."""
        calls.register(batch_size=4)
        calls.post(tag=1)
        body = json.dumps(group() | {"scores": [1.0, "?"]}).replace('"?"', number)
        assert calls.refusal("/scored_data", body.encode()) == (422, "finite_number", ["scores", 1])
        calls.post(tag=2)
        assert calls.get("/latest_example")["tokens"][0][0] == 2
        assert calls.tags() == [1, 2]
        assert calls.get("/status")["current_step"] == 1

    def test_a_null_score_is_422(self, calls: Atropos):
        assert calls.refusal("/scored_data", group() | {"scores": [None, 1.0]}) == (422, "float_type", ["scores", 0])

    def test_kill_9_loses_nothing_and_wedges_nothing(self, tmp_path: Path):
        """Original: everything is lost, and an early post wedges the server (S1)."""
        with HubProcess(tmp_path) as hub:
            with httpx.Client(base_url=hub.url) as client:
                calls = Atropos(client)
                calls.start(batch_size=4)
                calls.register_env()
                calls.post(tag=1, env_id=0)
            hub.process.kill()
            hub.process.wait()
            hub.start()
            with httpx.Client(base_url=hub.url) as client:
                calls = Atropos(client)
                assert calls.post(tag=2, env_id=0) == {"status": "received"}
                assert calls.env_status(0).json()["self_queue_size"] == 2
                assert calls.tags() == [1, 2]
