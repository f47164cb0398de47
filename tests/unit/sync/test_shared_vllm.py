"""Choice of the transport between two copies of the weights."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from treadle.config import TrainConfig
from treadle.errors import ConfigError
from treadle.sync.layout import CudaStorage, Layout, plan_layout
from treadle.sync.shared_vllm import choose_transport

URL = "http://gpu-box:9001"
FILE = plan_layout("/dev/shm/w", "m", "bfloat16", [("a", (3,))])


def on_card(uuid):
    storage = CudaStorage(
        device_uuid=uuid, handle="", num_bytes=6, offset=0, counter_handle="", counter_offset=0, event_handle="",
        needs_event=False,
    )  # fmt: skip
    return Layout(path="", model="m", dtype="bfloat16", num_bytes=6, parameters=(), storages=(storage,))


def choose(wished="auto", *, is_here=True, layout=None, engine="cuda", own="cuda"):
    card = "GPU-1" if own == "cuda" else None
    return choose_transport(
        wished, URL, is_here=is_here, layout=layout, engine_device=engine, own_device=own, own_gpu=card
    )  # fmt: skip


CASES = {
    "one machine, a shared file, CPUs": ("memory", {"layout": FILE, "engine": "cpu", "own": "cpu"}),
    "one machine, a shared file, a GPU trains": ("memory", {"layout": FILE, "engine": "cpu"}),
    "one machine, one card": ("memory", {"layout": on_card("GPU-1")}),
    "one machine, two cards": ("nccl", {"layout": on_card("GPU-2"), "engine": "cuda:1"}),
    "one machine, a CPU trains": ("gloo", {"layout": on_card("GPU-1"), "own": "cpu"}),
    "one machine, an engine that shares nothing, GPUs": ("nccl", {}),
    "one machine, an engine that shares nothing, CPUs": ("gloo", {"engine": "cpu", "own": "cpu"}),
    "two machines, GPUs": ("nccl", {"is_here": False}),
    "two machines, a CPU serves": ("gloo", {"is_here": False, "engine": "cpu"}),
    "two machines, a CPU trains": ("gloo", {"is_here": False, "own": "cpu"}),
}


@pytest.mark.parametrize(("expected", "given"), CASES.values(), ids=CASES)
def test_auto_takes_memory_where_it_can_be_shared_then_nccl_then_gloo(expected, given):
    assert choose(**given) == expected


def test_what_is_asked_for_is_taken_or_refused():
    assert choose("gloo", layout=on_card("GPU-1")) == "gloo"
    assert choose("nccl", layout=on_card("GPU-1")) == "nccl"
    assert choose("memory", layout=on_card("GPU-2")) == "memory"
    with pytest.raises(ConfigError, match="the engine at http://gpu-box:9001 is on another machine") as error:
        choose("memory", is_here=False)
    assert "--broadcast-by" in error.value.fix
    with pytest.raises(ConfigError, match=r"NCCL is between GPUs: .* is on cpu, the trainer on cuda") as error:
        choose("nccl", engine="cpu")
    assert "gloo" in error.value.fix


@pytest.mark.parametrize("given", [{"broadcast_by": "gloo"}, {"broadcast_host": "10.0.0.2"}])
def test_a_transport_for_two_copies_needs_two_copies(given):
    with pytest.raises(ValidationError, match=f"{next(iter(given))} is for use_shared_memory, which is off"):
        TrainConfig(**given)
    assert TrainConfig(use_shared_memory=True, **given).use_shared_memory
