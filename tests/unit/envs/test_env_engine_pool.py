"""Several engines: requests are spread over them, and one whose weights are too old is not asked."""

import asyncio
import logging

import pytest
from env_doubles import EngineDouble, FlakyNetwork, HubDouble, save_tokenizer

from treadle.config.env import EnvConfig, ServerConfig
from treadle.envs.base import load_environment
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import EngineClient
from treadle.envs.engine_pool import EnginePool, open_engine
from treadle.envs.hub_client import HubClient
from treadle.envs.main import open_context
from treadle.envs.serving.runner import run
from treadle.errors import ConfigError, EngineError
from treadle.net.client import RetryPolicy

QUICK = RetryPolicy(give_up_after_s=0.3, first_pause_s=0.01, longest_pause_s=0.05)
SERVERS = ServerConfig(base_url="http://a:9001/v1 http://b:9001/v1", api_key="one two")


class Wire(FlakyNetwork):
    """An answer takes a moment, as on a network."""

    async def request(self, *words, **settings):
        await asyncio.sleep(0.01)
        return await super().request(*words, **settings)


class Engines:
    """Two engines, each of which writes its own name, and a pool of clients for them."""

    def __init__(self, tmp_path, models=("model", "model")):
        self.doubles = [
            EngineDouble(save_tokenizer(tmp_path / place / model), self._writer(place))
            for place, model in zip("ab", models, strict=True)
        ]
        self.networks = [Wire(double.app) for double in self.doubles]
        self.versions = [0, 0]
        for number, double in enumerate(self.doubles):
            double.policy_version = lambda number=number: self.versions[number]

    @staticmethod
    def _writer(name):
        return lambda prompt, request: [f"{prompt}{name}"] * request.n

    @property
    def asked(self):
        return [len(double.requests) for double in self.doubles]

    def pool(self, oldest_allowed=lambda newest: newest, retry_policy=QUICK):
        clients = [
            EngineClient(one, retry_policy=QUICK, transport=network)
            for one, network in zip(SERVERS.each(), self.networks, strict=True)
        ]
        return EnginePool(clients, oldest_allowed, retry_policy=retry_policy)

    async def ask(self, pool, count):
        tasks = [pool.generate([65], n=2, max_tokens=8, temperature=1.0) for _ in range(count)]
        return [one.completions[0].text for one in await asyncio.gather(*tasks)]


def test_requests_go_to_the_engine_with_the_least_to_do(tmp_path):
    engines = Engines(tmp_path)

    async def scenario():
        async with engines.pool() as pool:
            await engines.ask(pool, 6)
            health = await pool.health()
        return health.policy_version, health.model

    assert asyncio.run(scenario()) == (0, str(tmp_path / "a" / "model"))
    assert engines.asked == [3, 3]
    assert [set(double.authorizations) for double in engines.doubles] == [{"Bearer one"}, {"Bearer two"}]


def test_the_load_of_the_pool_is_the_sum_and_the_fullest_kv_cache(tmp_path):
    engines = Engines(tmp_path)
    for double, usage in zip(engines.doubles, (0.2, 0.9), strict=True):
        double.health_values = {"max_num_seqs": 64, "num_running": 5, "kv_cache_usage": usage}

    async def scenario():
        async with engines.pool() as pool:
            return await pool.health()

    health = asyncio.run(scenario())
    assert (health.max_num_seqs, health.num_running, health.kv_cache_usage) == (128, 10, 0.9)


def test_a_wave_is_shared_out_and_comes_back_in_its_order(tmp_path):
    engines = Engines(tmp_path)

    async def scenario():
        async with engines.pool() as pool:
            prompts = [[65 + place] for place in range(5)]
            return await pool.generate_wave("w", prompts, n=1, max_tokens=8, temperature=0.0, seeds=range(5))

    answers = asyncio.run(scenario())
    letters = [engines.doubles[0].tokenizer.decode([65 + place]) for place in range(5)]
    assert [one.completions[0].text for one in answers] == [
        letter + name for letter, name in zip(letters, "aaabb", strict=True)
    ]
    assert [[one.seed for one in double.requests] for double in engines.doubles] == [[0, 1, 2], [3, 4]]
    assert [double.requests[0].wave.size for double in engines.doubles] == [3, 2]


def test_an_engine_that_is_too_old_is_not_asked_until_it_has_caught_up(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("treadle.envs.engine_pool.REFRESH_S", 0.0)
    caplog.set_level(logging.INFO, logger="treadle.env")
    engines = Engines(tmp_path)
    engines.versions = [5, 3]

    async def scenario():
        async with engines.pool(lambda newest: newest - 1) as pool:
            await engines.ask(pool, 4)
            behind = engines.asked
            engines.versions[1] = 4
            await pool.health()
            await engines.ask(pool, 4)
            return behind

    assert asyncio.run(scenario()) == [4, 0]
    assert engines.asked == [6, 2]
    logged = [(record.getMessage(), record.treadle_fields["engine"]) for record in caplog.records]
    assert logged == [
        ("engine_left_out", f"http://b:9001 has version 3 of {tmp_path}/b/model"),
        ("engine_asked_again", f"http://b:9001 has version 4 of {tmp_path}/b/model"),
    ]


def test_when_all_engines_are_too_old_that_is_said(tmp_path):
    engines = Engines(tmp_path)

    async def scenario():
        async with engines.pool(lambda _: 7) as pool:
            await engines.ask(pool, 1)

    with pytest.raises(EngineError) as caught:
        asyncio.run(scenario())
    assert caught.value.message == (
        "none of the 2 engines has weights that are new enough (version 7 or newer): "
        f"http://a:9001 has version 0 of {tmp_path}/a/model, http://b:9001 has version 0 of {tmp_path}/b/model"
    )
    assert "treadle train --engine-url" in caught.value.fix
    assert engines.asked == [0, 0]


def test_when_no_engine_answers_that_is_said(tmp_path):
    engines = Engines(tmp_path)
    for network in engines.networks:
        network.losses = {"/health": 10**6}

    async def scenario():
        async with engines.pool() as pool:
            await pool.health()

    with pytest.raises(EngineError, match="none of the 2 engines answers: http://a:9001 is away, http://b:") as caught:
        asyncio.run(scenario())
    assert "treadle engine" in caught.value.fix


def test_what_an_engine_that_goes_away_was_asked_is_asked_of_the_other(tmp_path):
    engines = Engines(tmp_path)

    async def scenario():
        async with engines.pool(retry_policy=RetryPolicy(give_up_after_s=30.0)) as pool:
            await pool.health()
            engines.networks[0].losses = {"/generate": 10**6, "/health": 10**6}
            texts = await engines.ask(pool, 3)
            wave = await pool.generate_wave("w", [[65], [66]], n=1, max_tokens=8, temperature=0.0)
            return {text[-1] for text in texts} | {one.completions[0].text[-1] for one in wave}

    assert asyncio.run(scenario()) == {"b"}


def test_only_the_part_of_a_lost_engine_is_asked_again(tmp_path):
    engines = Engines(tmp_path)

    async def scenario():
        async with engines.pool(retry_policy=RetryPolicy(give_up_after_s=30.0)) as pool:
            await pool.health()
            engines.networks[1].losses = {"/generate": 10**6, "/health": 10**6}
            return await pool.generate_wave("w", [[65], [66], [67], [68]], n=1, max_tokens=8, temperature=0.0)

    letters = [engines.doubles[0].tokenizer.decode([token]) for token in range(65, 69)]
    assert [one.completions[0].text for one in asyncio.run(scenario())] == [letter + "a" for letter in letters]
    prompts = [one.prompt["prompt_token_ids"] for one in engines.doubles[0].requests]
    assert prompts == [[65], [66], [67], [68]], "each once"


def test_answers_of_an_engine_that_lost_its_weights_are_asked_again(tmp_path):
    engines = Engines(tmp_path)
    engines.versions = [5, 5]

    async def scenario():
        async with engines.pool(lambda newest: newest - 1, retry_policy=RetryPolicy(give_up_after_s=30.0)) as pool:
            await pool.health()
            engines.versions[1] = 0
            wave = await pool.generate_wave("w", [[65], [66]], n=1, max_tokens=8, temperature=0.0)
            refused = engines.asked[1]
            texts = await engines.ask(pool, 4)
            return refused, {one.completions[0].text[-1] for one in wave} | {text[-1] for text in texts}

    assert asyncio.run(scenario()) == (1, {"a"})
    assert engines.asked[1] == 1, "nor is it asked again"


def test_engines_of_different_models_are_refused_and_later_left_out(tmp_path):
    engines = Engines(tmp_path, models=("qwen", "llama"))

    async def scenario():
        async with engines.pool() as pool:
            with pytest.raises(ConfigError, match=r"different models: .*qwen at http://a.*, .*llama at http://b"):
                await pool.health()
            await pool.health()  # as a run does now and then
            await engines.ask(pool, 4)

    asyncio.run(scenario())
    assert engines.asked == [4, 0]


@pytest.mark.parametrize("models", [("model", "weights_v3"), ("weights_v3", "model")])
def test_an_engine_that_the_trainer_has_restarted_is_asked(tmp_path, models):
    engines = Engines(tmp_path, models)
    engines.versions = [3 * (model == "weights_v3") for model in models]

    async def scenario():
        async with engines.pool(lambda _: 3) as pool:
            await pool.health()
            await engines.ask(pool, 2)

    asyncio.run(scenario())
    assert engines.asked == [2 * (model == "weights_v3") for model in models]


def test_a_run_goes_on_with_the_engine_that_gets_the_weights(tmp_path, caplog):
    engines, hub_double = Engines(tmp_path), HubDouble(num_steps=4)
    config = EnvConfig(group_size=4, num_eval=0, max_age=0)

    def first_engine_follows():
        engines.versions[0] = hub_double.current_step
        return engines.versions[0]

    engines.doubles[0].policy_version = first_engine_follows

    async def scenario():
        async with (
            HubClient("http://hub", retry_policy=QUICK, transport=FlakyNetwork(hub_double.app)) as hub,
            engines.pool(lambda _: hub.oldest_version(config.max_age)) as pool,
            open_context(load_environment(config), pool, ChatTokenizer.load(engines.doubles[0].folder)) as context,
        ):
            await asyncio.wait_for(run(context, hub), 60)

    asyncio.run(scenario())
    assert [min(group.policy_version for group in groups) for _, groups in hub_double.deliveries] == [0, 1, 2, 3]
    # Two prompts a wave: one each for the first wave, and both at the engine that is kept new from then on.
    assert engines.asked == [7, 1]
    logged = [record.getMessage() for record in caplog.records if record.getMessage().startswith("engine_")]
    assert logged == ["engine_left_out"], "once"


def test_one_engine_needs_no_pool():
    assert isinstance(open_engine(ServerConfig()), EngineClient)
    assert isinstance(open_engine(SERVERS), EnginePool)
