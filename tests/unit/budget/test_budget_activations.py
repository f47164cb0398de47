"""What a layer keeps for the backward pass, against the tensors that torch really saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from treadle.budget.activations import backward_bytes, kept_bytes, kept_per_layer, logits_bytes
from treadle.budget.job import PlannedJob
from treadle.budget.shapes import ModelShape

NUM_TOKENS = 256
WIDTHS = {"hidden_size": 200, "intermediate_size": 600, "num_attention_heads": 8, "num_key_value_heads": 2}


def a_shape(kind: str) -> ModelShape:
    return ModelShape(kind, 1, 200, 600, 8, 2, 32, 128, has_qk_norm=kind == "qwen3")


def saved_bytes_per_token(kind: str, *, is_compiled: bool, targets: tuple[str, ...] = ()) -> float:
    """Bytes of the distinct tensors that one layer's forward saves, without weights and rotary tables."""
    config = AutoConfig.for_model(kind, **WIDTHS, head_dim=32, num_hidden_layers=1, vocab_size=128)
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if targets:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules=list(targets))).get_base_model()
    hidden = torch.randn(1, NUM_TOKENS, 200, dtype=torch.bfloat16, requires_grad=True) * 1.0
    positions = torch.arange(NUM_TOKENS)[None]
    rotary = model.model.rotary_emb(hidden, positions)
    not_counted = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *rotary)}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_counted:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    layer = model.model.layers[0]
    arguments = {"position_embeddings": rotary, "attention_mask": None, "position_ids": positions}
    if is_compiled:
        # The partitioner that decides what to save is torch.compile's own; only the code it would generate is left out.
        out = torch.compile(layer, backend="aot_eager_decomp_partition", dynamic=False)(hidden, **arguments)
        for tensor in out.grad_fn.saved_tensors:
            note(tensor)
    else:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            layer(hidden, **arguments)
    return sum(saved.values()) / NUM_TOKENS


@pytest.mark.parametrize(("kind", "is_compiled"), [("llama", False), ("qwen3", False), ("qwen3", True)])
def test_the_count_is_what_torch_saves(kind: str, is_compiled: bool) -> None:
    counted = sum(kept_per_layer(PlannedJob(a_shape(kind), is_compiled=is_compiled, shares_prompts=False)).values())
    assert counted == pytest.approx(saved_bytes_per_token(kind, is_compiled=is_compiled), rel=0.01)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_count_with_adapters_is_what_torch_saves(is_compiled: bool) -> None:
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")
    job = PlannedJob(
        a_shape("llama"), is_compiled=is_compiled, shares_prompts=False, lora=True, mode="lora", lora_targets=targets
    )
    measured = saved_bytes_per_token("llama", is_compiled=is_compiled, targets=targets)
    assert sum(kept_per_layer(job).values()) == pytest.approx(measured, rel=0.01)


def test_compiling_and_liger_keep_less() -> None:
    eager = PlannedJob(a_shape("qwen3"), is_compiled=False)
    kept = [kept_bytes(job) for job in (eager, replace(eager, has_liger=True), replace(eager, is_compiled=True))]
    assert kept[0] > 1.4 * kept[1]
    assert kept[1] == kept[2]


def test_checkpointing_keeps_one_tensor_a_layer_and_recomputes_one_layer() -> None:
    whole = PlannedJob(
        replace(a_shape("llama"), num_layers=10), micro_tokens=100, prompt_tokens=20, completion_tokens=30
    )
    checkpointed = replace(whole, is_checkpointed=True)
    last_norm = 100 * 200 * 8
    assert kept_bytes(checkpointed) == 100 * 10 * 200 * 2 + last_norm
    layer = (kept_bytes(whole) - last_norm) / 10
    assert backward_bytes(checkpointed) - backward_bytes(whole) == pytest.approx(layer)


def test_layers_below_the_first_trained_one_keep_nothing() -> None:
    shape = replace(a_shape("llama"), num_layers=10)
    some, all_of_them = PlannedJob(shape, train_layers=(8, 9)), PlannedJob(shape)
    assert kept_bytes(some) < 0.25 * kept_bytes(all_of_them)


def test_dense_blocks_keep_every_probability() -> None:
    fused = PlannedJob(a_shape("llama"), prompt_tokens=40, completion_tokens=24)
    parts = kept_per_layer(replace(fused, has_block_attention=True))
    assert parts["attention weights"] == 4 * 8 * 64
    assert kept_per_layer(fused)["attention weights"] == 4 * 8


def test_logits_are_made_for_completions_only_and_in_chunks() -> None:
    job = PlannedJob(a_shape("llama"), micro_tokens=1000, prompt_tokens=80, completion_tokens=90, group_size=8)
    assert job.loss_tokens == 900  # ten prompt tokens for every completion, because a group shares its prompt
    assert replace(job, shares_prompts=False).loss_tokens == round(1000 * 90 / 170)
    assert logits_bytes(job) == 900 * (128 * 10 + 8 * 200)  # a vocabulary smaller than the chunk


def test_a_micro_holds_at_least_one_whole_rollout() -> None:
    job = PlannedJob(a_shape("llama"), micro_tokens=4096, prompt_tokens=512, completion_tokens=1024)
    long = replace(job, completion_tokens=8192)
    assert (job.tokens_at_once, long.tokens_at_once) == (4096, 8704)
    assert kept_bytes(long) == kept_bytes(replace(long, micro_tokens=8704)) > 2 * kept_bytes(job)
    assert backward_bytes(long) == backward_bytes(job) * 8704 / 4096
    assert long.loss_tokens == 8192  # it is alone: no other completion shares its prompt


def test_as_many_completions_share_a_prompt_as_a_micro_has_room_for() -> None:
    group = PlannedJob(a_shape("llama"), prompt_tokens=80, completion_tokens=90, group_size=8)
    assert replace(group, micro_tokens=800).tokens_per_completion == 80 / 8 + 90
    assert replace(group, micro_tokens=400).tokens_per_completion == 80 / 3 + 90
    assert replace(group, micro_tokens=100).tokens_per_completion == 80 + 90


def test_a_shared_prompt_has_its_keys_gathered_for_every_completion() -> None:
    job = PlannedJob(a_shape("llama"), prompt_tokens=80, completion_tokens=90, group_size=8)
    apart, shared = (kept_per_layer(replace(job, shares_prompts=shared)) for shared in (False, True))
    assert apart["query, key, value"] == 2 * (256 + 2 * 64)
    assert shared["query, key, value"] == 2 * (256 + 2 * 64 * 170 / 100)
