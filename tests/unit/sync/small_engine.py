"""A small engine that loads weights with torch and computes with them, with faults that tests can switch on.

It serves the HTTP routes of wire/bridge.py in this process.
"""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
import threading
import time
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import uvicorn
from peft import PeftModel
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM

from tests.e2e.processes import free_port
from treadle.background import in_background
from treadle.engines.weight_updates import BroadcastReceiver
from treadle.errors import TreadleError
from treadle.sync.fingerprint import fingerprints as fingerprints_of
from treadle.sync.gate import PublishGate, check_publish_order
from treadle.sync.shared_memory import share_parameters
from treadle.wire.bridge import Adopt, BridgeInfo, BridgeState, Fingerprints, Joined, JoinGroup, LoadedAdapter, Updated

RELOAD_S = 0.25  # that it says a reload took


@dataclass
class Faults:
    """Faults of an engine; each of them has occurred in practice."""

    skips: str = ""  # the end of a weight's name that is never loaded
    halves: str = ""  # of this weight only the first half is loaded
    swaps: tuple[str, str] | None = None  # two weights that are loaded into each other's place
    keeps_cache: bool = False  # answers from what it computed under earlier weights
    recasts: torch.dtype | None = None  # loads into another number format
    ignores_adapters: bool = False  # keeps the one before
    leaves_adapters: bool = False  # has them, and computes without
    version_error: int = 0
    hangs_in: str = ""
    fails_in: str = ""


@dataclass
class SmallEngine:
    folder: Path
    dtype: torch.dtype = torch.float32
    weights_file: Path | None = None
    has_lora: bool = True
    num_workers: int = 1  # as it says
    faults: Faults = field(default_factory=Faults)
    engine_id: str = field(default_factory=lambda: secrets.token_hex(4))

    def __post_init__(self):
        self.version, self.is_paused = 0, False
        self.calls, self.tokens, self.names_used, self.adapters = [], [], [], {}
        self._cache = {}
        self._adapter_path = None
        self._receiver = BroadcastReceiver()
        self._load(self.folder)

    def _load(self, folder):
        self.folder = folder
        self.base = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype).eval()
        self.layout = self.weights_file and share_parameters(self.base, self.weights_file, str(folder))
        self.served = self.base

    def _serve_version(self, version):
        self.version = version + self.faults.version_error
        if not self.faults.keeps_cache:
            self._cache.clear()

    def info(self, _):
        return BridgeInfo(
            enabled=True, shared_weights=self.layout is not None, update_count=self.version, last_update_time=None,
            model_name=str(self.folder), device="cpu", engine="transformers", engine_version="0",
            dtype=str(self.base.dtype).removeprefix("torch."), is_paused=self.is_paused, has_lora=self.has_lora,
            max_lora_rank=16, quantization="none", max_model_len=2048, max_num_seqs=128,
            adapter_root=str(self.folder.parent), engine_id=self.engine_id, num_workers=self.num_workers,
        )  # fmt: skip

    def state_dict_info(self, _):
        return msgspec.structs.replace(self.layout, policy_version=self.version, is_held=self.is_paused)

    def pause(self, _):
        self.is_paused = True
        return BridgeState(status="paused", policy_version=self.version)

    def resume(self, body):
        self.is_paused = False
        if body.get("policy_version") is not None:
            self._serve_version(body["policy_version"])
        return BridgeState(status="resumed", policy_version=self.version)

    def adopt(self, body):
        order, gate = msgspec.convert(body, Adopt), PublishGate(Path(self.layout.gate))
        check_publish_order(order, self.version, gate)
        standing = in_background("standing", lambda: gate.wait_for_write(order.number))
        while not wait((standing,), 0.2).done:
            if not gate.is_publishing(order.number):
                gate.abandon(order.number)
        held_s = standing.result()
        self._serve_version(order.policy_version)
        self.is_paused = False
        return BridgeState(status="adopted", policy_version=self.version, held_s=held_s)

    def fingerprints(self, body):
        version = body["policy_version"]
        if body.get("adapter") is not None:
            return Fingerprints(policy_version=self.version, fingerprints=self._adapter_fingerprints(version))
        found = fingerprints_of(self.base.named_parameters(), version)
        return Fingerprints(policy_version=self.version, fingerprints=found)

    @torch.no_grad()
    def reload_weights(self, body):
        if self.faults.recasts:
            self.base = self.served = self.base.to(self.faults.recasts)
        own = dict(self.base.named_parameters())
        swaps = self.faults.swaps or ()
        for saved_as, weight in load_file(next(Path(body["path"]).glob("*.safetensors"))).items():
            name = swaps[1 - swaps.index(saved_as)] if saved_as in swaps else saved_as
            if self.faults.skips and name.endswith(self.faults.skips):
                continue
            rows = len(weight) // 2 if name == self.faults.halves else len(weight)
            own[name][:rows].copy_(weight[:rows])
        self._serve_version(body["policy_version"])
        return Updated(status="ok", policy_version=self.version, seconds=RELOAD_S, held_s=RELOAD_S)

    def join(self, body):
        self._receiver.join(msgspec.convert(body, JoinGroup), dict(self.base.named_parameters()))
        return Joined(status="joined")

    def receive(self, body):
        assert self.is_paused
        return self._receiver.receive(body["group"], dict(self.base.named_parameters()))

    def restart(self, body):
        while self.faults.hangs_in == "loading":
            time.sleep(0.01)
        self._load(Path(body["model_path"]))
        if body.get("adapter_path"):
            self.served = self._with_adapter(body["adapter_path"])
        self._serve_version(body["policy_version"])
        return Updated(status="ok", policy_version=self.version, seconds=0.0)

    def lora_load(self, body):
        assert Path(body["adapter_path"]).is_absolute()
        assert body["adapter_name"] not in self.names_used, "a name that was used before"
        if not self.faults.ignores_adapters:
            adapted = self._with_adapter(body["adapter_path"])
            self.served = self.base if self.faults.leaves_adapters else adapted
        self.names_used.append(body["adapter_name"])
        self.adapters[body["adapter_name"]] = body["policy_version"]
        self._serve_version(body["policy_version"])
        return LoadedAdapter(
            status="ok", adapter_path=body["adapter_path"], adapter_name=body["adapter_name"], seconds=0.0,
            adapter_id=len(self.adapters), load_count=len(self.names_used), adapter_config={},
            policy_version=self.version,
        )  # fmt: skip

    def lora_status(self, _):
        return {"adapters": [{"name": name, "policy_version": v} for name, v in self.adapters.items()]}

    def lora_unload(self, body):
        return {"status": "ok", "previous_name": self.adapters.pop(body["adapter_name"])}

    def _with_adapter(self, path):
        self._adapter_path = Path(path)
        return PeftModel.from_pretrained(copy.deepcopy(self.base), path).merge_and_unload()

    def _adapter_fingerprints(self, version):
        """Of the newest adapter, read from its files."""
        if self._adapter_path is None:
            return {}
        config = json.loads((self._adapter_path / "adapter_config.json").read_text())
        scale, found = config["lora_alpha"] / config["r"], {}
        for name, weight in load_file(self._adapter_path / "adapter_model.safetensors").items():
            short = name.removeprefix("base_model.model.").removesuffix(".weight")
            if not (self.faults.skips and short.endswith(self.faults.skips)):
                matrix = weight.to(self.base.dtype)
                found |= fingerprints_of([(short, matrix * scale if short.endswith("lora_B") else matrix)], version)
        return found

    @torch.no_grad()
    def generate(self, body):
        ids = body["prompt"]["prompt_token_ids"]
        key = tuple(ids)
        if key not in self._cache:
            self._cache[key] = torch.log_softmax(self.served(torch.tensor([ids])).logits[0].float(), -1)
        table = self._cache[key]
        token = int(table[-1].argmax())
        answer = {
            "token_ids": [[token]], "policy_version": self.version,
            "logprobs": [[[{str(token): float(table[-1, token])}]]],
        }  # fmt: skip
        if body.get("prompt_logprobs") is not None:
            entries = [{str(t): float(table[place, t])} for place, t in enumerate(ids[1:])]
            answer["prompt_logprobs"] = [None, *entries]
        return answer

    def app(self):
        def route(path, method, do):
            async def handle(request):
                self.calls.append(path)
                self.tokens.append(request.headers.get("authorization"))
                body = msgspec.json.decode(await request.body() or b"{}")
                if path == self.faults.fails_in:
                    self._receiver.leave()  # as an engine that fails in the middle does
                    return Response(b'{"error": "the card is gone"}', 500)
                while path == self.faults.hangs_in:
                    await asyncio.sleep(0.02)
                try:
                    answer = await asyncio.to_thread(do, body)
                except TreadleError as error:
                    return Response(msgspec.json.encode({"error": str(error)}), 400)
                return Response(msgspec.json.encode(answer), media_type="application/json")

            return Route(path, handle, methods=[method])

        return Starlette(
            routes=[
                route("/bridge/info", "GET", self.info),
                route("/bridge/state_dict_info", "GET", self.state_dict_info),
                route("/bridge/pause", "POST", self.pause),
                route("/bridge/resume", "POST", self.resume),
                route("/bridge/adopt", "POST", self.adopt),
                route("/bridge/fingerprints", "POST", self.fingerprints),
                route("/bridge/join", "POST", self.join),
                route("/bridge/receive", "POST", self.receive),
                route("/bridge/restart", "POST", self.restart),
                route("/reload_weights", "POST", self.reload_weights),
                route("/lora/load", "POST", self.lora_load),
                route("/lora/status", "GET", self.lora_status),
                route("/lora/unload", "POST", self.lora_unload),
                route("/generate", "POST", self.generate),
            ]
        )


@contextmanager
def serving(engine: SmallEngine, host="127.0.0.1", port=None):
    port = port or free_port()
    settings = uvicorn.Config(engine.app(), host, port, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), f"port {port} is in use"
        time.sleep(0.01)
    try:
        yield f"http://{host}:{port}"
    finally:
        engine.faults.hangs_in = ""
        server.should_exit = True
        thread.join()
