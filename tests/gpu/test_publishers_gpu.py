"""Trainers that are killed while they publish to an engine on the same GPU, and two that publish to one engine."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.test_publishers import *  # noqa: F403
from tests.e2e.test_publishers import serving

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def sharing(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("sharing"), "cuda", adapts=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def adapting(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("adapting"), "cuda", shares=False) as engine:
        yield engine


@pytest.fixture
def engine(request):
    """Modes with adapters have an engine that does not share its weights."""
    is_lora = request.node.callspec.params["mode"] == "lora_only"
    return request.getfixturevalue("adapting" if is_lora else "sharing")
