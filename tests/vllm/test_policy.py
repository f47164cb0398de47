"""What the engine samples, and what changes it: weights in a shared file, a reload, adapters."""

from __future__ import annotations

import asyncio
import time

import httpx
import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tests.vllm.conftest import Served, vllm_processes
from tests.vllm.reference import load, logits_after, logprobs_of, mean_difference
from treadle.config import EngineConfig
from treadle.engines.port import Request
from treadle.engines.sampling import SamplingParams
from treadle.errors import EngineError, RequestError
from treadle.sync.fingerprint import fingerprint
from treadle.sync.weights_file import bind_parameters, map_weights

PROMPT = [20, 21, 22, 23, 30, 31, 32]
NUM_SWAPS = 20


@pytest.fixture(scope="module")
def served(tiny_model, tmp_path_factory):
    config = EngineConfig(
        engine="vllm",
        dtype="float32",
        max_num_seqs=16,
        weights_file=tmp_path_factory.mktemp("shared") / "weights",
        enable_lora=True,
        max_lora_rank=8,
    )
    served = Served(config, tiny_model)
    yield served
    served.close()


@pytest.fixture(scope="module")
def plain(tiny_model):
    return load(tiny_model)


@pytest.fixture(scope="module")
def adapters(tiny_model, tmp_path_factory):
    """Two adapters that change a lot, and one whose rank is too high."""
    folders = []
    for seed, rank in ((1, 4), (2, 8), (3, 16)):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=4 * rank, target_modules="all-linear", init_lora_weights=False)
        folder = tmp_path_factory.mktemp("adapters") / f"rank-{rank}"
        get_peft_model(load(tiny_model), config).save_pretrained(folder)
        folders.append(folder)
    return folders


def request(**changes):
    given = {"prompt_ids": PROMPT, "n": 1, "max_tokens": 24, "sampling": SamplingParams(), "ignore_eos": True}
    return Request(**given | changes)


def test_logprobs_are_those_of_a_plain_forward(served, plain):
    generation = served(served.engine.generate(request(n=8, seed=5)))
    assert len({tuple(c.token_ids) for c in generation.completions}) == 8
    assert all(c.finish_reason == "length" and len(c.token_ids) == 24 for c in generation.completions)
    assert mean_difference(plain, PROMPT, generation.completions) < 1e-4
    again = served(served.engine.generate(request(n=8, seed=5)))
    assert [c.token_ids for c in again.completions] == [c.token_ids for c in generation.completions]


def test_logprobs_at_another_temperature_are_of_what_was_sampled_from(served, plain):
    generation = served(served.engine.generate(request(n=8, sampling=SamplingParams(temperature=0.5))))
    assert mean_difference(plain, PROMPT, generation.completions, temperature=0.5) < 1e-4
    assert mean_difference(plain, PROMPT, generation.completions) > 0.05


def test_logprobs_under_top_k_are_over_the_kept_tokens(served, plain):
    (completion,) = served(served.engine.generate(request(sampling=SamplingParams(top_k=3)))).completions
    kept = logits_after(plain, PROMPT, completion.token_ids).topk(3)
    for t, token in enumerate(completion.token_ids):
        place = kept.indices[t].tolist().index(token)
        assert completion.logprobs[t] == pytest.approx(torch.log_softmax(kept.values[t], -1)[place].item(), abs=1e-4)


def test_greedy_completions_are_the_likeliest_tokens_n_times(served, plain):
    generation = served(served.engine.generate(request(n=3, sampling=SamplingParams(temperature=0), num_top=2)))
    assert len(generation.completions) == 3
    for completion in generation.completions:
        assert completion.token_ids == logits_after(plain, PROMPT, completion.token_ids).argmax(-1).tolist()
        assert all(max(top, key=top.get) == t for top, t in zip(completion.tops, completion.token_ids, strict=True))
    assert mean_difference(plain, PROMPT, generation.completions) < 1e-4


def test_prompt_logprobs_and_the_likeliest_beside_them(served, plain):
    generation = served(served.engine.generate(request(max_tokens=1, num_prompt_top=1)))
    assert generation.prompt_tops[0] == {}
    expected = logprobs_of(plain, PROMPT[:1], PROMPT[1:])
    for token, tops, logprob in zip(PROMPT[1:], generation.prompt_tops[1:], expected.tolist(), strict=True):
        assert tops[token] == pytest.approx(logprob, abs=1e-4)


def test_a_stream_adds_up_to_the_whole_answer(served):
    asked = request(n=2, seed=9, stop=("q",), max_tokens=40)
    whole = served(served.engine.generate(asked))

    async def collect():
        return [delta async for delta in served.engine.stream(asked)]

    deltas = served(collect())
    for index, completion in enumerate(whole.completions):
        own = [d for d in deltas if d.index == index]
        assert [t for d in own for t in d.token_ids] == completion.token_ids
        assert "".join(d.text for d in own) == completion.text
        assert own[-1].finish_reason == completion.finish_reason


def test_what_vllm_refuses_is_the_requests_fault(served):
    with pytest.raises(RequestError, match="256"):
        served(served.engine.generate(request(prompt_ids=[5] * 400)))
    assert served(served.engine.state()).failure is None


async def _stream_across_an_update(engine, layout, change):
    """Stream a long completion; in its midst hold, change the weights, release. Deltas, and how many were before."""
    deltas, at_hold, release = [], 0, None

    async def update():
        nonlocal at_hold
        await engine.hold("keep", 30)
        await asyncio.sleep(0.2)  # what was sampled is here by now
        at_hold = len(deltas)
        await asyncio.sleep(0.3)
        assert len(deltas) == at_hold, "a token was sampled while held"
        change(map_weights(layout))
        await engine.release(1)

    async for delta in engine.stream(request(max_tokens=200, seed=3)):
        deltas.append(delta)
        if len(deltas) == 5:
            release = asyncio.ensure_future(update())
    await release
    return deltas, at_hold


def test_a_request_in_flight_goes_on_under_the_new_weights(served, plain):
    engine = served.engine
    layout = served(engine.layout())
    saved = {name: weight.clone() for name, weight in map_weights(layout).items()}
    before = served(engine.generate(request(n=2, seed=1)))

    def add_noise(weights):
        torch.manual_seed(0)
        for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
            weights[name].add_(torch.randn_like(weights[name]) * 0.1)

    begun = served.begin(engine.generate(request(max_tokens=230)))
    deltas, at_hold = served(_stream_across_an_update(engine, layout, add_noise))
    versions = [d.policy_version for d in deltas]
    assert versions == [0] * at_hold + [1] * (len(deltas) - at_hold)
    assert 5 <= at_hold < len(deltas)
    assert begun.result(60).completions[0].policy_versions == [0, 1]
    assert served(engine.state()).policy_version == 1

    tokens = [t for d in deltas for t in d.token_ids]
    logprobs = torch.tensor([lp for d in deltas for lp in d.logprobs])
    noisy = load(served.folder)
    noisy.load_state_dict({n: w.clone() for n, w in map_weights(layout).items()}, strict=False)
    cut = sum(len(d.token_ids) for d in deltas[:at_hold])
    assert (logprobs_of(plain, PROMPT, tokens)[:cut] - logprobs[:cut]).abs().mean() < 1e-4
    # As if its tokens had been prefilled by the new weights: nothing of the old ones' keys and values is left.
    assert (logprobs_of(noisy, PROMPT, tokens)[cut:] - logprobs[cut:]).abs().mean() < 1e-4
    assert (logprobs_of(plain, PROMPT, tokens)[cut:] - logprobs[cut:]).abs().mean() > 1e-3

    changed = served(engine.generate(request(n=2, seed=1)))
    assert mean_difference(noisy, PROMPT, changed.completions) < 1e-4
    served(engine.hold("keep", 30))
    for name, weight in map_weights(layout).items():
        weight.copy_(saved[name])
    served(engine.release(2))
    restored = served(engine.generate(request(n=2, seed=1)))
    assert [c.token_ids for c in restored.completions] == [c.token_ids for c in before.completions]
    for after, original in zip(restored.completions, before.completions, strict=True):
        # Not to the bit: which of the two is prefilled beside the other differs from call to call.
        assert after.logprobs == pytest.approx(original.logprobs, abs=1e-4)
    assert [c.policy_versions for c in restored.completions] == [[2], [2]]


def test_weights_change_only_while_held(served):
    with pytest.raises(EngineError, match="only while the engine is held"):
        served(served.engine.release(7))


def test_requests_wait_while_held_and_go_on_afterwards(served):
    served(served.engine.hold("wait", 30))
    waiting = served.begin(served.engine.generate(request(max_tokens=3)))
    deadline = time.monotonic() + 10
    while served(served.engine.state()).num_waiting == 0:
        assert time.monotonic() < deadline
    state = served(served.engine.state())
    assert (state.is_held, state.num_running, state.num_waiting) == (True, 0, 1)
    served(served.engine.release(None))
    assert len(waiting.result(30).completions[0].token_ids) == 3


def test_a_hold_that_waits_too_long_is_given_up_and_nothing_is_lost(served):
    running = served.begin(served.engine.generate(request(max_tokens=230)))
    with pytest.raises(EngineError, match="still running"):
        served(served.engine.hold("wait", 0.05))
    assert len(running.result(60).completions[0].token_ids) == 230
    assert not served(served.engine.state()).is_held


def test_a_hold_that_aborts_gives_back_what_there_is(served):
    running = served.begin(served.engine.generate(request(max_tokens=230)))
    deadline = time.monotonic() + 10
    while served(served.engine.state()).num_running == 0:
        assert time.monotonic() < deadline
    served(served.engine.hold("abort", 30))
    (completion,) = running.result(30).completions
    served(served.engine.release(None))
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) < 230


def test_one_physical_copy_serves_both_processes(served):
    layout = served(served.engine.layout())
    views = map_weights(layout)
    assert sum(v.numel() for v in views.values()) == sum(p.numel() for p in load(served.folder).parameters())
    assert all(torch.isfinite(v).all() for v in views.values())  # read: the pages are in both processes now
    served(served.engine.fingerprints(0))
    (worker,) = [p for p in vllm_processes() if any(m.path == layout.path for m in p.memory_maps())]
    for process in (worker, psutil.Process()):
        maps = [m for m in process.memory_maps() if m.path == layout.path]
        shared = sum(m.shared_clean + m.shared_dirty for m in maps)
        private = sum(m.private_clean + m.private_dirty for m in maps)
        assert shared > 0.9 * layout.num_bytes
        assert private < 0.05 * layout.num_bytes


def test_a_trainers_model_stands_on_the_engines_weights(served, plain):
    layout = served(served.engine.layout())
    with torch.device("meta"):
        trainer = type(plain)(plain.config)
    bind_parameters(trainer, layout)
    expected = dict(plain.named_parameters())
    for name, parameter in trainer.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert trainer.lm_head.weight is trainer.model.embed_tokens.weight


def test_fingerprints_equal_the_trainers(served, plain):
    theirs = served(served.engine.fingerprints(4))
    assert theirs == {name: fingerprint(p, 4) for name, p in plain.named_parameters()}


def test_a_reload_takes_saved_weights_and_what_runs_goes_on(served, other_tiny_model, tiny_model):
    engine = served.engine
    version = served(engine.state()).policy_version
    running = served.begin(engine.generate(request(max_tokens=230)))
    served(engine.reload(other_tiny_model, version + 1))
    other = load(other_tiny_model)
    generation = served(engine.generate(request(n=4)))
    assert mean_difference(other, PROMPT, generation.completions) < 1e-4
    assert generation.completions[0].policy_versions == [version + 1]
    assert len(running.result(60).completions[0].token_ids) == 230
    served(engine.reload(tiny_model, version + 2))
    theirs = served(engine.fingerprints(0))
    assert theirs == {name: fingerprint(p, 0) for name, p in load(tiny_model).named_parameters()}


def test_a_reload_of_some_weights_changes_those(served, other_tiny_model, tiny_model, tmp_path):
    engine = served.engine
    name = "model.layers.2.mlp.gate_proj.weight"
    before = served(engine.fingerprints(0))
    save_file({name: load_file(other_tiny_model / "model.safetensors")[name]}, tmp_path / "some.safetensors")
    version = served(engine.state()).policy_version
    served(engine.reload(tmp_path, version + 1))
    after = served(engine.fingerprints(0))
    assert {n for n in after if after[n] != before[n]} == {name}
    served(engine.reload(tiny_model, version + 2))
    assert served(engine.fingerprints(0)) == before


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"model.norm.weight": torch.zeros(7)}, r"model.norm.weight in .* is \[7\]"),
        ({"model.norm.wait": torch.zeros(7)}, "model.norm.wait, which this model does not have"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name_and_nothing_is_written(served, tmp_path, saved, words):
    before = served(served.engine.fingerprints(0))
    fits = {"model.layers.0.input_layernorm.weight": torch.zeros(256)}
    save_file(fits | saved, tmp_path / "model.safetensors")
    version = served(served.engine.state()).policy_version
    with pytest.raises(EngineError, match=words):
        served(served.engine.reload(tmp_path, version + 1))
    assert served(served.engine.fingerprints(0)) == before
    state = served(served.engine.state())
    assert (state.policy_version, state.is_held) == (version, False)


def test_a_folder_without_weights_is_refused(served, tmp_path):
    with pytest.raises(RequestError, match="safetensors"):
        served(served.engine.reload(tmp_path / "absent", 9))


def test_an_adapter_serves_those_who_name_it_and_then_everybody(served, plain, adapters, tiny_model):
    engine = served.engine
    loaded = served(engine.load_adapter("by-hand", adapters[0], None))
    assert (loaded.rank, loaded.policy_version) == (4, None)
    named = served(engine.generate(request(n=4, adapter="by-hand")))
    with_first = load(tiny_model, adapters[0])
    assert mean_difference(with_first, PROMPT, named.completions) < 1e-4
    assert mean_difference(plain, PROMPT, named.completions) > 0.05
    unnamed = served(engine.generate(request(n=4)))
    assert mean_difference(plain, PROMPT, unnamed.completions) < 1e-4
    served(engine.load_adapter("policy", adapters[1], 50))
    unnamed = served(engine.generate(request(n=4)))
    assert mean_difference(load(tiny_model, adapters[1]), PROMPT, unnamed.completions) < 1e-4
    assert unnamed.completions[0].policy_versions == [50]
    assert served(engine.state()).policy_version == 50
    served(engine.unload_adapter("by-hand"))
    with pytest.raises(RequestError, match="no adapter 'by-hand'"):
        served(engine.generate(request(adapter="by-hand")))
    served(engine.unload_adapter("policy"))
    unnamed = served(engine.generate(request(n=4)))
    assert mean_difference(plain, PROMPT, unnamed.completions) < 1e-4


def test_adapters_are_swapped_under_load_without_a_failed_request(served, adapters, tiny_model):
    engine = served.engine
    answers = []

    def version_of(generation):
        (version,) = generation.completions[0].policy_versions
        return version

    async def keep_asking(stop):
        while not stop.is_set():
            answers.append(await engine.generate(request(max_tokens=12)))

    async def swap():
        stop = asyncio.Event()
        load = [asyncio.ensure_future(keep_asking(stop)) for _ in range(4)]
        for number in range(NUM_SWAPS):
            await engine.load_adapter(f"policy-{number}", adapters[number % 2], 100 + number)
            if number:
                await engine.unload_adapter(f"policy-{number - 1}")
            while not any(version_of(answer) == 100 + number for answer in answers):
                await asyncio.sleep(0.005)
        stop.set()
        await asyncio.gather(*load)

    served(swap())
    assert {version_of(answer) for answer in answers} >= set(range(100, 100 + NUM_SWAPS))
    reference = [load(tiny_model, folder) for folder in adapters[:2]]
    for generation in answers[:: len(answers) // 12]:
        version = version_of(generation)
        if version >= 100:
            assert mean_difference(reference[version % 2], PROMPT, generation.completions) < 1e-4
    assert [a.policy_version for a in engine.adapters()] == [100 + NUM_SWAPS - 1]
    served(engine.unload_adapter(f"policy-{NUM_SWAPS - 1}"))


def test_adapters_that_cannot_be_served_are_refused(served, adapters, tmp_path):
    with pytest.raises(RequestError, match="cannot be read as a LoRA adapter"):
        served(served.engine.load_adapter("absent", tmp_path / "absent", 1))
    with pytest.raises(RequestError, match="has rank 16, this engine takes up to 8"):
        served(served.engine.load_adapter("large", adapters[2], 1))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text((adapters[0] / "adapter_config.json").read_text())
    save_file({"base_model.model.nothing.lora_A.weight": torch.zeros(4, 4)}, broken / "adapter_model.safetensors")
    with pytest.raises(RequestError, match="it has no such weight"):
        served(served.engine.load_adapter("broken", broken, 1))
    assert served(served.engine.state()).failure is None
    assert served.engine.adapters() == []


def test_routes_that_are_not_used_are_closed_and_the_key_is_needed(served):
    server = next(p for p in vllm_processes() if p.cmdline()[1:3] == ["-m", "vllm.entrypoints.openai.api_server"])
    url = "http://127.0.0.1:" + server.cmdline()[server.cmdline().index("--port") + 1]
    key = {"Authorization": f"Bearer {server.environ()['VLLM_API_KEY']}"}
    listening = {c.laddr.ip for p in vllm_processes() for c in p.net_connections("tcp") if c.status == "LISTEN"}
    assert listening == {"127.0.0.1"}
    assert httpx.get(f"{url}/health").status_code == 401
    assert httpx.get(f"{url}/health", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert httpx.get(f"{url}/health", headers=key).status_code == 200
    for method, path in (("GET", "/docs"), ("GET", "/metrics"), ("POST", "/collective_rpc"), ("POST", "/tokenize")):
        assert httpx.request(method, url + path, headers=key).status_code == 404, path
    body = {"method": "save_sharded_state", "kwargs": {}}
    refused = httpx.post(f"{url}/treadle/rpc", json=body, headers=key)
    assert refused.status_code == 500
    assert "none of our worker's methods" in refused.text
