"""The engine's HTTP API with vLLM: the same tests as for the transformers engine."""

from __future__ import annotations

import pytest

from tests.contract.test_engine_api import *  # noqa: F403
from tests.contract.test_engine_api import EngineApi
from tests.vllm.conftest import HAS_GPU

del test_a_restart_serves_a_saved_model_and_requests_wait_for_it  # noqa: F821 - a restart is slow: once, in test_restart.py

# Largest difference of a logprob; see conftest.py.
SAME, SAME_ADAPTER = (0.05, 0.1) if HAS_GPU else (1e-4, 1e-4)


class VllmApi(EngineApi):
    def post(self, route, timeout=300, **body):
        return super().post(route, timeout, **body)


@pytest.fixture
def api(request, served):
    if "no_adapters_left" not in request.fixturenames:
        return VllmApi(served.url, served.folder, str(served.folder), SAME, has_lora=not HAS_GPU)
    adapting = request.getfixturevalue("adapting")
    return VllmApi(adapting.url, adapting.folder, str(adapting.folder), SAME_ADAPTER)
