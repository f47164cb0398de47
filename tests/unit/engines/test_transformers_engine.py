"""TransformersEngine: restarts, adapters, failures, and the lifespan of the engine process."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig
from treadle.engines import lora, transformers_engine
from treadle.engines.api import create_app, engine_access
from treadle.engines.interface import Request
from treadle.engines.lora import read_adapter
from treadle.engines.sampling import SamplingParams
from treadle.engines.server import POLL_S, EngineLifespan, EngineWatcher, split_adapter
from treadle.engines.transformers_engine import TransformersEngine
from treadle.errors import EngineError, RequestError
from treadle.sync.fingerprint import fingerprints as fingerprints_of
from treadle.watch.waits import Waits
from treadle.watch.watchdog import Watchdog

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def config(folder):
    return EngineConfig(model=str(folder), dtype="float32", threads=1, device="cpu", max_num_seqs=8, enable_lora=True)


@pytest.fixture
def server(config, folder):
    made = TransformersEngine(config, folder)
    yield made
    asyncio.run(made.close())


def ask(seed=0, max_tokens=10, **more):
    return Request(PROMPT, 1, max_tokens, SamplingParams(), seed, ignore_eos=True, **more)


def write_adapter(folder, path, seed, targets=("q_proj", "down_proj")):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=list(targets), task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(path)
    return path


def check(generation, folder, adapter=None):
    (s,) = generation.completions
    assert s.logprobs == pytest.approx(plain_logprobs(s, folder, adapter), abs=1e-4)


def plain_logprobs(s, folder, adapter=None):
    """Logprobs of a completion's tokens by the model's own code."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([PROMPT + s.token_ids])).logits[0], -1)
    return [table[len(PROMPT) - 1 + t, token].item() for t, token in enumerate(s.token_ids)]


def test_a_restart_loads_saved_weights_and_an_adapter(server, folder, tmp_path):
    trained = write_tiny_model(tmp_path / "trained", seed=9)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (trained / file).unlink()  # a trainer need not save them again
    adapter = write_adapter(trained, tmp_path / "step_4", 1)
    scheduler = server._scheduler
    step = scheduler.runner.step
    scheduler.runner.step = lambda: (step(), time.sleep(0.01))  # so that the restart comes before the end

    async def scenario():
        running = asyncio.ensure_future(server.generate(ask(max_tokens=200)))
        while not scheduler.status().progress_count:
            await asyncio.sleep(0.001)
        await server.restart(trained, adapter, 4)
        assert (await server.status()).policy_version == 4
        check(await server.generate(ask()), trained, adapter)
        (went_on,) = (await running).completions
        assert went_on.policy_versions == [0, 4]
        # What ran goes on with the adapter too, not with the bare model: its last tokens are surely of after.
        assert went_on.logprobs[-20:] == pytest.approx(plain_logprobs(went_on, trained, adapter)[-20:], abs=1e-4)
        await server.unload_adapter("step_4")
        check(await server.generate(ask()), trained)

    asyncio.run(scenario())
    assert server.facts.folder == trained


def write_liar(folder, path):
    """An adapter whose tensors contradict the rank in its settings."""
    write_adapter(folder, path, 5)
    settings = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(settings | {"r": 2}))
    return path


def test_a_wrong_rank_is_refused_and_the_serving_adapter_stays(server, folder, tmp_path):
    good, liar = write_adapter(folder, tmp_path / "good", 1), write_liar(folder, tmp_path / "liar")

    async def scenario():
        await server.load_adapter("good", good, 1)
        with pytest.raises(RequestError, match="liar does not fit its own settings"):
            await server.load_adapter("liar", liar, 2)
        assert (await server.status()).policy_version == 1
        assert server.serving_adapter.name == "good"
        assert [adapter.name for adapter in server.adapters()] == ["good"]
        check(await server.generate(ask()), folder, good)

    asyncio.run(scenario())


@pytest.mark.parametrize("read", [partial(read_adapter, header_only=True), read_adapter])
def test_half_an_adapter_is_refused(folder, tmp_path, read):
    weights = write_adapter(folder, tmp_path, 1) / "adapter_model.safetensors"
    whole = weights.read_bytes()
    assert read(tmp_path).settings.rank == 4
    for part in (whole[:-1], whole[:40], b"", whole + b"more"):
        weights.write_bytes(part)
        with pytest.raises(RequestError, match="cannot be read as a LoRA adapter"):
            read(tmp_path)


def test_a_restart_uses_the_new_folders_tokenizer_if_it_has_one(server, folder, tmp_path):
    other = write_tiny_model(tmp_path / "other", seed=9)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    one, two = list(words)[30:32]
    words[one], words[two] = words[two], words[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    before = server.tokenizer.encode(one), server.tokenizer.encode(two)
    asyncio.run(server.restart(other, None, 4))
    assert (server.tokenizer.encode(two), server.tokenizer.encode(one)) == before


def test_a_restart_with_an_adapter_that_does_not_fit_changes_nothing(server, folder, tmp_path):
    trained = write_tiny_model(tmp_path / "trained", seed=9)
    liar = write_liar(folder, tmp_path / "liar")

    async def scenario():
        with pytest.raises(RequestError, match="liar does not fit its own settings"):
            await server.restart(trained, liar, 3)
        assert (await server.status()).policy_version == 0
        assert server.facts.folder == folder
        check(await server.generate(ask()), folder)

    asyncio.run(scenario())


def test_a_single_token_request_does_not_wait_for_a_full_batch(server):
    async def scenario():
        many = [asyncio.ensure_future(server.generate(ask(seed, max_tokens=200))) for seed in range(16)]
        while (await server.status()).num_running < 8:
            await asyncio.sleep(0.01)
        await server.generate(ask(max_tokens=1))
        assert not any(task.done() for task in many)
        await asyncio.gather(*many)

    asyncio.run(scenario())


def test_an_engine_that_stays_failed_ends_its_process(server):
    ended, waits = [], Waits()
    life = EngineLifespan(
        server,
        EngineWatcher(waits),
        Watchdog("engine", "engine", waits),
        grace_s=0.0,
        on_death=lambda: ended.append("process"),
    )

    async def scenario():
        async with life():
            await asyncio.sleep(2.5 * POLL_S)
            assert ended == []
            server._scheduler.runner.admit = None  # as a bug in it would
            with pytest.raises(EngineError, match="generation failed"):
                await server.generate(ask())
            await asyncio.sleep(2.5 * POLL_S)
        assert ended == ["process"]

    asyncio.run(scenario())


def test_a_model_that_is_an_adapter_serves_from_the_start(folder, tmp_path):
    adapter = write_adapter(folder, tmp_path / "final_adapter", seed=1)
    asked = EngineConfig(model=str(adapter), dtype="float32", threads=1, device="cpu", max_lora_rank=2)
    config, found = split_adapter(asked)
    assert (config.model, found, config.max_lora_rank) == (str(folder), adapter, 4)
    assert config.served_model_name == str(adapter)
    server, waits = TransformersEngine(config, folder), Waits()
    life = EngineLifespan(server, EngineWatcher(waits), Watchdog("engine", "engine", waits), found)

    async def scenario():
        async with life():
            check(await server.generate(ask()), folder, adapter)
            assert (await server.status()).policy_version == 1, "no run begins on it"

    asyncio.run(scenario())
    assert split_adapter(config) == (config, None)


def test_an_adapter_of_another_model_ends_the_engine_with_the_reason(folder, tmp_path):
    other = write_tiny_model(tmp_path / "other", hidden_size=32)
    adapter = write_adapter(other, tmp_path / "final_adapter", seed=1)
    config, found = split_adapter(EngineConfig(model=str(adapter), dtype="float32", threads=1, device="cpu"))
    server, waits = TransformersEngine(config, folder), Waits()
    life = EngineLifespan(server, EngineWatcher(waits), Watchdog("engine", "engine", waits), found)

    async def scenario():
        async with life():
            pytest.fail("it serves")

    with pytest.raises(RequestError):
        asyncio.run(scenario())
    assert "was made for" in str(life.adapter_error)


def test_a_restart_from_a_broken_model_changes_nothing(server, folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").write_bytes(b"torn")

    async def scenario():
        before = await server.fingerprints(0)
        with pytest.raises(RequestError, match=r"model\.safetensors is damaged"):
            await server.restart(broken, None, 3)
        assert await server.fingerprints(0) == before
        check(await server.generate(ask()), folder)
        assert (await server.status()).policy_version == 0

    asyncio.run(scenario())


def test_a_failed_reload_holds_the_engine_until_a_complete_one(server, folder, monkeypatch):
    def write_some(found, weights):
        name, value = next(iter(found.items()))
        weights[name].data.copy_(value + 1)
        raise RuntimeError("CUDA error: an illegal memory access")

    async def scenario():
        with monkeypatch.context() as patched:
            patched.setattr(transformers_engine, "write_weights", write_some)
            with pytest.raises(EngineError, match="taken over in part: CUDA error"):
                await server.reload(folder, 1)
        waiting = asyncio.ensure_future(server.generate(ask()))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert (await server.status()).is_held
        with pytest.raises(EngineError, match="came in part"):
            await server.release(None)
        await server.reload(folder, 1)
        assert (await waiting).completions[0].policy_versions == [1]
        check(await waiting, folder)

    asyncio.run(scenario())


def test_requests_for_different_adapters_run_in_order(server, folder, tmp_path):
    adapters = {name: write_adapter(folder, tmp_path / name, i) for i, name in enumerate(("a", "b"))}

    async def scenario():
        for name, path in adapters.items():
            assert (await server.load_adapter(name, path, None)).rank == 4
        names = ["a", None, "b", "a", "b", None]
        asked = [asyncio.ensure_future(server.generate(ask(i, adapter=name))) for i, name in enumerate(names)]
        for name, generation in zip(names, await asyncio.gather(*asked), strict=True):
            check(generation, folder, adapters.get(name))

    asyncio.run(scenario())


def test_many_swaps_of_the_policys_adapter_under_load(server, folder, tmp_path):
    paths = [write_adapter(folder, tmp_path / f"v{i}", i) for i in range(3)]

    async def scenario():
        answers, is_over = [], asyncio.Event()

        async def client(seed):
            while not is_over.is_set():
                answers.append(await server.generate(ask(seed, max_tokens=6)))

        clients = [asyncio.ensure_future(client(seed)) for seed in range(4)]
        for version in range(1, 21):
            await server.load_adapter(f"v{version}", paths[version % 3], version)
            if version > 2:
                await server.unload_adapter(f"v{version - 2}")
            await asyncio.sleep(0.01)
        is_over.set()
        await asyncio.gather(*clients)
        assert [a.name for a in server.adapters()] == ["v19", "v20"]
        return answers

    answers = asyncio.run(scenario())
    versions = {generation.completions[0].policy_versions[0] for generation in answers}
    assert len(versions) > 5
    for generation in answers[:: max(1, len(answers) // 25)]:
        (version,) = generation.completions[0].policy_versions
        check(generation, folder, paths[version % 3] if version else None)


def test_adapters_leave_the_models_own_weights_and_their_names_alone(server, folder, tmp_path):
    path = write_adapter(folder, tmp_path / "a", 1)

    async def scenario():
        before = await server.fingerprints(0)
        await server.load_adapter("a", path, 1)
        await server.generate(ask())
        assert await server.fingerprints(0) == before
        other = write_tiny_model(tmp_path / "other", seed=4)
        await server.reload(other, 2)  # under an adapter, by the names that the model had before
        own = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
        assert await server.fingerprints(0) == fingerprints_of(own.named_parameters(), 0)
        check(await server.generate(ask()), other, path)

    asyncio.run(scenario())


def test_without_the_flag_no_adapter_is_taken(config, folder, tmp_path):
    server = TransformersEngine(config.model_copy(update={"enable_lora": False}), folder)

    async def scenario():
        with pytest.raises(EngineError, match="takes no adapters") as error:
            await server.load_adapter("a", tmp_path, 1)
        assert error.value.fix == "start it with --enable-lora"
        await server.close()

    asyncio.run(scenario())


def test_a_dead_engine_is_not_healthy(server, config):
    def broken(*_, **__):
        raise RuntimeError("out of memory")

    server._runner.admit = broken
    api = TestClient(create_app(server, config, engine_access(config, {})), base_url="http://127.0.0.1")
    answer = api.post("/generate", json={"prompt": "hi", "max_tokens": 4})
    assert (answer.status_code, "RuntimeError" in answer.json()["error"]) == (503, True)
    health = api.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "failed: RuntimeError")
    assert api.get("/health_generate").status_code == 503
    assert "engine_up 0" in api.get("/metrics").text
    assert api.post("/bridge/pause").status_code == 503
    assert api.post("/v1/completions", json={"prompt": "hi"}).json()["error"]["type"] == "server_error"


def test_a_loaded_adapter_has_no_effect_before_it_is_used(server, folder, tmp_path):
    """Layers that get their first adapter now are new LoRA layers; they must not be active yet."""
    attention = write_adapter(folder, tmp_path / "attention", 1)
    wide = write_adapter(folder, tmp_path / "wide", 2, targets=["o_proj", "gate_proj", "q_proj"])

    async def scenario():
        await server.load_adapter("attention", attention, None)
        await server.load_adapter("wide", wide, None)
        check(await server.generate(ask()), folder)
        check(await server.generate(ask(adapter="attention")), folder, attention)
        check(await server.generate(ask(adapter="wide")), folder, wide)
        await server.unload_adapter("wide")
        await server.unload_adapter("attention")
        await server.load_adapter("again", wide, None)
        check(await server.generate(ask()), folder)
        check(await server.generate(ask(adapter="again")), folder, wide)

    asyncio.run(scenario())


def test_requests_may_use_the_served_model_name(config, folder, server):
    named = config.model_copy(update={"served_model_name": "my-policy"})
    app = create_app(server, named, engine_access(named, {}))
    with TestClient(app, base_url="http://127.0.0.1") as api:
        assert [model["id"] for model in api.get("/v1/models").json()["data"]] == ["my-policy"]
        asked = {"prompt": PROMPT, "max_tokens": 2}
        assert api.post("/v1/completions", json={"model": "my-policy", **asked}).json()["model"] == "my-policy"
        assert api.post("/v1/completions", json={"model": "another", **asked}).status_code == 404


def test_each_prompt_of_a_group_is_computed_once(server, monkeypatch):
    forwarded = []
    model = server._runner.model.base_model
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda **kw: (forwarded.append(tuple(kw["input_ids"].shape)), forward(**kw))[1]
    )
    group = Request(PROMPT * 4, 4, 2, SamplingParams(), 0, ignore_eos=True)
    completions = asyncio.run(server.generate(group)).completions
    assert len(completions) == 4
    rows = len({completion.token_ids[0] for completion in completions})
    assert forwarded == [(1, 12), (rows, 1)]  # its prompt, then one token for each history that differs


def test_a_load_that_changes_the_models_own_weights_stops_the_engine(server, folder, tmp_path, monkeypatch):
    """As with some PEFT settings: base weights of a module, or layers, have changed afterwards."""
    adapter = write_adapter(folder, tmp_path / "a", 1)

    def inject(adapters, name, files):
        adapters._model.model.layers[1].mlp.up_proj.weight.data.mul_(1.01)
        raise RequestError("refused, and too late")

    async def scenario():
        with monkeypatch.context() as patched:
            patched.setattr(lora.LoraAdapters, "_inject", inject)
            with pytest.raises(EngineError, match=r"changed the model's own weights, model\.layers\.1\.mlp\.up_proj"):
                await server.load_adapter("a", adapter, 1)
        assert (await server.status()).is_held
        with pytest.raises(EngineError, match="nothing may be sampled from a mixture"):
            await server.release(None)
        await server.restart(folder, None, 2)
        check(await server.generate(ask()), folder)

    asyncio.run(scenario())


def test_no_pattern_of_an_adapter_is_run_over_the_models_names(server, folder, tmp_path):
    """A regular expression with nested repetitions takes years; tensor names decide which layers are adapted."""
    adapter = write_adapter(folder, tmp_path / "a", 1)
    file = adapter / "adapter_config.json"
    plain, slow = file.read_text(), "(([a-z0-9._]+)+)+!"
    file.write_text(json.dumps(json.loads(plain) | {"target_modules": slow, "exclude_modules": slow}))

    async def scenario():
        await server.load_adapter("a", adapter, 1)
        file.write_text(plain)  # for PEFT, which runs them
        check(await server.generate(ask()), folder, adapter)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_missing", ["lora_A", "lora_B", "lora_"])
def test_an_adapter_with_half_of_its_matrices_is_refused(server, folder, tmp_path, is_missing):
    adapter = write_adapter(folder, tmp_path / "a", 1)
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if is_missing not in name}, file)
    with pytest.raises(RequestError, match=r"without|no tensors"):
        asyncio.run(server.load_adapter("a", adapter, 1))
