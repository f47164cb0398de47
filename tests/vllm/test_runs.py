"""Whole runs with vLLM as the engine: the same test that the ways of the weights are put to with transformers."""

from __future__ import annotations

import os

import pytest

from tests.e2e import test_sync_modes as sync_modes

# A start of vLLM takes half a minute on two cores, and with adapters it is slow there. What the other modes ask of it
# (adapters, reload, restart) is tested by itself; TREADLE_EVERY_MODE=1 runs them all.
MODES = tuple(sync_modes.MODES) if os.environ.get("TREADLE_EVERY_MODE") else ("one copy",)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_with_vllm_publishes_proved_weights_and_ends_at_the_last_version(tiny_model, tmp_path, mode):
    sync_modes.test_a_run_publishes_proved_weights_and_ends_at_the_last_version(tiny_model, tmp_path, mode)
