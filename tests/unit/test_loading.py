from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest
import torch

from treadle.loading import choose_matmul_backend


@pytest.fixture(autouse=True)
def _restore_onednn():
    enabled = torch._C._get_mkldnn_enabled()
    torch.backends.mkldnn.set_flags(True)
    yield
    torch.backends.mkldnn.set_flags(enabled)


@pytest.mark.parametrize(
    ("machine", "device", "dtype", "uses_onednn"),
    [
        ("aarch64", "cpu", torch.float32, False),
        ("arm64", "cpu", torch.float32, False),
        ("x86_64", "cpu", torch.float32, True),
        ("aarch64", "cpu", torch.bfloat16, True),
        ("aarch64", "cuda", torch.float32, True),
    ],
)
def test_only_float32_on_an_arm_cpu_is_multiplied_by_blas(monkeypatch, machine, device, dtype, uses_onednn):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    choose_matmul_backend(SimpleNamespace(device=torch.device(device), dtype=dtype))
    assert torch._C._get_mkldnn_enabled() is uses_onednn
