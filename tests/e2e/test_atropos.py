"""The real atroposlib 0.4.0: its environments serve against our hub and engine, its trainer's client reads from us."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.e2e.atropos.parts import (
    HERE,
    OFFLINE,
    PYTHON,
    TEMPLATE,
    Env,
    Trainer,
    engine,
    need_atroposlib,
    wait_until,
)
from tests.e2e.processes import end_of, environment, last_lines
from tests.hub_process import HubProcess
from tests.tiny_model import write_tiny_model
from treadle.net.access_tokens import role_token
from treadle.wire.groups import ATROPOS_KEYS

pytestmark = pytest.mark.slow
BATCH_SIZE, GROUP_SIZE, GROUPS_PER_BATCH = 8, 4, 2
TRAINER = {
    "wandb_group": "", "wandb_project": "", "batch_size": BATCH_SIZE, "max_token_len": 128, "checkpoint_dir": "",
    "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    need_atroposlib()
    folder = write_tiny_model(tmp_path_factory.mktemp("atropos") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def engine_url(model):
    with engine(model, model.parent / "engine.log") as url:
        yield url


@dataclass
class Run:
    """What two environments, a trainer and a hub that was killed once left behind."""

    envs: list[Env]
    batches: list[dict[str, Any]]
    batches_before_the_kill: int
    restarted_in_s: float
    status: dict[str, Any]
    current_step: int
    token: str
    hub_log: str
    answer_without_token: int

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [group for batch in self.batches for group in batch["batch"]]

    @property
    def repeated_batches(self) -> int:
        """Atropos' trainers acknowledge nothing; the hub does it for them once an answer has left. Killed just between
        the two, it gives the batch out again. None is lost."""
        return len(self.batches) - self.current_step

    def delivered(self, env: Env) -> list[dict[str, Any]]:
        """Groups of this environment that the trainer got, in order."""
        made = {json.dumps(group["tokens"]) for group in env.groups()}
        return [group for group in self.groups if json.dumps(group["tokens"]) in made]


@pytest.fixture(scope="module")
def run(model, engine_url, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    token_file = folder / "token"
    hub = HubProcess(folder, "--token-file", str(token_file))
    hub.start()
    token = token_file.read_text().strip()  # the hub made it
    url = f"{hub.url}/t/{token}"  # unmodified clients know of no token: it is in their URL
    env_url = f"{hub.url}/t/{role_token(token, 'environment')}"
    with (
        hub,
        Env("single_turn", folder, env_url, engine_url, model) as one,
        Env("two_turns", folder, env_url, engine_url, model, "--env.turns=2", "--env.max_new_tokens=12") as two,
        Trainer(folder, f"{hub.url}/t/{role_token(token, 'trainer')}", BATCH_SIZE) as trainer,
    ):
        logs = (hub.log_file, one.log, two.log, trainer.log)

        def go_on(num_batches: int, num_groups: tuple[int, int]) -> bool:
            for env in (one, two):
                env.start_again_if_it_gave_up()
            enough_groups = all(len(env.groups()) >= n for env, n in zip((one, two), num_groups, strict=True))
            return enough_groups and len(trainer.batches()) >= num_batches

        wait_until(lambda: go_on(4, (2, 2)), "the batches before the kill", *logs)
        hub.end()
        restarted_in_s = hub.start()
        before = len(trainer.batches())
        wanted = (len(one.groups()) + 3, len(two.groups()) + 3)
        wait_until(lambda: go_on(before + 4, wanted), "the batches after the kill", *logs)
        one.stop()
        two.stop()
        trainer.finish()
        status = httpx.get(f"{url}/v1/status").json()
        current_step = httpx.get(f"{url}/status").json()["current_step"]
        refused = httpx.get(f"{hub.url}/info").status_code
    return Run([one, two], trainer.batches(), before, restarted_in_s, status, current_step, token, hub.log, refused)


def test_a_token_in_the_url_lets_unmodified_clients_in_and_is_not_logged(run):
    assert run.answer_without_token == 401
    assert run.token not in run.hub_log


def test_batches_have_batch_size_sequences_in_groups_of_14_keys(run):
    for batch in run.batches:
        assert sum(len(group["tokens"]) for group in batch["batch"]) == BATCH_SIZE
    for group in run.groups:
        assert tuple(group) == ATROPOS_KEYS
        assert len(group["scores"]) == len(group["tokens"]) == GROUP_SIZE


def test_tokens_masks_and_logprobs_are_aligned(run):
    for group in run.groups:
        for sequence in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            for token, mask, logprob in zip(*sequence, strict=True):
                assert (mask, logprob) == (-100, 1.0) or (mask == token and logprob < 0)


def test_a_second_turn_extends_the_tokens_of_the_first(run):
    """Sampled, asked again, sampled: the masks of both answers stay, with the question between them."""
    for env, num_changes in zip(run.envs, (1, 3), strict=True):
        for group in run.delivered(env):
            for masks in group["masks"]:
                assert sum((a == -100) != (b == -100) for a, b in pairwise(masks)) == num_changes


def test_the_trainer_makes_whole_tensors_of_each_batch(run):
    for batch in run.batches:
        tensors = batch["tensors"]
        assert tensors["same_shape"]
        assert tensors["shape"][0] == BATCH_SIZE
        masks = [mask for group in batch["batch"] for mask in group["masks"]]
        assert tensors["num_trained"] == sum(m != -100 for mask in masks for m in mask)
        assert tensors["highest_trained_logprob"] < 0 < tensors["lowest_other_logprob"]
        assert sum(tensors["advantages"]) == pytest.approx(0, abs=1e-6)


def test_groups_are_delivered_unchanged_in_the_order_sent(run):
    """An environment with one worker sends one group after the other, so that its record is the order of arrival."""
    for env in run.envs:
        delivered = run.delivered(env)
        sent = env.groups()
        place_of = {json.dumps(group["tokens"]): place for place, group in enumerate(sent)}
        places = [place_of[json.dumps(group["tokens"])] for group in delivered]
        first_time = list(dict.fromkeys(places))
        assert first_time == sorted(first_time)
        for place, group in zip(places, delivered, strict=True):
            assert all(group[key] == sent[place][key] for key in ("masks", "scores", "inference_logprobs"))
        # Only of what was under way when the hub was killed nobody can say: the client sends a group again when it
        # got no answer, and gives it up after its third try.
        assert len(places) - len(set(places)) <= 1 + run.repeated_batches * GROUPS_PER_BATCH
        assert places[-1] + 1 - len(set(places)) <= 1


def test_each_group_names_the_environment_that_sent_it(run):
    names = {env["env_id"]: env["name"] for env in run.status["envs"]}
    for env in run.envs:
        ids = {group["env_id"] for group in run.delivered(env)}
        assert 1 <= len(ids) <= 1 + env.restarts
        assert all(names[env_id].startswith(env.name) for env_id in ids)
    assert len(run.groups) == sum(len(run.delivered(env)) for env in run.envs)


def test_the_counts_of_the_hub_add_up(run):
    status = run.status
    states = {name: n for name, n in status.items() if name.endswith("_groups") and name != "accepted_groups"}
    assert status["accepted_groups"] == sum(states.values())
    assert status["accepted_groups"] == sum(env["groups_accepted"] for env in status["envs"])
    assert run.repeated_batches in (0, 1)
    assert status["trained_groups"] == len(run.groups) - run.repeated_batches * GROUPS_PER_BATCH
    assert status["accepted_groups"] == status["trained_groups"] + status["queued_groups"]
    assert status["queued_sequences"] == status["queued_groups"] * GROUP_SIZE < BATCH_SIZE
    assert status["step"] == run.current_step


def test_environments_and_trainer_go_on_after_the_hub_was_killed(run):
    """The trainer's client tries for 16 s. An environment's makes its three tries within 0 to 3 s, drawn at random.

    So no restart is short enough for every draw. The fixture starts an environment again that gave up, as its user
    would; whether that was needed is printed.
    """
    after = [group for batch in run.batches[run.batches_before_the_kill :] for group in batch["batch"]]
    for env in run.envs:
        delivered = run.delivered(env)
        assert any(group in delivered for group in after)
        print(f"{env.name}: {len(env.groups())} sent, {len(delivered)} delivered, started again {env.restarts} times")
    print(f"hub killed after {run.batches_before_the_kill} batches, back after {run.restarted_in_s:.2f} s")
    last = run.batches[-1]
    print(f"{len(run.batches)} batches read, {run.repeated_batches} of them twice")
    print(f"{last['num_calls']} calls of get_batch, the longest {last['longest_call_s']:.1f} s")


def test_the_client_packs_and_retries_on_503_but_not_on_422(model, tmp_path):
    with HubProcess(tmp_path, "--queue-limit-groups", "1") as hub:
        httpx.post(f"{hub.url}/register", json=TRAINER).raise_for_status()
        httpx.get(f"{hub.url}/batch").raise_for_status()
        sender = subprocess.run(
            [str(PYTHON), str(HERE / "send_groups.py"), hub.url, str(model)],
            capture_output=True, text=True, timeout=60, check=False, env=environment(**OFFLINE),
        )  # fmt: skip
        assert sender.returncode == 0, last_lines(sender.stderr)
        report = json.loads(sender.stdout.splitlines()[-1])
        print(json.dumps(report, indent=1))
        packed = report["packed"]
        assert (packed["encoding"], packed["status"], packed["answer"]) == ("gzip", 200, {"status": "received"})
        assert packed["bytes"] < packed["plain_bytes"]
        for name in ("bad", "list_with_a_bad_one"):
            assert "ERROR Client error: 422, not retrying" in report[name]["log"]
            assert not any("Failed to send" in line for line in report[name]["log"])
        refused = report["too_many"]["log"]
        assert refused.count("DEBUG Server error: 503, retrying...") == 3
        assert any(line.startswith("ERROR Failed to send single ScoredDataGroup after retries") for line in refused)
        assert httpx.get(f"{hub.url}/v1/status").json()["accepted_groups"] == 1


@pytest.mark.full  # the other tests here show that the client and the hub understand each other
def test_an_environment_ends_once_the_trainer_is_past_its_total_steps(model, engine_url, tmp_path):
    with HubProcess(tmp_path) as hub:
        with (
            Env("few_steps", tmp_path, hub.url, engine_url, model, "--env.total_steps=2") as env,
            Trainer(tmp_path, hub.url, BATCH_SIZE) as trainer,
        ):
            wait_until(lambda: env.process.poll() is not None, "its end", hub.log_file, env.log, trainer.log)
            assert env.process.poll() == 0, end_of(env.log)
            trainer.finish()
        assert len(trainer.batches()) >= 2
        assert all(sum(len(g["tokens"]) for g in batch["batch"]) == BATCH_SIZE for batch in trainer.batches())
