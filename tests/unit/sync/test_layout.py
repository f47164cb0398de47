"""Layouts; Hugging Face parameters in vLLM's, with shapes of real architectures at a tenth of their size."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from treadle.errors import SyncError
from treadle.sync.layout import ALIGNMENT, Layout, map_fused, place_slices, plan_layout


def test_parameters_are_aligned_and_do_not_overlap():
    shapes = [("a", (3,)), ("b", (7, 5)), ("c", (64, 2)), ("d", ())]
    layout = plan_layout("file", "model", "float32", shapes)
    ends = 0
    for placement in layout.parameters:
        assert placement.offset % ALIGNMENT == 0
        assert placement.offset >= ends
        ends = placement.offset + math.prod(placement.shape) * 4
    assert layout.num_bytes >= ends
    assert [p.name for p in layout.parameters] == ["a", "b", "c", "d"]


def test_an_engine_that_does_not_say_its_version_is_understood():
    described = msgspec.to_builtins(plan_layout("file", "model", "float32", [("a", (3,))]))
    silent = {key: value for key, value in described.items() if key not in ("policy_version", "is_held")}
    layout = msgspec.json.decode(msgspec.json.encode(silent), type=Layout)
    assert (layout.policy_version, layout.is_held) == (None, False)


PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MIDDLE, VOCAB = 32, 4, 2, 8, 48, 100
PADDED_VOCAB = 128
SIZES = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
}


def wanted_of(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def served_shapes(*, tied=True, bias=False, qk_norm=False, wrap=""):
    """vLLM's parameters for the same sizes."""
    shapes = {"model.embed_tokens.weight": (PADDED_VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(2):
        layer = f"model.layers.{i}"
        qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        shapes |= {
            f"{layer}.self_attn.qkv_proj{wrap}.weight": (qkv, HIDDEN),
            f"{layer}.self_attn.o_proj{wrap}.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_up_proj{wrap}.weight": (2 * MIDDLE, HIDDEN),
            f"{layer}.mlp.down_proj{wrap}.weight": (HIDDEN, MIDDLE),
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        }
        if bias:
            shapes[f"{layer}.self_attn.qkv_proj{wrap}.bias"] = (qkv,)
        if qk_norm:
            shapes |= {f"{layer}.self_attn.{n}.weight": (HEAD_DIM,) for n in ("q_norm", "k_norm")}
    if not tied:
        shapes["lm_head.weight"] = (PADDED_VOCAB, HIDDEN)
    return shapes


LLAMA = LlamaConfig(**SIZES, tie_word_embeddings=True)
QWEN2 = Qwen2Config(**SIZES, tie_word_embeddings=False)
QWEN3 = Qwen3Config(**SIZES, head_dim=HEAD_DIM, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("config", "served"),
    [
        (LLAMA, served_shapes()),
        (QWEN2, served_shapes(tied=False, bias=True)),
        (QWEN3, served_shapes(qk_norm=True)),
        (LLAMA, served_shapes(wrap=".base_layer")),
    ],
    ids=["llama tied", "qwen2 untied with biases", "qwen3 with norms of q and k", "llama wrapped for adapters"],
)
def test_every_parameter_is_found_once_and_the_stacks_are_filled(config, served):
    wanted = wanted_of(config)
    slices = map_fused(wanted, served, PACKED, vocab_size=VOCAB)
    assert [s.name for s in slices] == list(wanted)
    rows_of = {}
    for s in slices:
        rows_of.setdefault(s.source, []).append((s.first_row, s.first_row + s.shape[0]))
    assert set(rows_of) == set(served)
    for source, runs in rows_of.items():
        runs.sort()
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(runs)), source
        filled = VOCAB if served[source][0] == PADDED_VOCAB else served[source][0]
        assert (runs[0][0], runs[-1][1]) == (0, filled), source


def test_grouped_query_attention_stacks_the_smaller_k_and_v_below_q():
    slices = {
        s.name: s for s in map_fused(wanted_of(QWEN2), served_shapes(tied=False, bias=True), PACKED, vocab_size=VOCAB)
    }
    q, k, v = (slices[f"model.layers.1.self_attn.{p}_proj.bias"] for p in "qkv")
    assert [s.source for s in (q, k, v)] == ["model.layers.1.self_attn.qkv_proj.bias"] * 3
    assert [s.first_row for s in (q, k, v)] == [0, HEADS * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM]


def test_offsets_in_the_file_point_at_the_rows():
    served = served_shapes()
    fused = plan_layout("w", "m", "bfloat16", served.items())
    layout = place_slices(fused, map_fused(wanted_of(LLAMA), served, PACKED, vocab_size=VOCAB))
    start = next(p.offset for p in fused.parameters if p.name == "model.layers.0.mlp.gate_up_proj.weight")
    up = next(p for p in layout.parameters if p.name == "model.layers.0.mlp.up_proj.weight")
    assert up.offset == start + MIDDLE * HIDDEN * 2
    assert layout.num_bytes == fused.num_bytes


def refusal(wanted, served):
    with pytest.raises(SyncError) as caught:
        map_fused(wanted, served, PACKED, vocab_size=VOCAB)
    assert caught.value.fix
    return caught.value.message


def test_experts_are_refused_by_name():
    config = MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1, tie_word_embeddings=True)
    served = served_shapes()
    for i in range(2):
        for mlp in ("gate_up_proj", "down_proj"):
            del served[f"model.layers.{i}.mlp.{mlp}.weight"]
        served[f"model.layers.{i}.mlp.experts.w13_weight"] = (2, 2 * MIDDLE, HIDDEN)
    assert "mlp.gate.weight" in refusal(wanted_of(config), served)


def test_the_experts_of_qwen3_moe_are_refused_by_name():
    """Its router has the same name on both sides; the experts, which each side stacks under another name, have not."""
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**SIZES, **moe, head_dim=HEAD_DIM, tie_word_embeddings=True)
    served = served_shapes(qk_norm=True)
    for i in range(2):
        for mlp in ("gate_up_proj", "down_proj"):
            del served[f"model.layers.{i}.mlp.{mlp}.weight"]
        served[f"model.layers.{i}.mlp.gate.weight"] = (4, HIDDEN)
        served[f"model.layers.{i}.mlp.experts.w13_weight"] = (4, 2 * 16, HIDDEN)
        served[f"model.layers.{i}.mlp.experts.w2_weight"] = (4, HIDDEN, 16)
    assert "model.layers.0.mlp.experts.gate_up_proj" in refusal(wanted_of(config), served)


def test_a_model_split_over_gpus_is_refused_by_name():
    served = served_shapes()
    served["model.layers.0.self_attn.qkv_proj.weight"] = ((HEADS + 2 * KV_HEADS) * HEAD_DIM // 2, HIDDEN)
    assert "model.layers.0.self_attn.q_proj.weight has the shape" in refusal(wanted_of(LLAMA), served)


def test_quantised_weights_are_refused_by_name():
    served = served_shapes()
    served["model.layers.0.mlp.down_proj.qweight"] = served.pop("model.layers.0.mlp.down_proj.weight")
    assert "model.layers.0.mlp.down_proj.weight" in refusal(wanted_of(LLAMA), served)
    scaled = served_shapes() | {"model.layers.0.mlp.down_proj.weight_scale": (1,)}
    assert "model.layers.0.mlp.down_proj.weight_scale" in refusal(wanted_of(LLAMA), scaled)


def test_weights_that_vllm_packed_away_are_refused_by_name():
    served = served_shapes() | {"model.layers.1.self_attn.o_proj.weight": (0,)}
    assert "model.layers.1.self_attn.o_proj.weight has the shape" in refusal(wanted_of(LLAMA), served)


def test_an_output_layer_of_its_own_on_one_side_only_is_refused():
    assert "lm_head.weight" in refusal(wanted_of(LLAMA), served_shapes(tied=False))
    untied = LlamaConfig(**SIZES, tie_word_embeddings=False)
    assert "lm_head.weight" in refusal(wanted_of(untied), served_shapes())


def test_only_a_vocabulary_may_be_padded():
    served = served_shapes() | {"model.layers.0.mlp.down_proj.weight": (64, MIDDLE)}
    assert "model.layers.0.mlp.down_proj.weight" in refusal(wanted_of(LLAMA), served)
    served = served_shapes() | {"model.embed_tokens.weight": (PADDED_VOCAB + 1, HIDDEN)}
    assert "model.embed_tokens.weight" in refusal(wanted_of(LLAMA), served)
