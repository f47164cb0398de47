"""VllmEngine with a fake vLLM server: clients that disconnect, concurrent changes, stops, workers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from tests.unit.engines.fake_vllm import FakeVllm
from treadle.config import EngineConfig
from treadle.engines.interface import EngineFacts, Request
from treadle.engines.model_folder import ADAPTER_FILES
from treadle.engines.sampling import SamplingParams
from treadle.engines.vllm import start_vllm
from treadle.engines.vllm.client import common_answer
from treadle.engines.vllm.command import Installation
from treadle.engines.vllm.engine import VllmEngine
from treadle.engines.vllm.server_process import begin_server
from treadle.errors import ConfigError, EngineError, RequestError
from treadle.wire.bridge import WeightPart

SOON_S = 10.0
NO_TEXT = SimpleNamespace(decode_after=None)  # the fake server returns the text


def facts(folder=Path("/model")):
    return EngineFacts(
        kind="vllm", version="0", folder=folder, device="cpu", dtype="float32", max_model_len=64, vocab_size=80,
        eos_ids=frozenset({1}), max_num_seqs=4, has_lora=True, max_lora_rank=8,
    )  # fmt: skip


def request(**changes):
    given = {"prompt_ids": [5, 6], "n": 1, "max_tokens": 4, "sampling": SamplingParams()}
    return Request(**given | changes)


async def until(condition):
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.005)


class Engines:
    """An engine with a fake server, and the fake servers that its restarts create."""

    def __init__(self, folder=Path("/model"), drain_timeout_s=SOON_S):
        self.servers = [FakeVllm()]
        self.refusal = None
        self.engine = VllmEngine(
            self.servers[0],
            facts(folder),
            NO_TEXT,
            self._prepare,
            start_timeout_s=SOON_S,
            drain_timeout_s=drain_timeout_s,
        )

    def _prepare(self, folder):
        if self.refusal:
            raise self.refusal

        def begin():
            self.servers.append(FakeVllm(is_ready=False))
            return self.servers[-1], facts(folder)

        return begin


@contextlib.asynccontextmanager
async def engines(**settings):
    made = Engines(**settings)
    try:
        yield made
    finally:
        for server in made.servers:
            server.may_change.set()
        await made.engine.close()
        assert all(server.has_ended.is_set() for server in made.servers)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of different shapes, and an adapter for the second."""
    root = tmp_path_factory.mktemp("models")
    small = write_tiny_model(root / "small", hidden_size=32, num_layers=1)
    large = write_tiny_model(root / "large", hidden_size=64, num_layers=1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(large, dtype=torch.float32)
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(root / "adapter")
    return small, large, root / "adapter"


def test_an_abandoned_request_ends_in_vllm_too():
    async def leave():
        async with engines() as made:
            (server,) = made.servers
            server.may_answer.clear()
            asked = asyncio.ensure_future(made.engine.generate(request()))
            await until(lambda: server.bodies)
            asked.cancel()
            await until(server.has_hung_up.is_set)
            assert (await made.engine.status()).num_running == 0

    asyncio.run(leave())


def test_the_status_has_the_numbers_of_vllms_scheduler():
    async def ask():
        async with engines() as made:
            (server,) = made.servers
            server.may_answer.clear()
            asked = asyncio.ensure_future(made.engine.generate(request(n=8)))
            await until(lambda: server.bodies)
            by_own_count = await made.engine.status()
            server.load = {"num_running": 3, "num_waiting": 2, "kv_cache_usage": 0.97}  # three have finished
            by_vllm = await made.engine.status()
            server.may_answer.set()
            await asked
            idle = await made.engine.status()
            return [(one.num_running, one.num_waiting, one.kv_cache_usage) for one in (by_own_count, by_vllm, idle)]

    assert asyncio.run(ask()) == [(4, 4, 0.0), (3, 2, 0.97), (0, 0, 0.97)]


def test_a_stream_that_is_closed_early_ends_in_vllm_too():
    async def leave():
        async with engines() as made:
            (server,) = made.servers
            server.may_answer.clear()
            stream = made.engine.stream(request())
            assert (await anext(stream)).token_ids == [7]
            await stream.aclose()
            assert (await made.engine.status()).num_running == 0
            await until(server.has_hung_up.is_set)

    asyncio.run(leave())


def test_a_dead_servers_requests_fail_with_the_end_of_its_log():
    async def die():
        async with engines() as made:
            (server,) = made.servers
            server.may_answer.clear()
            stream = made.engine.stream(request())
            await anext(stream)
            whole = asyncio.ensure_future(made.engine.generate(request()))
            await until(lambda: len(server.bodies) == 2)
            await asyncio.to_thread(server.stop)
            with pytest.raises(EngineError, match="exit code 1"):
                await anext(stream)
            with pytest.raises(EngineError):
                await whole

    asyncio.run(die())


def test_a_connection_closed_by_the_server_is_reopened():
    async def ask():
        async with engines() as made:
            (server,) = made.servers
            await made.engine.generate(request())
            assert server.num_connections == 1
            await until(lambda: server.num_connections == 0)
            assert len((await made.engine.generate(request())).completions) == 1

    asyncio.run(ask())


def test_requests_to_a_closed_engine_fail_with_a_clear_error():
    async def ask():
        async with engines() as made:
            await made.engine.generate(request())
            await made.engine.close()
            for question in (made.engine.generate(request()), made.engine.fingerprints(1)):
                with pytest.raises(EngineError):
                    await question

    asyncio.run(ask())


def test_a_single_token_request_has_priority():
    async def ask():
        async with engines() as made:
            await made.engine.generate(request(max_tokens=4))
            await made.engine.generate(request(max_tokens=1))
            rollout, question = made.servers[0].bodies
            assert question["priority"] < rollout["priority"]  # vLLM takes the smallest first

    asyncio.run(ask())


@pytest.mark.parametrize("moment", ["while it drains", "while it loads"])
def test_a_stop_during_a_restart_ends_at_once_and_leaves_no_server(models, moment):
    async def stop():
        async with engines(folder=models[0]) as made:
            made.servers[0].may_answer.clear()
            running = asyncio.ensure_future(made.engine.generate(request()))
            await until(lambda: made.servers[0].bodies)
            if moment == "while it loads":
                made.servers[0].may_answer.set()
                await running
            restarting = asyncio.ensure_future(made.engine.restart(models[1], None, 3))
            if moment == "while it loads":
                await until(lambda: len(made.servers) == 2)
            else:
                await until(lambda: not made.engine._request_barrier.is_open)
            waiting = asyncio.ensure_future(made.engine.generate(request()))
            started = time.monotonic()
            await made.engine.close()
            assert time.monotonic() - started < 5
            assert all(server.has_ended.is_set() for server in made.servers)
            ended = await asyncio.gather(restarting, waiting, running, return_exceptions=True)
            assert isinstance(ended[0], EngineError)
            assert isinstance(ended[1], EngineError)

    asyncio.run(stop())


def test_an_adapter_is_checked_against_the_present_model(models):
    """Not against one that a restart is replacing."""
    small, large, adapter = models

    async def load():
        async with engines(folder=small) as made:
            with pytest.raises(RequestError, match="was made for"):
                await made.engine.load_adapter("policy", adapter, 1)
            restarting = asyncio.ensure_future(made.engine.restart(large, None, 3))
            await until(lambda: len(made.servers) == 2)
            loading = asyncio.ensure_future(made.engine.load_adapter("policy", adapter, 4))
            await asyncio.sleep(0)
            made.servers[1].is_ready.set()
            await asyncio.gather(restarting, loading)
            assert made.servers[1].adapters == ["policy@1"]
            assert made.engine.policy_version == 4

    asyncio.run(load())


def test_an_adapter_of_the_output_layer_is_refused(models, tmp_path):
    _, large, _ = models
    model = AutoModelForCausalLM.from_pretrained(large, dtype=torch.float32)
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    get_peft_model(model, config).save_pretrained(tmp_path, save_embedding_layers=False)

    async def load():
        async with engines(folder=large) as made:
            with pytest.raises(RequestError, match=r"changes .*lm_head, which vLLM cannot serve") as refused:
                await made.engine.load_adapter("policy", tmp_path, 1)
            assert "--lora-target-modules down_proj gate_proj k_proj" in refused.value.fix

    asyncio.run(load())


def test_unloading_does_not_wait_forever_for_another_change(models):
    _, large, adapter = models

    async def unload():
        async with engines(folder=large, drain_timeout_s=0.2) as made:
            (server,) = made.servers
            await made.engine.load_adapter("first", adapter, 1)
            server.may_change.clear()
            loading = asyncio.ensure_future(made.engine.load_adapter("second", adapter, 2))
            await until(lambda: made.engine._changes.is_busy)
            async with asyncio.timeout(SOON_S):
                await made.engine.unload_adapter("first")
            with pytest.raises(RequestError, match="no adapter 'first'"):
                await made.engine.generate(request(adapter="first"))
            server.may_change.set()
            await loading
            await until(lambda: server.adapters == ["second@2"])

    asyncio.run(unload())


def test_a_loaded_adapter_does_not_need_its_original_files(models, tmp_path):
    """vLLM may read the files again while it is loaded; the trainer may delete its own at any time."""
    _, large, adapter = models

    async def load():
        async with engines(folder=large) as made:
            (server,) = made.servers
            await made.engine.load_adapter("policy", shutil.copytree(adapter, tmp_path / "policy"), 1)
            shutil.rmtree(tmp_path / "policy")
            server.may_answer.clear()
            running = asyncio.ensure_future(made.engine.generate(request()))
            await until(lambda: server.bodies)
            await made.engine.unload_adapter("policy")
            read = server.adapter_paths["policy@1"]
            for name in ADAPTER_FILES:
                assert (read / name).read_bytes() == (adapter / name).read_bytes()
            server.may_answer.set()
            await running
            await until(lambda: not read.exists())
            assert server.adapters == []

    asyncio.run(load())


def test_a_failed_unload_is_retried(models):
    _, large, adapter = models

    async def unload():
        async with engines(folder=large) as made:
            (server,) = made.servers
            for name in ("first", "second"):
                await made.engine.load_adapter(name, adapter, None)
            server.refuses_changes = True
            with pytest.raises(EngineError):
                await made.engine.unload_adapter("first")
            assert server.adapter_paths["first@1"].exists()
            server.refuses_changes = False
            await made.engine.unload_adapter("second")
            assert server.adapters == []
            assert list(server.scratch.iterdir()) == []

    asyncio.run(unload())


def test_a_full_disk_and_a_dead_server_are_named_when_loading(models, monkeypatch):
    _, large, adapter = models

    async def load():
        async with engines(folder=large) as made:
            (server,) = made.servers

            def fill(_source, _target):
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr(shutil, "copyfile", fill)
            with pytest.raises(EngineError, match=f"{server.scratch} has no room for a copy") as refused:
                await made.engine.load_adapter("policy", adapter, 1)
            assert "TMPDIR" in refused.value.fix
            assert made.engine.adapters() == []
            assert list(server.scratch.iterdir()) == []
            server.stop()
            with pytest.raises(EngineError, match="vLLM ended with exit code 1"):
                await made.engine.load_adapter("policy", adapter, 1)

    asyncio.run(load())


def test_two_reloads_without_a_version_are_two_versions(models):
    async def reload():
        async with engines(folder=models[0]) as made:
            made.servers[0].rpc_answers = [{"num_loaded": 1}]
            await asyncio.gather(*(made.engine.reload(models[0], None) for _ in range(2)))
            assert made.engine.policy_version == 2

    asyncio.run(reload())


def test_the_answers_of_all_workers_must_agree():
    async def ask():
        async with engines() as made:
            (server,) = made.servers
            server.rpc_answers = [None, None]

            def read(*answers):
                server.rpc_answers_to["treadle_read_fingerprints"] = list(answers)

            read({"w": "1f"}, {"w": "1f"})
            assert await made.engine.fingerprints(1) == {"w": "1f"}
            read({"w": "1f"}, {"w": "2e"})
            with pytest.raises(EngineError, match="workers 0 and 1 answer treadle_read_fingerprints differently"):
                await made.engine.fingerprints(1)
            read({"w": "1f"}, {"error": "q_proj is split", "fix": "another mode"})
            with pytest.raises(RequestError, match="worker 1 of 2: q_proj is split") as refused:
                await made.engine.fingerprints(1)
            assert refused.value.fix == "another mode"
            read()
            with pytest.raises(EngineError, match="no worker"):
                await made.engine.fingerprints(1)

    asyncio.run(ask())


def test_fingerprints_and_parts_of_a_split_engine_are_those_of_each_worker():
    async def ask():
        async with engines() as made:
            (server,) = made.servers
            assert (await made.engine.shards()).workers == []
            made.engine._facts = dataclasses.replace(made.engine.facts, num_workers=2)
            server.rpc_answers = [None, None]
            server.rpc_answers_to["treadle_read_fingerprints"] = [{"w": "1f"}, {"w": "2e"}]
            assert await made.engine.fingerprints(1) == {"w on worker 0 of 2": "1f", "w on worker 1 of 2": "2e"}
            server.rpc_answers_to["treadle_shards"] = [{"w": [1, 0, 4]}, {"w": [1, 4, 4]}]
            parts = [{"w": WeightPart(1, 0, 4)}, {"w": WeightPart(1, 4, 4)}]
            assert (await made.engine.shards()).workers == parts

    asyncio.run(ask())


def test_fingerprint_requests_are_serialized():
    async def ask():
        async with engines() as made:
            (server,) = made.servers
            server.rpc_answers_to["treadle_read_fingerprints"] = [{"w": "1f"}]
            await asyncio.gather(*(made.engine.fingerprints(version) for version in (4, 5)))
            methods = ("treadle_begin_fingerprints", "treadle_read_fingerprints")
            assert server.rpcs == [(m, {"policy_version": v}) for v in (4, 5) for m in methods]

    asyncio.run(ask())


def test_the_only_worker_is_not_named_in_errors():
    with pytest.raises(RequestError, match=r"^it does not fit"):
        common_answer("treadle_load_weights", [{"error": "it does not fit", "fix": ""}])


def test_an_impossible_restart_is_refused_and_the_server_stays(models):
    async def restart():
        async with engines() as made:
            made.refusal = ConfigError("float16 only", fix="--dtype float16")
            with pytest.raises(RequestError, match="float16 only") as refused:
                await made.engine.restart(models[1], None, 3)
            assert refused.value.fix == "--dtype float16"
            assert not made.servers[0].has_ended.is_set()
            assert (await made.engine.status()).failure is None
            assert len((await made.engine.generate(request())).completions) == 1

    asyncio.run(restart())


def test_an_untested_version_is_logged_at_the_start(models, monkeypatch, caplog):
    newer = Installation(python="/env/bin/python", version="0.99.0", is_cpu=False, has_flashinfer=True)
    monkeypatch.setattr("treadle.engines.vllm.command.find_vllm", lambda _: newer)
    with pytest.raises(ConfigError, match="a build for GPUs"):
        start_vllm(EngineConfig(device="cpu"), models[0])
    (record,) = [r for r in caplog.records if r.getMessage() == "vllm_version_untested"]
    assert record.treadle_fields == {"version": "0.99.0", "tested": "0.26 to 0.32"}


def test_a_command_that_cannot_be_built_leaves_no_folder_behind(models, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for_gpus = Installation(python="/env/bin/python", version="0.26.0", is_cpu=False, has_flashinfer=True)
    with pytest.raises(ConfigError, match="a build for GPUs"):
        begin_server(EngineConfig(device="cpu", vllm_python="/env/bin/python"), for_gpus, models[0])
    assert list(tmp_path.iterdir()) == []
