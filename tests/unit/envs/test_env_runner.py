import asyncio
import json
import re
from collections.abc import Callable

import msgspec
import pytest
from env_doubles import EngineDouble, FlakyNetwork, HubDouble, save_tokenizer
from starlette.responses import JSONResponse, Response

from treadle.config.env import EnvConfig, ServerConfig
from treadle.envs.base import load_environment, stable_seed
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import EngineClient
from treadle.envs.hub_client import HubClient
from treadle.envs.main import open_context
from treadle.envs.serving.runner import run
from treadle.errors import ConfigError, HubError
from treadle.net.client import RetryPolicy

QUICK = RetryPolicy(give_up_after_s=5.0, first_pause_s=0.01, longest_pause_s=0.05)


def add(prompt, request):
    """A policy that knows addition in evaluation, and in every other completion of training."""
    a, b = map(int, re.findall(r"\d+", prompt)[:2])
    return [str(a + b) if i % 2 == 0 else "I do not know" for i in range(request.n)]


class Harness:
    """A hub, an engine and one environment process between them."""

    def __init__(self, tmp_path, **settings):
        self.evals = tmp_path / "evals"
        self.config = EnvConfig(
            **{"group_size": 4, "num_eval": 70, "seed": 5, "data_dir_to_save_evals": self.evals, **settings}
        )
        self.hub = HubDouble()
        self.engine = EngineDouble(save_tokenizer(tmp_path / "model"), add)
        self.engine.policy_version = lambda: self.hub.current_step
        self.hub_losses: dict[str, int] = {}
        self.engine_losses: dict[str, int] = {}

    async def serve(self):
        engine_network = FlakyNetwork(self.engine.app, self.engine_losses)
        hub_network = FlakyNetwork(self.hub.app, self.hub_losses)
        async with (
            EngineClient(ServerConfig(), retry_policy=QUICK, transport=engine_network) as engine,
            HubClient("http://hub", retry_policy=QUICK, transport=hub_network) as hub,
        ):
            tokenizer = ChatTokenizer.load(self.engine.folder)
            async with open_context(load_environment(self.config), engine, tokenizer) as context:
                await asyncio.wait_for(run(context, hub), 60)

    def serve_to_the_end(self):
        asyncio.run(self.serve())

    @property
    def waves(self):
        """Names of the waves in the order of their first request."""
        return list(dict.fromkeys(request.wave.id for request in self.engine.requests))

    def result(self, step):
        return json.loads((self.evals / f"eval_step_{step:06d}.json").read_text())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


def test_waves_are_delivered_in_order_between_two_evaluations(tmp_path):
    harness = Harness(tmp_path)
    harness.serve_to_the_end()
    assert harness.waves == [
        "arithmetic-eval-0-0",
        *[f"arithmetic-train-{wave}" for wave in ("1-item-0", "2-item-2", "3-item-4")],
        "arithmetic-eval-3-0",
    ]
    assert [key for key, _ in harness.hub.deliveries] == [
        f"arithmetic-5-wave-{wave}" for wave in ("1-item-0", "2-item-2", "3-item-4")
    ]
    assert [[group.item for group in groups] for _, groups in harness.hub.deliveries] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    assert harness.hub.disconnected == [7]
    body, resume = harness.hub.registrations[0]
    assert (body["desired_name"], body["group_size"], resume) == ("arithmetic", 4, "1")


def test_sampling_starts_when_all_environments_are_registered(tmp_path):
    harness = Harness(tmp_path, num_environments=2, num_eval=0, pace="stream", state_dir=tmp_path / "state")

    async def join_late():
        serving = asyncio.create_task(harness.serve())
        while not harness.hub.registrations:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert not harness.engine.requests
        harness.hub.num_present = 2
        await serving

    asyncio.run(join_late())
    assert harness.engine.requests


def timeless(deliveries):
    """Without what a clock measured."""
    return [
        (key, [msgspec.structs.replace(group, metrics=group.metrics | {"score_s": 0.0}) for group in groups])
        for key, groups in deliveries
    ]


def test_a_training_request_carries_its_place_and_a_seed_of_its_own(tmp_path):
    harness = Harness(tmp_path)
    harness.serve_to_the_end()
    second = [request for request in harness.engine.requests if request.wave.id == "arithmetic-train-2-item-2"]
    assert sorted((request.wave.index, request.wave.size, request.seed) for request in second) == [
        (0, 2, stable_seed(5, "train", 2, 0)),
        (1, 2, stable_seed(5, "train", 2, 1)),
    ]
    assert {(request.n, request.temperature, request.max_tokens, request.logprobs) for request in second} == {
        (4, 0.7, 16, 0)
    }


def test_a_group_holds_what_the_trainer_needs(tmp_path):
    harness = Harness(tmp_path)
    harness.serve_to_the_end()
    environment = load_environment(harness.config)
    tokenizer = ChatTokenizer.load(harness.engine.folder)
    item = environment.train_item(3)
    prompt = tokenizer.encode_chat(item.messages)
    group = harness.hub.deliveries[1][1][1]
    right, wrong = (
        harness.engine.tokenizer.encode(item.answer).ids,
        harness.engine.tokenizer.encode("I do not know").ids,
    )
    assert group.tokens == [prompt + right, prompt + wrong] * 2
    assert group.masks == [[-100] * len(prompt) + right, [-100] * len(prompt) + wrong] * 2
    assert group.inference_logprobs == [[1.0] * len(prompt) + [-0.5] * len(ids) for ids in (right, wrong, right, wrong)]
    assert group.scores == [1.0, 0.0, 1.0, 0.0]
    assert (group.policy_version, group.env_id, group.item) == (1, 7, 3)
    assert group.generation_params == {"temperature": 0.7}
    num_tokens = 2 * len(right) + 2 * len(wrong)
    assert group.metrics == {
        "accuracy": 0.5,
        "generation_s": 0.25,
        "score_s": group.metrics["score_s"],
        "generated_tokens": num_tokens,
        "truncated": 0.0,
    }
    assert 0 < group.metrics["score_s"] < 1
    assert group.messages[0] == [*item.messages, {"role": "assistant", "content": item.answer}]


def test_an_evaluation_is_greedy_and_its_file_complete(tmp_path):
    harness = Harness(tmp_path)
    harness.engine.write = lambda prompt, request: add(prompt, request) if request.wave.index % 2 else ["?"] * request.n
    harness.serve_to_the_end()
    asked = [request for request in harness.engine.requests if "eval-3" in request.wave.id]
    assert {(request.n, request.temperature) for request in asked} == {(1, 0.0)}
    assert sorted((r.wave.id, r.wave.index, r.wave.size) for r in asked) == [
        ("arithmetic-eval-3-0", i, 70) for i in range(70)
    ]
    result = harness.result(3)
    assert (result["env"], result["task"]) == ("arithmetic", "addition")
    assert (result["step"], result["policy_version"], result["num_prompts"], result["num_right"]) == (
        3,
        3,
        70,
        35,
    )
    assert result["accuracy"] == 0.5
    assert result["interval_95"] == pytest.approx([0.386, 0.614], abs=5e-4)
    assert 1 < result["mean_completion_tokens"] < 3
    assert len(result["samples"]) == 70
    assert result["samples"][0] | {"completion": "?", "is_right": False} == result["samples"][0]
    assert result["samples"][1]["completion"] == result["samples"][1]["gold"]
    assert sorted(path.name for path in harness.evals.iterdir()) == [
        "eval_step_000000.json",
        "eval_step_000003.json",
    ]


@pytest.mark.parametrize("max_age", [0, 1, 2])
def test_sampling_runs_at_most_max_age_ahead_of_training(tmp_path, max_age):
    harness = Harness(tmp_path, max_age=max_age, num_eval=0)
    harness.hub.num_steps, harness.hub.steps_at_once = 4, False

    async def scenario():
        serving = asyncio.create_task(harness.serve())
        for step in range(4):
            harness.hub.current_step = step
            allowed = min(step + 1 + max_age, 4)
            await until(lambda allowed=allowed: len(harness.hub.deliveries) >= allowed)
            await asyncio.sleep(0.15)  # three polls: time enough to run ahead
            assert len(harness.hub.deliveries) == allowed
        harness.hub.current_step = 4
        await serving

    asyncio.run(scenario())


def test_the_last_evaluation_waits_for_the_last_step(tmp_path):
    harness = Harness(tmp_path)
    harness.hub.steps_at_once = False

    async def scenario():
        serving = asyncio.create_task(harness.serve())
        for step in (1, 2):
            await until(lambda step=step: len(harness.hub.deliveries) > step)
            harness.hub.current_step = step
        await asyncio.sleep(0.15)
        assert not (harness.evals / "eval_step_000003.json").exists()
        harness.hub.current_step = 3
        await serving

    asyncio.run(scenario())
    assert harness.result(3)["policy_version"] == 3


def test_evaluations_between_are_of_exactly_their_step(tmp_path):
    harness = Harness(tmp_path, steps_per_eval=2, max_age=1, num_eval=4)
    harness.hub.num_steps = 5
    harness.hub.max_age = 1
    harness.serve_to_the_end()
    steps = [0, 2, 5]  # not 4: within max_age of the last one nothing holds the version still
    assert [(r["step"], r["policy_version"]) for r in map(harness.result, steps)] == [(s, s) for s in steps]


def test_a_restarted_environment_goes_on_where_the_hub_stands(tmp_path):
    whole, resumed = Harness(tmp_path / "whole"), Harness(tmp_path / "resumed")
    whole.serve_to_the_end()
    resumed.hub.groups_accepted, resumed.hub.current_step = 4, 2
    resumed.serve_to_the_end()
    assert timeless(resumed.hub.deliveries) == timeless(whole.hub.deliveries[2:])
    assert not (resumed.evals / "eval_step_000000.json").exists()
    assert resumed.result(3)["accuracy"] == 1.0


def test_an_evaluation_that_exists_is_not_made_again(tmp_path):
    harness = Harness(tmp_path)
    harness.evals.mkdir()
    (harness.evals / "eval_step_000000.json").write_text("{}")
    harness.serve_to_the_end()
    assert harness.waves[0] == "arithmetic-train-1-item-0"
    assert harness.result(0) == {}


def test_a_run_survives_lost_connections_and_a_full_queue(tmp_path):
    calm, stormy = Harness(tmp_path / "calm"), Harness(tmp_path / "stormy")
    stormy.hub_losses = {"/register-env": 1, "/info": 1, "/status": 2, "/v1/groups": 2}
    stormy.engine_losses = {"/generate": 3}
    stormy.hub.failures = [Response(status_code=503, headers={"Retry-After": "0.05"})]
    calm.serve_to_the_end()
    stormy.serve_to_the_end()
    assert timeless(stormy.hub.deliveries) == timeless(calm.hub.deliveries)


def test_a_wave_the_hub_has_with_other_content_counts_as_delivered(tmp_path):
    harness = Harness(tmp_path, max_age=3)
    harness.hub.failures = [JSONResponse({"detail": "key used with other content"}, 409)]

    async def scenario():
        serving = asyncio.create_task(harness.serve())
        await until(lambda: not harness.hub.failures)
        harness.hub.current_step += 1  # it had that wave
        await serving

    asyncio.run(scenario())
    assert [key for key, _ in harness.hub.deliveries] == ["arithmetic-5-wave-2-item-2", "arithmetic-5-wave-3-item-4"]


def test_a_refused_wave_ends_the_process_and_disconnects(tmp_path):
    harness = Harness(tmp_path)
    harness.hub.failures = [JSONResponse({"detail": "mask has the wrong length"}, 422)]
    with pytest.raises(HubError, match="mask has the wrong length"):
        harness.serve_to_the_end()
    assert harness.hub.disconnected == [7]


def test_a_group_is_no_larger_than_the_trainers_batch(tmp_path):
    harness = Harness(tmp_path, group_size=8, num_eval=2)
    harness.hub.info["batch_size"] = 4
    harness.serve_to_the_end()
    assert harness.hub.registrations[-1][0]["group_size"] == 4
    assert {len(group.tokens) for _, groups in harness.hub.deliveries for group in groups} == {4}


def test_a_batch_of_one_sequence_is_refused_because_it_teaches_nothing(tmp_path):
    harness = Harness(tmp_path)
    harness.hub.info["batch_size"] = 1
    with pytest.raises(ConfigError, match="a group of one teaches nothing") as refused:
        harness.serve_to_the_end()
    assert "--batch-size 4" in refused.value.fix


def test_a_batch_of_no_whole_groups_is_refused(tmp_path):
    harness = Harness(tmp_path, group_size=3)
    with pytest.raises(ConfigError, match="no multiple of group_size 3"):
        harness.serve_to_the_end()


def test_sequences_too_long_for_the_trainer_are_refused_before_sampling(tmp_path):
    harness = Harness(tmp_path, num_eval=0)
    harness.hub.info["max_token_len"] = 40
    with pytest.raises(ConfigError, match="sequences of 40 tokens"):
        harness.serve_to_the_end()
    assert harness.engine.requests == []


def test_scoring_errors_are_counted_in_the_group(tmp_path):
    harness = Harness(tmp_path, num_eval=0)

    class Fragile(type(load_environment(harness.config))):
        def score(self, item, completion_text, completion):
            if completion_text == "I do not know":
                raise RuntimeError("nothing to score")
            return super().score(item, completion_text, completion)

    async def scenario():
        async with (
            EngineClient(ServerConfig(), transport=FlakyNetwork(harness.engine.app)) as engine,
            HubClient("http://hub", transport=FlakyNetwork(harness.hub.app)) as hub,
        ):
            fragile = Fragile(load_environment(harness.config).config)
            async with open_context(fragile, engine, ChatTokenizer.load(harness.engine.folder)) as context:
                await run(context, hub)

    asyncio.run(scenario())
    group = harness.hub.deliveries[0][1][0]
    assert (group.scores, group.metrics["score_errors"]) == ([1.0, 1.0, 1.0, 1.0], 2.0)
    assert [o.get("set_advantage_to_zero", False) for o in group.overrides] == [False, True, False, True]
