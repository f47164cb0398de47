"""Sampling, and what changes it: weights in a shared file, holds, adapters. The HTTP API: test_vllm_api.py."""

from __future__ import annotations

import asyncio
import shutil

import httpx
import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from tests.unit.sync.group_peer import Weights
from tests.vllm.conftest import ADAPTERS_KEPT, HAS_GPU, OTHER, SAME, SAME_ADAPTER, vllm_processes, wait_until
from tests.vllm.reference import load, logits_after, logprobs_of, mean_difference
from treadle.engines.interface import Request
from treadle.engines.sampling import SamplingParams
from treadle.engines.vllm.command import KEY_VARIABLE
from treadle.errors import EngineError, RequestError
from treadle.sync.broadcaster import Receiver, WeightBroadcaster
from treadle.sync.fingerprint import fingerprints as fingerprints_of
from treadle.sync.protocol import EngineLink
from treadle.sync.shared_memory import bind_parameters, map_weights

PROMPT = [20, 21, 22, 23, 30, 31, 32]
LONG = 230  # tokens: enough to do something while they are sampled
NUM_SWAPS = 10
NUM_OUTLIVED = ADAPTERS_KEPT + 4
BLOCK = 128  # tokens per block of the prefix cache in vLLM's CPU build


@pytest.fixture(scope="module")
def plain(tiny_model):
    return load(tiny_model)


@pytest.fixture(scope="module")
def adapters(adapting, tmp_path_factory):
    """Two adapters with a large effect."""
    folders = []
    for seed, rank in ((1, 4), (2, 8)):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=4 * rank, target_modules="all-linear", init_lora_weights=False)
        folder = tmp_path_factory.mktemp("adapters") / f"rank-{rank}"
        get_peft_model(load(adapting.folder), config).save_pretrained(folder)
        folders.append(folder)
    return folders


def request(**changes):
    given = {"prompt_ids": PROMPT, "n": 1, "max_tokens": 24, "sampling": SamplingParams(), "ignore_eos": True}
    return Request(**given | changes)


def test_greedy_completions_are_n_times_the_likeliest_tokens(served, plain):
    generation = served(served.engine.generate(request(n=3, sampling=SamplingParams(temperature=0), num_top=2)))
    assert len(generation.completions) == 3
    for completion in generation.completions:
        assert completion.token_ids == logits_after(plain, PROMPT, completion.token_ids).argmax(-1).tolist()
        assert all(max(top, key=top.get) == t for top, t in zip(completion.tops, completion.token_ids, strict=True))
    assert mean_difference(plain, PROMPT, generation.completions) < SAME


def test_the_deltas_of_a_stream_add_up_to_the_full_answer(served):
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


def test_a_request_that_vllm_rejects_is_a_request_error(served):
    with pytest.raises(RequestError, match="256"):
        served(served.engine.generate(request(prompt_ids=[5] * 400)))
    assert served(served.engine.status()).failure is None


class Frozen:
    """A streamed and a plain request, both held in the middle."""

    def __init__(self, engine):
        self._engine = engine
        self.deltas = []
        self._reading = asyncio.ensure_future(self._read())
        self._whole = asyncio.ensure_future(engine.generate(request(max_tokens=LONG)))

    @classmethod
    async def of(cls, engine, attempts=5):
        """Retries: on a busy machine the hold may come after the last token."""
        for _ in range(attempts):
            frozen = cls(engine)
            while len(frozen.deltas) < 5:
                await asyncio.sleep(0.001)
            await engine.hold("keep", 60)
            await frozen.settle()
            if not frozen._reading.done() and not frozen._whole.done():
                return frozen
            await engine.release(None)
            await frozen.end()
        raise AssertionError(f"{attempts} completions of {LONG} tokens finished before the hold")

    async def settle(self):
        """Wait until tokens sampled before the hold have arrived: they are sent before the answers to these calls. The
        calls pass through vLLM's loop, which would sample further tokens between them if it were not held."""
        for _ in range(5):
            await self._engine.status()
            await self._engine.fingerprints(0)

    async def end(self):
        await self._reading
        return self.deltas, (await self._whole).completions[0]

    async def _read(self):
        async for delta in self._engine.stream(request(max_tokens=LONG, seed=3)):
            self.deltas.append(delta)


async def _update_during_request(engine, change, version):
    """Hold, change the weights, release. Returns the deltas, how many came before the hold, and another completion."""
    frozen = await Frozen.of(engine)
    at_hold = len(frozen.deltas)
    await frozen.settle()
    assert len(frozen.deltas) == at_hold, "a token was sampled while held"
    change()
    await engine.release(version)
    deltas, whole = await frozen.end()
    return deltas, at_hold, whole


def test_a_running_request_continues_under_the_new_weights(served, plain, weights):
    engine = served.engine
    saved = {name: weight.clone() for name, weight in weights.items()}
    first = served(engine.status()).policy_version
    before = served(engine.generate(request(n=2, seed=1)))

    def add_noise():
        torch.manual_seed(0)
        for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
            weights[name].add_(torch.randn_like(weights[name]) * 0.1)

    deltas, at_hold, whole = served(_update_during_request(engine, add_noise, first + 1), timeout_s=300)
    assert [d.policy_version for d in deltas] == [first] * at_hold + [first + 1] * (len(deltas) - at_hold)
    assert 5 <= at_hold < len(deltas)
    assert whole.policy_versions == [first, first + 1]
    assert served(engine.status()).policy_version == first + 1

    tokens = [t for d in deltas for t in d.token_ids]
    logprobs = torch.tensor([lp for d in deltas for lp in d.logprobs])
    noisy = load(served.folder)
    noisy.load_state_dict({n: w.clone() for n, w in weights.items()}, strict=False)
    cut = sum(len(d.token_ids) for d in deltas[:at_hold])
    assert (logprobs_of(plain, PROMPT, tokens)[:cut] - logprobs[:cut]).abs().mean() < SAME
    # As if its tokens had been prefilled by the new weights: keys and values of the old ones are gone.
    assert (logprobs_of(noisy, PROMPT, tokens)[cut:] - logprobs[cut:]).abs().mean() < SAME
    assert (logprobs_of(plain, PROMPT, tokens)[cut:] - logprobs[cut:]).abs().mean() > OTHER

    changed = served(engine.generate(request(n=2, seed=1)))
    assert mean_difference(noisy, PROMPT, changed.completions) < SAME
    served(engine.hold("keep", 60))
    for name, weight in weights.items():
        weight.copy_(saved[name])
    served(engine.release(first + 2))
    restored = served(engine.generate(request(n=2, seed=1)))
    assert [c.token_ids for c in restored.completions] == [c.token_ids for c in before.completions]
    assert mean_difference(plain, PROMPT, restored.completions) < SAME
    assert [c.policy_versions for c in restored.completions] == [[first + 2]] * 2


def test_a_prompt_cached_under_earlier_weights_is_recomputed(served, plain, weights):
    engine = served.engine
    prompt = [20 + i % 40 for i in range(BLOCK + 20)]
    asked = request(prompt_ids=prompt, n=2, max_tokens=8)
    name = "model.layers.0.self_attn.v_proj.weight"
    saved, first = weights[name].clone(), served(engine.status()).policy_version
    for _ in range(2):  # the second time, the prompt's first block is cached
        assert mean_difference(plain, prompt, served(engine.generate(asked)).completions) < SAME
    served(engine.hold("keep", 60))
    weights[name].mul_(-1)
    served(engine.release(first + 1))
    changed = load(served.folder)
    changed.load_state_dict({name: weights[name].clone()}, strict=False)
    completions = served(engine.generate(asked)).completions
    assert mean_difference(changed, prompt, completions) < SAME
    assert mean_difference(plain, prompt, completions) > OTHER
    served(engine.hold("keep", 60))
    weights[name].copy_(saved)
    served(engine.release(first + 2))
    assert mean_difference(plain, prompt, served(engine.generate(asked)).completions) < SAME


@pytest.mark.usefixtures("weights")
def test_broadcast_weights_are_served_and_can_be_restored(served, plain):
    engine = served.engine
    first = served(engine.status()).policy_version
    saved = {name: p.detach().clone() for name, p in plain.named_parameters()}
    torch.manual_seed(0)
    changed = {name: weight + torch.randn_like(weight) * 0.05 for name, weight in saved.items()}
    noisy = load(served.folder)
    noisy.load_state_dict(changed, strict=False)
    link = WeightBroadcaster([Receiver(EngineLink(served.url, 120.0))], "gloo", timeout_s=60.0, bucket_bytes=1 << 20)
    link.join(Weights(saved))
    for version, sent, reference in ((first + 1, changed, noisy), (first + 2, saved, plain)):
        served(engine.hold("keep", 60))
        assert link.send(Weights(sent)) == sum(w.nbytes for w in sent.values())
        served(engine.release(version))
        generation = served(engine.generate(request(n=2)))
        assert [c.policy_versions for c in generation.completions] == [[version]] * 2
        assert mean_difference(reference, PROMPT, generation.completions) < SAME
    fingerprints = served(engine.fingerprints(0))
    assert fingerprints == fingerprints_of(saved.items(), 0)


def test_requests_wait_while_held_and_continue_afterwards(served):
    served(served.engine.hold("wait", 60))
    waiting = served.begin(served.engine.generate(request(max_tokens=3)))
    wait_until(lambda: served(served.engine.status()).num_waiting == 1)
    state = served(served.engine.status())
    assert (state.is_held, state.num_running, state.num_waiting) == (True, 0, 1)
    served(served.engine.release(None))
    assert len(waiting.result(60).completions[0].token_ids) == 3


def test_a_hold_that_times_out_loses_no_request(served):
    running = served.begin(served.engine.generate(request(max_tokens=LONG)))
    with pytest.raises(EngineError, match="still running"):
        served(served.engine.hold("wait", 0.05))
    assert len(running.result(120).completions[0].token_ids) == LONG
    assert not served(served.engine.status()).is_held


def test_one_physical_copy_serves_both_processes(served):
    layout = served(served.engine.layout())
    if HAS_GPU:
        pytest.skip("tests/gpu checks the memory of a GPU")
    views = map_weights(layout)
    assert sum(v.numel() for v in views.values()) == sum(p.numel() for p in load(served.folder).parameters())
    assert all(torch.isfinite(v).all() for v in views.values())  # reading maps the pages into both processes
    served(served.engine.fingerprints(0))
    (worker,) = [p for p in vllm_processes() if any(m.path == layout.path for m in p.memory_maps())]
    for process in (worker, psutil.Process()):
        maps = [m for m in process.memory_maps() if m.path == layout.path]
        shared = sum(m.shared_clean + m.shared_dirty for m in maps)
        private = sum(m.private_clean + m.private_dirty for m in maps)
        assert shared > 0.9 * layout.num_bytes
        assert private < 0.05 * layout.num_bytes


def test_a_trainers_model_can_be_bound_to_the_engines_weights(served, plain):
    layout = served(served.engine.layout())
    with torch.device("meta"):
        trainer = type(plain)(plain.config)
    bind_parameters(trainer, layout)
    expected = dict(plain.named_parameters())
    for name, parameter in trainer.named_parameters():
        assert torch.equal(parameter.cpu(), expected[name]), name
    assert trainer.lm_head.weight is trainer.model.embed_tokens.weight


def test_adapters_are_swapped_under_load_without_a_failed_request(adapting, adapters):
    engine = adapting.engine
    first = adapting(engine.status()).policy_version + 100
    answers = {}  # by policy version

    async def keep_asking(stop):
        while not stop.is_set():
            generation = await engine.generate(request(max_tokens=12))
            (version,) = generation.completions[0].policy_versions
            answers.setdefault(version, generation)

    async def swap():
        stop = asyncio.Event()
        load = [asyncio.ensure_future(keep_asking(stop)) for _ in range(4)]
        for number in range(NUM_SWAPS):
            await engine.load_adapter(f"policy-{number}", adapters[number % 2], first + number)
            if number:
                await engine.unload_adapter(f"policy-{number - 1}")
            while first + number not in answers:
                assert not any(task.done() for task in load), "a request failed"
                await asyncio.sleep(0.005)
        stop.set()
        await asyncio.gather(*load)

    adapting(swap(), timeout_s=300)
    reference = [load(adapting.folder, folder) for folder in adapters]
    for number in range(NUM_SWAPS):
        assert mean_difference(reference[number % 2], PROMPT, answers[first + number].completions) < SAME_ADAPTER
    assert [a.policy_version for a in engine.adapters()] == [first + NUM_SWAPS - 1]
    with pytest.raises(RequestError, match="no adapter 'policy-0'"):
        adapting(engine.generate(request(adapter="policy-0")))
    adapting(engine.unload_adapter(f"policy-{NUM_SWAPS - 1}"))


def test_requests_that_outlive_many_adapters_finish_under_their_own(adapting, adapters, tmp_path):
    """More adapters than vLLM keeps, so that it reads them again; only the files of the two newest remain, as with a
    trainer."""
    engine = adapting.engine
    first = adapting(engine.status()).policy_version + 100

    async def swap():
        asked = []
        for number in range(NUM_OUTLIVED):
            folder = shutil.copytree(adapters[number % 2], tmp_path / f"{number}")
            await engine.load_adapter(f"policy-{number}", folder, first + number)
            asked.append(asyncio.ensure_future(engine.generate(request(max_tokens=96))))
            await asyncio.sleep(0)  # lets it pass the gate
            if number:
                await engine.unload_adapter(f"policy-{number - 1}")
            if number > 1:
                shutil.rmtree(tmp_path / f"{number - 2}")
        assert sum(not each.done() for each in asked) > ADAPTERS_KEPT, "too fast: no adapter had to be read again"
        return await asyncio.gather(*asked)

    generations = adapting(swap(), timeout_s=300)
    adapting(engine.unload_adapter(f"policy-{NUM_OUTLIVED - 1}"))
    reference = [load(adapting.folder, folder) for folder in adapters]
    for number, generation in enumerate(generations):
        assert generation.completions[0].policy_versions == [first + number]
        assert mean_difference(reference[number % 2], PROMPT, generation.completions) < SAME_ADAPTER


def test_the_base_model_and_two_adapters_share_a_batch(adapting, adapters):
    engine = adapting.engine
    plain = load(adapting.folder)
    models = {None: plain}
    for folder in adapters:
        adapting(engine.load_adapter(folder.name, folder, None))
        models[folder.name] = load(adapting.folder, folder)

    async def ask_for_all():
        # 24 completions in one batch, with rows of all three.
        return await asyncio.gather(*(engine.generate(request(n=8, adapter=name)) for name in models))

    for model, generation in zip(models.values(), adapting(ask_for_all()), strict=True):
        assert mean_difference(model, PROMPT, generation.completions) < SAME_ADAPTER
    alone = adapting(engine.generate(request(n=2)))
    assert mean_difference(plain, PROMPT, alone.completions) < SAME_ADAPTER
    for folder in adapters:
        adapting(engine.unload_adapter(folder.name))
    assert engine.adapters() == []


def test_an_adapter_for_unknown_weights_is_refused(adapting, adapters, tmp_path):
    (tmp_path / "adapter_config.json").write_text((adapters[0] / "adapter_config.json").read_text())
    save_file({"base_model.model.nothing.lora_A.weight": torch.zeros(4, 4)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(RequestError, match="it has no such weight"):
        adapting(adapting.engine.load_adapter("broken", tmp_path, 1))
    assert adapting(adapting.engine.status()).failure is None
    assert adapting.engine.adapters() == []


def test_a_request_for_one_token_overtakes_waiting_rollouts(served):
    """The canary of a publish and the health check must not wait for earlier requests."""
    engine, finished = served.engine, []

    async def finish(name, asked):
        await engine.generate(asked)
        finished.append(name)

    async def ask():
        full = engine.facts.max_num_seqs
        rollouts = [asyncio.ensure_future(finish("rollouts", request(n=full, max_tokens=40))) for _ in range(2)]
        while (await engine.status()).num_waiting < full:
            await asyncio.sleep(0.005)
        await asyncio.gather(finish("single token", request(max_tokens=1, num_prompt_top=1)), *rollouts)

    served(ask(), timeout_s=300)
    assert finished.index("single token") < 2


def test_unused_routes_are_closed_and_the_api_key_is_required(served):
    server = next(p for p in vllm_processes() if p.cmdline()[1:3] == ["-m", "vllm.entrypoints.openai.api_server"])
    url = "http://127.0.0.1:" + server.cmdline()[server.cmdline().index("--port") + 1]
    key = {"Authorization": f"Bearer {server.environ()[KEY_VARIABLE]}"}
    listening = {c.laddr.ip for p in vllm_processes() for c in p.net_connections("tcp") if c.status == "LISTEN"}
    # With a GPU, torch.distributed's store of vLLM 0.26 listens on all addresses; 0.32 uses a file.
    is_known_open = HAS_GPU and served.engine.facts.version.startswith("0.26")
    assert listening - ({"::"} if is_known_open else set()) == {"127.0.0.1"}
    assert httpx.get(f"{url}/health").status_code == 401
    assert httpx.get(f"{url}/health", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert httpx.get(f"{url}/health", headers=key).status_code == 200
    for method, path in (("GET", "/docs"), ("GET", "/metrics"), ("POST", "/collective_rpc"), ("POST", "/tokenize")):
        assert httpx.request(method, url + path, headers=key).status_code == 404, path
    body = {"method": "save_sharded_state", "kwargs": {}}
    refused = httpx.post(f"{url}/treadle/rpc", json=body, headers=key)
    assert refused.status_code == 500
    assert "none of our worker's methods" in refused.text
