"""Other architectures than Llama in engine and trainer: logprobs agree with the model's own code."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    Lfm2Config,
    MiniMaxConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig, TrainConfig
from treadle.engines.model_runner import ModelRunner, Request
from treadle.engines.sampling import SamplingParams
from treadle.errors import ModelError
from treadle.train.pack import pack
from treadle.train.policy import load_policy, share_policy
from treadle.wire.groups import ScoredGroup

SMALL = {
    "vocab_size": 90, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32, "rope_theta": 5e5}  # fmt: skip


def write_model(folder, config):
    write_tiny_model(folder)  # for its tokenizer
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Qwen2Config(**SMALL, tie_word_embeddings=False), id="qwen2, biases, untied"),
        pytest.param(Qwen3Config(**SMALL, tie_word_embeddings=True), id="qwen3, q and k norms, tied"),
        pytest.param(MistralConfig(**SMALL, sliding_window=None), id="mistral"),
        pytest.param(Qwen3Config(**SMALL, rope_parameters=ROPE), id="scaled rotary positions"),
    ],
)
def test_engine_and_trainer_agree_with_the_models_own_code(config, tmp_path):
    folder = write_model(tmp_path / "model", config)
    engine_config = EngineConfig(dtype="float32", threads=1, weights_file=tmp_path / "weights")
    engine = ModelRunner(engine_config, folder)
    prompt = [5, 6, 7, 8, 9]
    sequences = engine.admit([Request(prompt, 3, 20, SamplingParams(), 1, [], set())])[0]
    while any(s.finish_reason is None for s in sequences):
        engine.step()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for s in sequences:
        with torch.no_grad():
            table = torch.log_softmax(plain(torch.tensor([prompt + s.token_ids])).logits[0], -1)
        expected += [table[len(prompt) + t - 1, token] for t, token in enumerate(s.token_ids)]
    sampled = torch.tensor([logprob for s in sequences for logprob in s.logprobs])
    torch.testing.assert_close(sampled, torch.stack(expected), atol=3e-5, rtol=0)
    group = ScoredGroup(
        tokens=[prompt + s.token_ids for s in sequences],
        masks=[[-100] * len(prompt) + s.token_ids for s in sequences],
        scores=[0.0, 1.0, 2.5],
        inference_logprobs=[[1.0] * len(prompt) + s.logprobs for s in sequences],
    )
    training = TrainConfig(dtype="float32", device="cpu", micro_tokens=1000)
    (micro,) = pack([group], training).micros
    for policy in (load_policy(folder, training), share_policy(engine.layout, training)):  # own weights; the engine's
        torch.testing.assert_close(policy.score(micro)[0].detach(), sampled, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GraniteConfig(**SMALL, logits_scaling=8.0), id="granite: scaled logits"),
        pytest.param(CohereConfig(**SMALL, logit_scale=0.0625), id="cohere: scaled logits"),
        pytest.param(Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), id="lfm2: convolutions"),
        pytest.param(MiniMaxConfig(**SMALL), id="minimax: linear attention"),
    ],
)
def test_the_trainer_refuses_a_model_that_packing_would_compute_wrongly(config, tmp_path):
    folder = write_model(tmp_path / "model", config)
    with pytest.raises(ModelError, match=r"differ by|mixes neighbouring tokens"):
        load_policy(folder, TrainConfig(dtype="float32", device="cpu"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param(Gemma2Config(**SMALL), "sliding-window", id="gemma 2: windows and soft caps"),
        pytest.param(GraniteConfig(**SMALL, logits_scaling=8.0), "other logits", id="granite: scaled logits"),
        pytest.param(MistralConfig(**SMALL, sliding_window=16), "sliding-window", id="mistral with a window"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(config, words, tmp_path):
    folder = write_model(tmp_path / "model", config)
    with pytest.raises(ModelError, match=words):
        ModelRunner(EngineConfig(dtype="float32", threads=1), folder)
