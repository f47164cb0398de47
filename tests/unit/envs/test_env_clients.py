import asyncio

import pytest
from env_doubles import EngineDouble, FlakyNetwork, HubDouble, save_tokenizer
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from treadle.config.env import ServerConfig
from treadle.envs.engine_client import Completion, EngineClient
from treadle.envs.hub_client import HubClient
from treadle.errors import ConfigError, EngineError, HubError
from treadle.net.client import RetryPolicy
from treadle.wire.groups import ScoredGroup
from treadle.wire.hub import RegisterEnv

QUICK = RetryPolicy(give_up_after_s=2.0, first_pause_s=0.01, longest_pause_s=0.05)
REGISTRATION = RegisterEnv(max_token_length=8, desired_name="arithmetic", weight=1.0, group_size=4)


def group(num_tokens=3):
    return ScoredGroup(tokens=[[5] * num_tokens], masks=[[5] * num_tokens], scores=[1.0])


def answering(*responses):
    """An app that gives these answers to any path, one after the other."""
    left = list(responses)

    async def answer(_):
        return left.pop(0)

    return Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])


@pytest.mark.parametrize("base_url", ["http://engine:9001/v1", "http://engine:9001/v1/", "http://engine:9001"])
def test_generate_returns_tokens_with_their_logprobs_and_version(tmp_path, base_url):
    engine = EngineDouble(save_tokenizer(tmp_path), lambda prompt, request: ["140", "much too long"])
    engine.policy_version = lambda: 3

    async def scenario():
        config = ServerConfig(base_url=base_url, api_key="secret")
        async with EngineClient(config, transport=FlakyNetwork(engine.app)) as client:
            return await client.generate([1, 2], n=2, max_tokens=4, temperature=0.7, seed=9)

    generation = asyncio.run(scenario())
    tokens = engine.tokenizer.encode("140").ids
    assert generation.completions[0] == Completion(tokens, [-0.5] * 3, "140", "stop", 3)
    assert generation.completions[1].finish_reason == "length"
    assert generation.seconds == 0.25
    assert (engine.requests[0].n, engine.requests[0].seed, engine.requests[0].logprobs) == (2, 9, 0)
    assert engine.authorizations == ["Bearer secret"]


def test_the_engine_is_asked_again_after_a_lost_connection_and_a_5xx(tmp_path):
    engine = EngineDouble(save_tokenizer(tmp_path), lambda prompt, request: ["1"])
    network = FlakyNetwork(engine.app, {"/generate": 2, "/health": 1})

    async def scenario():
        async with EngineClient(ServerConfig(), retry_policy=QUICK, transport=network) as client:
            assert (await client.health()).model == str(tmp_path)
            return await client.generate([1], max_tokens=4, temperature=0.0)

    assert asyncio.run(scenario()).completions[0].text == "1"


def engine_error(*responses):
    async def scenario():
        transport = FlakyNetwork(answering(*responses))
        async with EngineClient(ServerConfig(), retry_policy=QUICK, transport=transport) as client:
            await client.generate([1], max_tokens=4, temperature=0.0)

    with pytest.raises(EngineError) as caught:
        asyncio.run(scenario())
    return str(caught.value)


def test_a_refusal_of_the_engine_is_raised_at_once_with_its_words():
    assert "unknown field 'best_of'" in engine_error(JSONResponse({"detail": "unknown field 'best_of'"}, 400))


def test_an_answer_that_is_no_generation_is_an_error():
    assert "cannot be read" in engine_error(PlainTextResponse("<html>"))
    answer = {
        "text": ["1"],
        "prompt": "",
        "finish_reasons": ["stop"],
        "token_ids": [[1]],
        "prompt_token_ids": [],
    }
    assert "asked for 1" in engine_error(JSONResponse({**answer, "policy_version": 0}))
    strange = {**answer, "policy_version": 0, "logprobs": [[[{"2": -1.0}]]]}
    assert "do not belong" in engine_error(JSONResponse(strange))


def test_an_engine_that_stays_away_is_given_up_with_a_remedy():
    async def scenario():
        network = FlakyNetwork(answering(), {"/generate": 10**6})
        retry_policy = RetryPolicy(give_up_after_s=0.1, first_pause_s=0.01)
        async with EngineClient(ServerConfig(), retry_policy=retry_policy, transport=network) as client:
            await client.generate([1], max_tokens=4, temperature=0.0)

    with pytest.raises(EngineError, match="see whether the engine runs"):
        asyncio.run(scenario())


def test_one_refused_request_ends_its_whole_wave(tmp_path):
    def write(prompt, request):
        return ["1"] if request.wave.index else []  # the first answer comes one completion short

    engine = EngineDouble(save_tokenizer(tmp_path), write)

    async def scenario():
        async with EngineClient(ServerConfig(), transport=FlakyNetwork(engine.app)) as client:
            await client.generate_wave("w", [[1], [2]], n=1, max_tokens=4, temperature=0.0)

    with pytest.raises(EngineError, match="asked for 1"):
        asyncio.run(scenario())


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="returns no token ids"):
        EngineClient(ServerConfig(server_type="openai"))
    with pytest.raises(ConfigError, match="is not the URL of a hub"):
        HubClient("localhost:8000")


def test_registration_waits_for_the_trainer():
    hub = HubDouble()
    hub.num_register_waits = 2
    hub.groups_accepted = 6

    async def scenario():
        async with HubClient("http://hub", retry_policy=QUICK, transport=FlakyNetwork(hub.app)) as client:
            return await client.register_env(REGISTRATION)

    answer = asyncio.run(scenario())
    assert (answer.env_id, answer.groups_accepted) == (7, 6)
    assert [resume for _, resume in hub.registrations] == ["1"]


@pytest.mark.parametrize(("url", "encoding"), [("http://127.0.0.1", None), ("http://hub", "gzip")])
def test_a_delivery_survives_lost_connections_503_and_500(url, encoding):
    """Over a network it is compressed; on one machine that costs more than it saves."""
    hub = HubDouble()
    hub.failures = [Response(status_code=503, headers={"Retry-After": "0.02"}), Response(status_code=500)]

    async def scenario():
        network = FlakyNetwork(hub.app, {"/v1/groups": 3})
        retry_policy = RetryPolicy(give_up_after_s=0.0, first_pause_s=0.01, longest_pause_s=0.02)
        async with HubClient(url, retry_policy=retry_policy, transport=network) as client:
            await client.post_groups([group(4000)], key="k")

    asyncio.run(scenario())
    assert hub.deliveries == [("k", [group(4000)])]
    assert set(hub.encodings) == {encoding}


def test_what_is_too_large_for_one_post_goes_in_parts_each_with_its_key():
    hub = HubDouble()
    groups = [group(600_000) for _ in range(5)]  # 5 MB each and more, where 12 MiB may go at once

    async def scenario():
        async with HubClient("http://127.0.0.1", retry_policy=QUICK, transport=FlakyNetwork(hub.app)) as client:
            await client.post_groups(groups, key="k")

    asyncio.run(scenario())
    assert [key for key, _ in hub.deliveries] == ["k", "k.1", "k.2"]
    assert [len(part) for _, part in hub.deliveries] == [2, 2, 1]


def test_a_refused_delivery_is_an_error_and_a_conflict_is_not():
    hub = HubDouble()
    hub.failures = [JSONResponse({"detail": "other content"}, 409), JSONResponse({"detail": "bad mask"}, 422)]

    async def scenario():
        async with HubClient("http://hub", retry_policy=QUICK, transport=FlakyNetwork(hub.app)) as client:
            await client.post_groups([group()], key="k")
            await client.post_groups([group()], key="k2")

    with pytest.raises(HubError, match="422: bad mask"):
        asyncio.run(scenario())
