"""Other models on real vLLM: what a trainer sees of each weight, and what both compute with it, compiled too."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from tests.tiny_model import write_tiny_model
from tests.vllm.conftest import SAME, Served
from tests.vllm.reference import load, mean_difference
from treadle.config import EngineConfig
from treadle.engines.port import Request
from treadle.engines.sampling import SamplingParams
from treadle.sync.saved_weights import refuse_misplaced
from treadle.sync.weights_file import map_weights

SIZES = {
    "vocab_size": 82, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 1,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
PROMPT = [20, 21, 22, 23, 30, 31, 32] * 5


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        pytest.param(Qwen2Config(**SIZES, tie_word_embeddings=False), "", id="biases and an output of its own"),
        pytest.param(
            Qwen3Config(**SIZES, head_dim=64, tie_word_embeddings=True, rope_parameters=ROPE),
            "-O1",
            id="norms of queries and keys, scaled positions, compiled",
        ),
    ],
)
def test_a_trainers_views_are_the_weights_of_the_files_and_logprobs_agree(tmp_path, config, flags):
    folder = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=1)  # for its tokenizer
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # they begin as zeros and ones, which tell nothing
    model.save_pretrained(folder)
    settings = {"dtype": "float32", "weights_file": tmp_path / "weights", "max_model_len": 256, "vllm_args": flags}
    served = Served(EngineConfig(engine="vllm", model=str(folder), **settings))
    try:
        views = map_weights(served(served.engine.layout()))
        assert refuse_misplaced(views.items(), folder) == len(dict(model.named_parameters()))
        asked = Request(PROMPT, 2, 24, SamplingParams(), 0, ignore_eos=True)
        generation = served(served.engine.generate(asked), timeout_s=300)
        assert mean_difference(load(folder), PROMPT, generation.completions) < SAME
    finally:
        served.close()
