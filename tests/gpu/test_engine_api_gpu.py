"""The HTTP API of the transformers engine on a GPU: the same tests as on a CPU. vLLM's are in tests/vllm."""

from __future__ import annotations

import pytest
import torch

from tests.contract.test_engine_api import *  # noqa: F403
from tests.contract.test_engine_api import serving

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def sharing(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("sharing"), "cuda", adapts=False) as api:
        yield api


@pytest.fixture(scope="module")
def adapting(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("adapting"), "cuda", shares=False) as api:
        yield api


@pytest.fixture
def api(request):
    """Modes with adapters have an engine that does not share its weights."""
    return request.getfixturevalue("adapting" if "no_adapters_left" in request.fixturenames else "sharing")
