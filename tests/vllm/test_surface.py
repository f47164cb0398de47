"""The engine's HTTP surface with vLLM behind it: the same tests that the transformers engine is put to."""

from __future__ import annotations

import pytest

from tests.contract.test_engine_surface import *  # noqa: F403
from tests.contract.test_engine_surface import Surface
from tests.vllm.conftest import HAS_GPU

del test_a_restart_serves_a_saved_model_and_requests_wait_for_it  # noqa: F821 - in test_life.py, once and for good

# Of each logprob; conftest.py says why.
SAME, SAME_ADAPTER = (0.05, 0.1) if HAS_GPU else (1e-4, 1e-4)


class PatientSurface(Surface):
    def post(self, route, timeout=300, **body):
        return super().post(route, timeout, **body)


@pytest.fixture
def surface(request, served):
    if "no_adapters_left" not in request.fixturenames:
        return PatientSurface(served.url, served.folder, str(served.folder), SAME, has_lora=not HAS_GPU)
    adapting = request.getfixturevalue("adapting")
    return PatientSurface(adapting.url, adapting.folder, str(adapting.folder), SAME_ADAPTER)
