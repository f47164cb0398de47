"""The engine's HTTP surface with vLLM behind it: the same tests that the transformers engine is put to."""

from __future__ import annotations

import pytest

from tests.contract.test_engine_surface import *  # noqa: F403
from tests.contract.test_engine_surface import Surface

del test_a_restart_serves_a_saved_model_and_requests_wait_for_it  # noqa: F821 - in test_life.py, once and for good


class PatientSurface(Surface):
    def post(self, route, timeout=300, **body):
        return super().post(route, timeout, **body)


@pytest.fixture(scope="module")
def surface(served):
    return PatientSurface(served.url, served.folder, str(served.folder))
