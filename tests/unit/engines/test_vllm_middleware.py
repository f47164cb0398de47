"""The order in which vLLM is told of new weights: whatever way its client sends, the worker is let go last."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from treadle.engines.vllm import middleware
from treadle.sync.gate import PublishGate

NUMBER = 7


class Core:
    """As vLLM's client of its engine has it: what is called is sent in the call's first turn."""

    def __init__(self, sent):
        self._sent = sent

    async def call_utility_async(self, method, *_):
        self._sent.append(method)
        await asyncio.sleep(0)
        return True


class Client:
    def __init__(self, gate: Path, sent) -> None:
        self._gate = PublishGate(gate)
        self.sent = sent

    async def collective_rpc(self, method, kwargs):
        self.sent.append(method)
        await asyncio.sleep(0)
        self._gate.mark_written(kwargs["number"])
        return await asyncio.to_thread(self._gate.wait_for_write, kwargs["number"], until_allowed=True)

    async def reset_prefix_cache(self, *, reset_running_requests):
        """In tasks of their own, as vLLM 0.32 asks several engines."""
        assert reset_running_requests
        return all(await asyncio.gather(Core(self.sent).call_utility_async("reset_prefix_cache")))


class ClientWithCore(Client):
    def __init__(self, gate: Path, sent) -> None:
        super().__init__(gate, sent)
        self.engine_core = Core(sent)


@pytest.mark.parametrize("kind", [Client, ClientWithCore])
def test_the_worker_goes_on_when_the_call_that_drops_caches_is_sent(kind, tmp_path, monkeypatch):
    gate, sent = tmp_path / "gate", []
    PublishGate.create(gate)
    allow_resume = PublishGate.allow_resume

    def let_go(self, number):
        sent.append("may go on")
        allow_resume(self, number)

    monkeypatch.setattr(PublishGate, "allow_resume", let_go)
    order = {"gate": str(gate), "number": NUMBER, "timeout_s": 5.0}
    asyncio.run(asyncio.wait_for(middleware._adopt(SimpleNamespace(engine_client=kind(gate, sent)), order), 10))
    assert sent == ["treadle_stand_still", "reset_prefix_cache", "may go on"]
