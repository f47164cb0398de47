from __future__ import annotations

import platform

import pytest
import torch
from torch import nn

from treadle.sync import device


@pytest.fixture(autouse=True)
def _as_before():
    enabled = torch._C._get_mkldnn_enabled()
    yield
    torch.backends.mkldnn.set_flags(enabled)


@pytest.mark.parametrize(("blas_s", "is_onednn"), [(0.5, False), (0.9, True), (2.0, True)])
def test_an_arm_cpu_multiplies_by_blas_where_that_is_clearly_faster(monkeypatch, blas_s, is_onednn):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(device, "_best_time_s", lambda *_, onednn: 1.0 if onednn else blas_s)
    device.choose_products(nn.Linear(8, 8), 4)
    assert torch._C._get_mkldnn_enabled() is is_onednn


def test_other_processors_and_formats_are_left_alone(monkeypatch):
    monkeypatch.setattr(device, "_best_time_s", lambda *_, onednn: 1.0 if onednn else 0.1)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    device.choose_products(nn.Linear(8, 8), 4)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    device.choose_products(nn.Linear(8, 8).bfloat16(), 4)
    assert torch._C._get_mkldnn_enabled()


def test_both_ways_are_really_timed(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    for onednn in (True, False):
        assert 0 < device._best_time_s(torch.ones(64, 64), 4, onednn=onednn) < 10
        assert torch._C._get_mkldnn_enabled() is onednn
