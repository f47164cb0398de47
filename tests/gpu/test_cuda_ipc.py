"""Weights of another process, in place on one GPU. Never run in CI: pytest -m gpu tests/gpu."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch

from treadle.errors import SyncError
from treadle.sync.layout import Layout
from treadle.sync.shared_memory import find_device, map_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

OWNER = """
import sys, msgspec, torch
from treadle.sync.shared_memory import export_storage
from treadle.sync.layout import Layout, Placement
fused = torch.arange(24, dtype=torch.bfloat16, device="cuda").view(6, 4)
layout = Layout(path="", model="m", dtype="bfloat16", num_bytes=fused.nbytes, storages=(export_storage(fused),),
    parameters=(Placement(name="q", shape=(4, 4), offset=0), Placement(name="k", shape=(2, 4), offset=32)))
print(msgspec.json.encode(layout).decode(), flush=True)
for _ in sys.stdin:
    torch.cuda.synchronize()
    print(fused.float().sum().item(), flush=True)
"""


def test_a_view_of_another_process_is_the_same_memory():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdin is not None
    assert owner.stdout is not None
    try:
        layout = msgspec.json.decode(owner.stdout.readline(), type=Layout)
        before = torch.cuda.memory_allocated()
        views = map_weights(layout)
        assert torch.equal(views["k"].cpu(), torch.arange(16, 24).bfloat16().view(2, 4))
        assert torch.cuda.memory_allocated() == before
        views["k"].add_(1)
        torch.cuda.synchronize()
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert float(owner.stdout.readline()) == sum(range(24)) + 8
    finally:
        owner.kill()
        owner.wait()


def test_a_card_that_is_not_seen_is_named():
    with pytest.raises(SyncError, match="does not see"):
        find_device("GPU-00000000-0000-0000-0000-000000000000")
