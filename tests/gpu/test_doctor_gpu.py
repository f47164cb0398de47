"""The doctor's trial of CUDA IPC on a real card. Never run in CI: pytest -m gpu tests/gpu."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from treadle.doctor.survey import HostFacts, SharingResult, check_cuda_sharing, try_sharing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_two_real_processes_share_the_memory_of_a_gpu(tmp_path: Path) -> None:
    trials = try_sharing(tmp_path)
    assert trials.torch.gpus
    assert trials.results == (SharingResult("cpu"), SharingResult("cuda"))
    assert check_cuda_sharing(trials, HostFacts({})).verdict == "ok"


def test_expandable_segments_are_named_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", env["PYTORCH_ALLOC_CONF"])
    check = check_cuda_sharing(try_sharing(tmp_path), HostFacts(env))
    assert check.verdict == "ok" or "asked for by PYTORCH_ALLOC_CONF" in check.found  # some systems let them be shared
