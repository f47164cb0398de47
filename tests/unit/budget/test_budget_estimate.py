"""The memory of each component, with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treadle.budget.estimate import ENGINE_GPU, HOST, TRAINER_GPU, estimate, kv_bytes_per_token, optimizer_bytes
from treadle.budget.hardware import CARDS, Machine, card_bytes
from treadle.budget.job import Budget, Component, MemoryPool, PlannedJob
from treadle.budget.shapes import find_shape
from treadle.errors import ConfigError

LLAMA_8B = find_shape("Llama-3.1-8B")
NUM_8B = 8_030_261_248
H100 = Machine("h100", card_bytes("h100"), None)


def pool_of(budget: Budget, name: str) -> MemoryPool:
    return next(pool for pool in budget.pools if pool.name == name)


def trainer_gpu(job: PlannedJob, machine: Machine = H100) -> MemoryPool:
    return pool_of(estimate(job, machine), TRAINER_GPU)


def test_a_full_fine_tune_takes_18_bytes_a_parameter() -> None:
    place = trainer_gpu(PlannedJob(LLAMA_8B))
    assert place.find("weights") == 2 * NUM_8B
    assert place.find("gradients") == 4 * NUM_8B
    assert place.find("masters") == 4 * NUM_8B
    assert place.find("optimizer moments") == 8 * NUM_8B
    assert place.find("KV cache") == 64 * 2048 * 131_072  # 2 x 32 layers x 8 heads x 128 x 2 bytes a token


@pytest.mark.parametrize(
    ("optimizer", "masters", "moments"),
    [("adamw", 4, 8), ("adamw_8bit", 0, 2.03), ("adafactor", 4, 0.01), ("adamw_cpu", 4, 8)],
)
def test_bytes_of_each_optimizer(optimizer, masters: float, moments: float) -> None:
    assert optimizer_bytes(PlannedJob(LLAMA_8B, optimizer=optimizer)) == pytest.approx(
        (masters * NUM_8B, moments * NUM_8B)
    )


def test_muon_keeps_one_momentum_for_matrices_and_two_moments_for_the_rest() -> None:
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    rest = NUM_8B - matrices
    assert optimizer_bytes(PlannedJob(LLAMA_8B, optimizer="muon")) == (4 * NUM_8B, 4 * matrices + 8 * rest)


def test_adamw_cpu_moves_states_and_gradients_to_the_host() -> None:
    budget = estimate(PlannedJob(LLAMA_8B, optimizer="adamw_cpu"), H100)
    gpu, host = pool_of(budget, TRAINER_GPU), pool_of(budget, HOST)
    assert {"gradients", "masters", "optimizer moments"}.isdisjoint(part.name for part in gpu.components)
    assert host.find("gradients") + host.find("masters and moments") == 16 * NUM_8B


def test_one_copy_is_shared_and_every_other_mode_has_two() -> None:
    one = trainer_gpu(PlannedJob(LLAMA_8B, mode="single-copy"))
    two = trainer_gpu(PlannedJob(LLAMA_8B))
    none = trainer_gpu(PlannedJob(LLAMA_8B, mode="none"))
    assert one.find("engine's weights") == 0
    assert two.find("engine's weights") == none.find("engine's weights") == 2 * NUM_8B
    assert two.peak - one.peak == 2 * NUM_8B


@pytest.mark.parametrize(
    ("model", "settings", "largest_micro", "measured"),
    [
        ("Qwen3-1.7B", {}, 13_699, 60.35e9),
        ("Qwen3-4B", {"optimizer": "adamw_8bit", "is_checkpointed": True}, 13_699, 37.78e9),
        ("Qwen3-8B", {"mode": "lora", "lora": True}, 8100, 50.31e9),
    ],
)
def test_the_trainers_tensors_are_predicted_as_an_h200_had_them(
    model: str, settings, largest_micro: int, measured: float
) -> None:
    """Measured with bench/memory.py: 64 sequences, prompts of 256 and completions of 599 tokens in the mean."""
    job = PlannedJob(
        find_shape(model), engine_gpus=1, micro_tokens=largest_micro, prompt_tokens=256, completion_tokens=599,
        shares_prompts=False, **settings,
    )  # fmt: skip
    machine = Machine("h200", card_bytes("h200"), None)
    assert trainer_gpu(job, machine).trainer_tensors == pytest.approx(measured, rel=0.05)


def test_adapters_take_20_bytes_each_and_leave_the_model_alone() -> None:
    job = PlannedJob(LLAMA_8B, mode="lora", lora=True, lora_r=16)
    num_adapters = 32 * 16 * ((4096 + 4096) + (4096 + 1024))
    assert job.num_trained == num_adapters == 6_815_744
    place = trainer_gpu(job)
    parts = ("adapters", "gradients", "masters", "optimizer moments")
    assert sum(place.find(name) for name in parts) == 20 * num_adapters
    assert place.find("weights") == place.find("engine's weights") == 2 * NUM_8B


@pytest.mark.parametrize(("rank", "num_places"), [(16, 16), (24, 8), (64, 4)])
def test_vllm_reserves_adapter_slots_on_every_linear_layer(rank, num_places) -> None:
    job = PlannedJob(LLAMA_8B, mode="lora", lora=True, lora_r=rank, gpu_memory_utilization=0.5)
    widths = (4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 14_336) * 3
    place, without = trainer_gpu(job), trainer_gpu(replace(job, mode="two-copies", lora=False))
    assert place.find("places for adapters") == num_places * 32 * {16: 16, 24: 32, 64: 64}[rank] * widths * 2
    assert place.find("KV cache") == without.find("KV cache") - place.find("places for adapters")


@pytest.mark.parametrize(("rank", "num_kept"), [(16, 32), (24, 16), (64, 8)])
def test_vllm_keeps_the_newest_adapters_in_host_memory(rank, num_kept) -> None:
    job = PlannedJob(LLAMA_8B, mode="lora", lora=True, lora_r=rank, gpu_memory_utilization=0.5)
    assert pool_of(estimate(job, H100), HOST).find("adapters") == num_kept * job.num_trained * 2


@pytest.mark.parametrize(
    ("optimizer", "gradient_bytes", "scratch"),
    [
        ("adamw", 4, 0),
        ("adamw", 2, 256 * 2**20 + 4 * 128_256 * 4096),  # an fp32 piece of the bf16 gradients
        ("adamw_8bit", 2, 12 * 4 * 2**24),
        ("adafactor", 4, 4 * 128_256 * 4096),
    ],
)
def test_scratch_of_a_step_exists_only_then(optimizer, gradient_bytes: int, scratch: int) -> None:
    place = trainer_gpu(PlannedJob(LLAMA_8B, optimizer=optimizer, gradient_bytes=gradient_bytes))
    assert place.find("optimizer scratch") == scratch
    assert place.peak_moment != "step"  # activations of 16,384 tokens are far more


def test_some_layers_only() -> None:
    place = trainer_gpu(PlannedJob(LLAMA_8B, train_layers=(30, 31)))
    assert place.find("gradients") == 4 * 2 * LLAMA_8B.num_layer_params
    assert place.find("output layer's gradient") == 0


def test_ranks_share_weights_gradients_and_optimizer_and_nothing_else() -> None:
    one = trainer_gpu(PlannedJob(LLAMA_8B, engine_gpus=1))
    four = trainer_gpu(PlannedJob(LLAMA_8B, engine_gpus=1, train_gpus=4))
    for name in ("weights", "gradients", "masters", "optimizer moments"):
        assert four.find(name) == one.find(name) / 4
    for name in ("activations", "backward of a layer", "logits"):
        assert four.find(name) == one.find(name) > 0
    # 32 layers of 218 M parameters; embeddings, output layer and last norm of 1.05 B.
    assert LLAMA_8B.num_layer_params == 218_112_000
    assert four.find("whole layers") == 2 * 2 * 218_112_000
    assert four.find("whole embeddings") == 2 * (2 * 128_256 * 4096 + 4096)
    assert four.find("a layer's gradients") == (2 + 4) * 218_112_000
    assert four.find("embeddings' gradients") == (2 + 4) * (2 * 128_256 * 4096 + 4096)


def test_the_sum_of_the_embeddings_gradients_is_a_moment_of_its_own() -> None:
    """After the backward pass: activations are gone, and embeddings and output layer are whole with their gradients."""
    job = PlannedJob(LLAMA_8B, engine_gpus=1, train_gpus=4, is_checkpointed=True, micro_tokens=2048)
    pool = trainer_gpu(job)
    assert pool.peak_moment == "reduce"
    kept = pool.find("weights") + pool.find("gradients") + pool.find("masters") + pool.find("optimizer moments")
    assert kept == 18 * NUM_8B / 4
    outer = 2 * 128_256 * 4096 + 4096
    beside = pool.find("CUDA context") + pool.find("fragmentation")
    assert pool.peak - beside == kept + (2 + 2 + 4) * outer


def test_zero2_keeps_all_weights_whole_from_forward_to_backward() -> None:
    pool = trainer_gpu(PlannedJob(LLAMA_8B, engine_gpus=1, train_gpus=4, shard="zero2"))
    assert pool.find("whole weights") == 2 * NUM_8B
    assert pool.find("weights") == 2 * NUM_8B / 4
    assert pool.find("whole layers") == 0


def test_replicas_share_less() -> None:
    pool = trainer_gpu(PlannedJob(LLAMA_8B, engine_gpus=1, train_gpus=8, replicas=2))
    assert pool.find("masters") == 4 * NUM_8B / 4


def test_offloaded_weights_leave_the_card_what_computes() -> None:
    job = PlannedJob(LLAMA_8B, engine_gpus=1, train_gpus=4, offloads_weights=True, optimizer="adamw_cpu")
    budget = estimate(job, H100)
    gpu, host = pool_of(budget, TRAINER_GPU), pool_of(budget, HOST)
    for name in ("weights", "gradients", "masters", "optimizer moments"):
        assert gpu.find(name) == 0
    assert gpu.find("whole layers") > 0
    assert host.find("weights") == host.find("new gradients") == 2 * NUM_8B
    assert host.find("gradients") + host.find("masters and moments") == 16 * NUM_8B  # of all ranks together
    assert host.find("checkpoint") == 4 * 128_256 * 4096


def test_muon_puts_one_matrix_together_while_it_steps() -> None:
    pool = trainer_gpu(PlannedJob(LLAMA_8B, engine_gpus=1, train_gpus=4, optimizer="muon"))
    assert pool.find("whole matrix") == 2 * 4096 * 14_336


def test_the_ranks_of_lora_share_the_frozen_model() -> None:
    pool = trainer_gpu(PlannedJob(LLAMA_8B, mode="lora", lora=True, engine_gpus=1, train_gpus=2))
    assert pool.find("weights") == NUM_8B
    assert pool.find("adapters") == 4 * 6_815_744 / 2
    assert pool.find("a layer's gradients") == pool.find("embeddings' gradients") == 0


def test_a_publish_needs_a_whole_weight_and_a_bucket() -> None:
    budget = estimate(PlannedJob(LLAMA_8B, engine_gpus=1, train_gpus=2), H100)
    assert pool_of(budget, TRAINER_GPU).find("publishing") == 2 * 128_256 * 4096 + 256 * 2**20
    assert pool_of(budget, ENGINE_GPU).find("publishing") == 256 * 2**20


def test_engine_gpus_of_their_own_take_the_engine_away_from_the_trainer() -> None:
    budget = estimate(PlannedJob(LLAMA_8B, mode="lora", weight_mode="lora_only", lora=True, engine_gpus=2), H100)
    assert pool_of(budget, TRAINER_GPU).find("KV cache") == 0
    engine = pool_of(budget, ENGINE_GPU)
    assert engine.find("engine's weights") == NUM_8B
    assert engine.verdict == "fits"


def test_kv_heads_are_not_divided_below_one() -> None:
    job = PlannedJob(LLAMA_8B, engine_gpus=16)  # 8 KV heads
    assert kv_bytes_per_token(job) == 2 * 32 * 1 * 128 * 2


def test_the_engines_share_of_a_gpu_includes_its_weights() -> None:
    job = PlannedJob(LLAMA_8B, gpu_memory_utilization=0.5)
    place = trainer_gpu(job)
    engine = place.find("weights") + place.find("KV cache") + place.find("engine's workspace") + 550_000_000
    assert engine == pytest.approx(card_bytes("h100") / 2, abs=2)
    starved = trainer_gpu(replace(job, gpu_memory_utilization=0.1))
    assert starved.find("KV cache") == 2048 * 131_072  # never less than one sequence


def test_a_reference_is_a_copy_unless_offloaded_or_with_lora() -> None:
    whole = PlannedJob(LLAMA_8B, has_reference=True)
    assert trainer_gpu(whole).find("reference") == 2 * NUM_8B
    offloaded = estimate(replace(whole, is_reference_offloaded=True), H100)
    assert pool_of(offloaded, TRAINER_GPU).find("reference") < 0.2 * 2 * NUM_8B
    assert pool_of(offloaded, HOST).find("reference") == 2 * NUM_8B
    assert trainer_gpu(replace(whole, lora=True, mode="lora")).find("reference") == 0


def test_the_peak_is_one_moment_not_the_sum_of_all() -> None:
    gigabyte = 10**9
    parts = (
        Component("always", 5 * gigabyte, "trainer"),
        Component("logits", 3 * gigabyte, "trainer", moments=("loss",)),
        Component("layer", 4 * gigabyte, "trainer", moments=("backward",)),
    )
    place = MemoryPool("trainer GPU", 10 * gigabyte, parts)
    assert (place.peak, place.peak_moment, place.verdict) == (9 * gigabyte, "backward", "fits")
    assert replace(place, capacity=9_300_000_000).verdict == "tight"
    assert replace(place, capacity=8 * gigabyte).verdict == "does not fit"


def test_the_trainers_own_tensors_leave_out_contexts_gaps_and_the_engine() -> None:
    place = trainer_gpu(PlannedJob(LLAMA_8B))
    others = ("engine's weights", "KV cache", "engine's workspace", "CUDA context", "fragmentation")
    assert place.trainer_tensors == place.peak - sum(place.find(name) for name in others)


def test_the_default_job_on_a_cpu_is_predicted_within_15_per_cent() -> None:
    job = PlannedJob(
        find_shape("smollm2-135m-instruct"), mode="single-copy", micro_tokens=1024, prompt_tokens=48,
        completion_tokens=16, max_num_seqs=128, logprob_chunk=2048, is_compiled=False, has_block_attention=True,
    )  # fmt: skip
    place = pool_of(estimate(job, Machine("cpu", None, 24 * 10**9)), HOST)
    assert place.peak == pytest.approx(4.76e9, rel=0.15)  # measured: 4.66 to 4.86 GB
    assert place.find("weights") == 2 * 134_515_008
    assert place.verdict == "fits"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "single-copy", "train_gpus": 2}, "the same, single GPU"),
        ({"mode": "single-copy", "engine_gpus": 1}, "the same, single GPU"),
        ({"lora": True}, "do not go together"),
        ({"mode": "lora", "weight_mode": "lora_only", "lora": True, "engine_gpus": 3}, "cannot be divided among 3"),
        ({"train_gpus": 2}, "need GPUs of their own"),
        ({"train_gpus": 3, "engine_gpus": 1, "replicas": 2}, "cannot be divided into 2 replicas"),
        ({"train_layers": (32,)}, "layers from 0 to 31"),
        ({"mode": "lora", "lora": True, "lora_targets": ("qkv",)}, "no linear layer 'qkv'"),
        ({"gpu_memory_utilization": 90.0}, "no share of a GPU"),
        ({"train_gpus": 0}, "at least one trainer GPU"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(changes, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        replace(PlannedJob(LLAMA_8B), **changes)
    assert caught.value.fix


def test_cards_are_found_by_name() -> None:
    assert card_bytes("RTX 4090") == card_bytes("NVIDIA GeForce RTX 4090") == CARDS["rtx4090"]
    assert card_bytes("H100 80GB") == card_bytes("NVIDIA H100 80GB HBM3") == CARDS["h100"]
    assert card_bytes("A100 40GB") == CARDS["a100-40gb"]
    assert card_bytes("NVIDIA A100-SXM4-80GB") == CARDS["a100-80gb"]
    assert card_bytes("L4 24GB") == CARDS["l4"]
    with pytest.raises(ConfigError, match="'H100 40GB' is not known") as caught:
        card_bytes("H100 40GB")
    assert caught.value.fix == "known are h100, h100-nvl; or give --gpu-memory-gb 40"
    with pytest.raises(ConfigError) as caught:
        card_bytes("h10")
    assert "did you mean 'h100'?" in caught.value.fix
