from __future__ import annotations

import json

import pytest

from treadle.wire.groups import ATROPOS_KEYS


def test_the_words_before_anybody_registered(client):
    assert client.get("/").json() == {"message": "AtroposLib API"}
    assert client.get("/info").json() == {"batch_size": -1, "max_token_len": -1}
    assert client.get("/wandb_info").json() == {"group": None, "project": None}
    assert client.get("/status").json() == {"current_step": 0, "queue_size": 0}
    assert client.get("/batch").json() == {
        "status": "error",
        "message": "Trainer not registered. Call /register first.",
        "batch": [],
    }
    example = client.get("/latest_example").json()
    assert all(value == [] for value in example.values())
    assert list(example) == [
        "tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs",
        "messages", "images",
    ]  # fmt: skip


def test_registering_tells_a_128_bit_number_and_fills_in_the_info(client, calls):
    calls.register(batch_size=16)
    assert client.get("/info").json() == {"batch_size": 16, "max_token_len": 128}
    assert client.get("/wandb_info").json() == {"group": "g", "project": "p"}
    body = {
        "wandb_group": "", "wandb_project": "", "batch_size": "8", "max_token_len": 1.0, "checkpoint_dir": "",
        "save_checkpoint_interval": 1, "starting_step": 3, "num_steps": 4,
    }  # fmt: skip
    uuid = json.loads(client.post("/register", json=body).text)["uuid"]
    assert isinstance(uuid, int)
    assert client.get("/info").json() == {"batch_size": 8, "max_token_len": 1}
    assert client.get("/status").json()["current_step"] == 3


@pytest.mark.parametrize("step", [10**18, -(10**18), 2**63 - 1, 10**30])
def test_a_step_that_could_not_be_counted_on_is_refused(client, calls, step):
    body = {
        "wandb_group": "", "wandb_project": "", "batch_size": 8, "max_token_len": 1, "checkpoint_dir": "",
        "save_checkpoint_interval": 1, "starting_step": step, "num_steps": 4,
    }  # fmt: skip
    assert client.post("/register", json=body).status_code == 422
    assert client.post("/v1/lease", json={"step": step, "holder": "a"}).status_code == 422
    calls.register(starting_step=10**18 - 1)
    calls.post(1, 2)
    assert calls.tags(client.get("/batch").json()["batch"]) == [1, 2]


def test_truth_values_count_as_numbers_in_messages(client, calls):
    calls.register(batch_size=True, max_token_len=False)
    assert client.get("/info").json() == {"batch_size": 1, "max_token_len": 0}
    answer = client.post("/register", json={"wandb_group": True})
    assert answer.json()["detail"][0]["type"] == "string_type"


def test_figures_stay_finite_whatever_was_registered(client, calls):
    calls.register(batch_size=10**17)
    client.get("/batch")
    calls.register_env(weight=1e308, max_token_length=10**17, group_size=10**17, min_batch_allocation=1e308)
    calls.register_env(weight=1e-320, max_token_length=1, group_size=-3, min_batch_allocation=-5.0)
    calls.post(1, env_id=None)
    for connected in (True, False):
        for env_id in (0, 1):
            figures = client.get(f"/status-env?env_id={env_id}").json()
            assert all(isinstance(figure, int | float) for figure in figures.values()), figures
        if connected:
            client.post("/disconnect-env", json={"env_id": 0})
    assert client.get("/v1/explain").status_code == 200


def test_data_before_the_registration_does_not_wedge_the_hub(client, calls):
    calls.post(0, 1)
    calls.register()
    assert calls.tags(client.get("/batch").json()["batch"]) == [0, 1]


def test_envs_wait_for_the_first_batch_call(client, calls):
    assert calls.register_env() == {"status": "wait for trainer to start"}
    calls.register(
        publish_interval=3, trackers={"sinks": ["wandb", "tensorboard"], "project": "sums", "group": "night"}
    )
    assert calls.register_env() == {"status": "wait for trainer to start"}
    assert client.get("/batch").json() == {"batch": None}
    registered = calls.register_env()
    assert registered.pop("run_id")
    assert registered == {
        "status": "success", "env_id": 0, "wandb_name": "math_0", "checkpoint_dir": "c", "starting_step": 0,
        "checkpoint_interval": 5, "num_steps": 10, "groups_accepted": 0, "publish_interval": 3,
        "trackers": {"sinks": ["wandb", "tensorboard"], "project": "sums", "group": "night"},
    }  # fmt: skip
    assert calls.register_env()["wandb_name"] == "math_1"
    assert calls.register_env(desired_name=None, weight=None)["wandb_name"] == "env_0"


def test_a_restarted_hub_forgets_earlier_waits_of_the_trainer(client, calls):
    calls.register()
    client.get("/batch")
    env_id = calls.register_env()["env_id"]
    assert client.get(f"/v1/envs/{env_id}").json()["trainer_waits"]
    calls.register(starting_step=0)
    assert not client.get(f"/v1/envs/{env_id}").json()["trainer_waits"]
    client.get("/batch")
    assert client.get(f"/v1/envs/{env_id}").json()["trainer_waits"]


def test_an_env_that_comes_back_gets_its_name_and_its_count(client, calls, clock):
    calls.register()
    client.get("/batch")
    assert calls.register_env()["env_id"] == 0
    calls.post(1, 2, 3, env_id=0)
    clock.now_s += 5
    assert calls.register_env()["wandb_name"] == "math_1"
    resumed = calls.register_env(headers={"Treadle-Resume": "1"})
    assert (resumed["env_id"], resumed["wandb_name"], resumed["groups_accepted"]) == (0, "math_0", 3)
    clock.now_s += 11
    client.get("/status-env?env_id=0")
    assert calls.register_env()["wandb_name"] == "math_1"


def test_batches_are_fifo_each_once_and_have_exactly_atropos_keys(client, calls):
    calls.register(batch_size=2)
    calls.post(*range(6), policy_version=0, item=9, metrics={"accuracy": 0.5}, unknown_key=1)
    assert client.get("/status").json() == {"current_step": 0, "queue_size": 6}
    batches = [client.get("/batch").json()["batch"] for _ in range(6)]
    assert [calls.tags(batch) for batch in batches] == [[0], [1], [2], [3], [4], [5]]
    assert tuple(batches[0][0]) == ATROPOS_KEYS
    assert batches[0][0] == dict.fromkeys(ATROPOS_KEYS) | calls.group(tag=0)
    assert client.get("/batch").json() == {"batch": None}
    assert client.get("/status").json() == {"current_step": 6, "queue_size": 0}


def test_a_list_is_stored_whole_and_the_latest_example_is_its_last(client, calls):
    answer = client.post("/scored_data_list", json=[calls.group(tag=1), calls.group(tag=2)])
    assert answer.json() == {"status": "received", "groups_processed": 2}
    assert client.post("/scored_data_list", json=[]).json() == {"status": "received", "groups_processed": 0}
    assert calls.tags([client.get("/latest_example").json()]) == [2]


def test_one_bad_group_refuses_the_whole_list(client, calls):
    answer = client.post("/scored_data_list", json=[calls.group(), calls.group(scores=[1.0])])
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", 1, "scores"]
    assert client.get("/status").json()["queue_size"] == 0


@pytest.mark.parametrize("route", ["/scored_data", "/scored_data_list"])
def test_a_repeated_key_is_a_duplicate_and_another_body_a_conflict(client, calls, route):
    body = calls.group() if route == "/scored_data" else [calls.group()]
    other = calls.group(tag=8) if route == "/scored_data" else [calls.group(tag=8)]
    headers = {"Idempotency-Key": "env-0:17"}
    assert client.post(route, json=body, headers=headers).json()["status"] == "received"
    repeated = client.post(route, json=body, headers=headers)
    assert (repeated.status_code, repeated.json()["status"]) == (200, "duplicate")
    assert client.post(route, json=other, headers=headers).status_code == 409
    assert client.get("/status").json()["queue_size"] == 1
    assert client.post(route, json=body, headers={"Idempotency-Key": "x" * 300}).status_code == 422


def test_a_full_queue_answers_503_but_accepts_a_duplicate(client, calls):
    first = client.post("/scored_data", json=calls.group(), headers={"Idempotency-Key": "first"})
    assert first.status_code == 200
    calls.post(*range(49))
    refused = client.post("/scored_data", json=calls.group())
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    repeated = client.post("/scored_data", json=calls.group(), headers={"Idempotency-Key": "first"})
    assert repeated.json() == {"status": "duplicate"}


def test_a_full_disk_answers_507_and_the_hub_goes_on(client, calls):
    large = calls.group(generation_params={"text": "x" * 25_000_000})
    answer = client.post("/scored_data", json=large)
    assert answer.status_code == 507
    assert answer.json() == {"detail": "the disk of the queue is full"}
    calls.post(1)
    assert client.get("/healthz").json() == {"status": "ok"}


def test_disconnecting(client, calls):
    calls.register()
    client.get("/batch")
    calls.register_env()
    assert client.post("/disconnect-env", json={"env_id": 0}).json() == {"status": "success"}
    for unknown in (5, -1):
        answer = client.post("/disconnect-env", json={"env_id": unknown})
        assert (answer.status_code, answer.json()["status"]) == (200, "failure")


def test_status_env_takes_a_body_or_a_query_and_computes_atropos_figures(client, calls):
    calls.register(batch_size=8)
    client.get("/batch")
    calls.register_env(desired_name="A", min_batch_allocation=0.5)
    calls.register_env(desired_name="B", group_size=4)
    calls.post(1, env_id=0)
    for tag in range(3):
        client.post("/scored_data", json=calls.group(size=4, tag=tag, env_id=1))
    of_a = client.request("GET", "/status-env", json={"env_id": 0}).json()
    assert of_a == {
        "current_step": 0, "queue_size": 7, "unallocated_fraction": 0.5, "self_queue_size": 1,
        "max_group_size": 4, "env_weight": 0.5,
    }  # fmt: skip
    of_b = client.get("/status-env?env_id=1").json()
    assert (of_b["queue_size"], of_b["self_queue_size"]) == (3, 3)


def test_status_env_weighs_by_length_and_weight(client, calls):
    calls.register()
    client.get("/batch")
    for weight, length in ((1, 512), (3, 512), (1, 2048)):
        calls.register_env(weight=weight, max_token_length=length)
    weights = [client.get(f"/status-env?env_id={i}").json()["env_weight"] for i in range(3)]
    assert weights == [0.125, 0.375, 0.5]
    for i in range(3):
        client.post("/disconnect-env", json={"env_id": i})
    assert client.get("/status-env?env_id=0").json()["env_weight"] == 0.01


def test_status_env_of_an_unknown_env_is_404_and_of_nonsense_422(client):
    assert client.get("/status-env?env_id=3").status_code == 404
    assert client.get("/status-env?env_id=-1").status_code == 404
    assert client.get("/status-env?env_id=two").status_code == 422
    assert client.get("/status-env").status_code == 422
    assert client.request("GET", "/status-env", json={"env_id": 2**80}).status_code == 422


def test_reset_forgets_the_run(client, calls):
    assert client.get("/reset_data").text == "Reset successful"
    calls.register()
    calls.post(1, 2)
    client.get("/reset_data")
    assert client.get("/status").json() == {"current_step": 0, "queue_size": 0}
    assert client.get("/batch").json()["status"] == "error"


def test_unknown_paths_and_methods_are_answered_in_json(client):
    missing = client.get("/nothing")
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    for method, path in (("POST", "/batch"), ("HEAD", "/batch"), ("GET", "/register")):
        assert client.request(method, path).status_code == 405
    assert client.post("/batch").json() == {"detail": "Method Not Allowed"}
