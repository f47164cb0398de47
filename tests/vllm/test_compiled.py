"""Compare shared weights and logprobs of a compiled model with the saved ones. Other model families, not compiled:
test_restart.py."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import SAME, Served
from tests.vllm.reference import load, mean_difference
from treadle.config import EngineConfig
from treadle.engines.interface import Request
from treadle.engines.sampling import SamplingParams
from treadle.sync.shared_memory import map_weights
from treadle.sync.verify import check_saved_weights

PROMPT = [20, 21, 22, 23, 30, 31, 32] * 5


@pytest.mark.full  # it compiles for minutes; on a CPU the engine compiles only on request
def test_shared_weights_equal_the_saved_ones_and_logprobs_agree(tmp_path, qwen3_model):
    settings = {"dtype": "float32", "weights_file": tmp_path / "weights", "max_model_len": 256, "vllm_args": "-O1"}
    served = Served(EngineConfig(engine="vllm", model=str(qwen3_model), **settings))
    try:
        views = map_weights(served(served.engine.layout()))
        assert check_saved_weights(views.items(), qwen3_model) == len(dict(load(qwen3_model).named_parameters()))
        asked = Request(PROMPT, 2, 24, SamplingParams(), 0, ignore_eos=True)
        generation = served(served.engine.generate(asked), timeout_s=300)
        assert mean_difference(load(qwen3_model), PROMPT, generation.completions) < SAME
    finally:
        served.close()
