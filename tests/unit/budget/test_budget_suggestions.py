"""Jobs people ask about: the verdict, and the exact flags that make each fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treadle.budget.estimate import ENGINE_GPU, TRAINER_GPU, estimate
from treadle.budget.hardware import Machine, card_bytes
from treadle.budget.job import Budget, MemoryPool, PlannedJob
from treadle.budget.shapes import find_shape
from treadle.budget.suggestions import largest_micro_tokens, layout_flags, suggest

H100 = Machine("h100", card_bytes("h100"), None)
A100 = Machine("a100-80gb", card_bytes("a100-80gb"), None)
LLAMA_8B, QWEN_72B = find_shape("Llama-3.1-8B"), find_shape("Qwen2.5-72B")
SHARED_BASE = "--train.lora true --train.weight-bridge-mode lora_only --train.single-copy true"


def offers(job: PlannedJob, machine: Machine) -> list[tuple[str, str]]:
    return [(offer.budget.verdict, offer.command) for offer in suggest(job, machine)]


def test_8b_on_one_80_gb_card_needs_8_bit_moments_and_checkpointing() -> None:
    job = PlannedJob(find_shape("Hermes-3-Llama-3.1-8B"))
    assert estimate(job, H100).verdict == "does not fit"
    assert offers(job, H100)[:3] == [
        (
            "fits",
            "--train.optimizer adamw_8bit --train.gradient-checkpointing true --train.micro-tokens 4096 "
            "--train.gradient-dtype bfloat16 --engine.max-num-seqs 32",
        ),
        ("fits", "--train.optimizer adamw_cpu --train.micro-tokens 4096"),
        ("fits", f"{SHARED_BASE} --train.micro-tokens 8192"),
    ]
    # Without the second copy of the weights, gradients could stay in fp32.
    assert offers(replace(job, mode="single-copy"), H100)[0] == (
        "fits",
        "--train.optimizer adamw_8bit --train.gradient-checkpointing true --train.micro-tokens 4096 "
        "--engine.max-num-seqs 32",
    )


def test_14b_on_one_80_gb_gpu_needs_the_optimizer_in_host_memory_or_lora() -> None:
    job = PlannedJob(find_shape("Qwen3-14B"))
    assert estimate(job, A100).verdict == "does not fit"
    assert offers(job, A100)[:2] == [
        (
            "fits",
            "--train.optimizer adamw_cpu --train.gradient-checkpointing true --train.micro-tokens 8192 "
            "--engine.max-num-seqs 32",
        ),
        (
            "fits",
            f"{SHARED_BASE} --train.gradient-checkpointing true",
        ),
    ]
    # 16 bytes a parameter beside the GPU: a host of 128 GB leaves only the adapters.
    small_host = replace(A100, host_bytes=128 * 10**9)
    assert offers(job, small_host)[0][1].startswith(SHARED_BASE)


def test_24b_on_192_gb_needs_host_memory_unless_weights_are_shared() -> None:
    job = PlannedJob(find_shape("Mistral-Small-24B"))
    machine = Machine("a GPU of 192 GB", 192 * 10**9, None)
    assert estimate(job, machine).verdict == "does not fit"
    assert offers(job, machine)[:2] == [
        ("fits", "--train.optimizer adamw_cpu --train.micro-tokens 4096"),
        ("fits", f"{SHARED_BASE} --train.micro-tokens 8192"),
    ]
    one_copy = replace(job, mode="single-copy")
    assert offers(one_copy, machine)[0] == (
        "fits",
        "--train.optimizer adamw_8bit --train.gradient-checkpointing true --train.micro-tokens 8192 "
        "--train.gradient-dtype bfloat16",
    )


def of(budget: Budget, name: str) -> MemoryPool:
    return next(pool for pool in budget.pools if pool.name == name)


def test_7b_in_full_fits_on_one_80_gb_card_with_smaller_moments() -> None:
    """Weights 15.2 GB, bf16 gradients 15.2 GB and 8-bit moments 15.5 GB; AdamW's fp32 states would be 91 GB."""
    job = PlannedJob(find_shape("Qwen2.5-7B"), mode="single-copy")
    assert estimate(job, H100).verdict == "does not fit"
    small = replace(job, optimizer="adamw_8bit", is_checkpointed=True, micro_tokens=4096, max_num_seqs=32)
    assert of(estimate(small, H100), TRAINER_GPU).find("optimizer moments") == round(2.03 * 7_615_616_512)
    assert estimate(small, H100).verdict == "fits"


@pytest.mark.parametrize(("ranks", "verdict"), [(1, "does not fit"), (2, "tight"), (3, "fits")])
def test_8b_in_full_with_adamw_needs_three_80_gb_cards_for_the_trainer(ranks: int, verdict: str) -> None:
    """18 bytes a parameter are 144.5 GB: 72.3 GB on each of two cards, with 8.4 GB while embeddings' gradients are
    summed; three leave room."""
    job = PlannedJob(LLAMA_8B, train_gpus=ranks, engine_gpus=1, is_checkpointed=True, micro_tokens=8192)
    pool = of(estimate(job, H100), TRAINER_GPU)
    assert pool.verdict == verdict
    assert pool.peak > 18 * LLAMA_8B.num_params / ranks


def test_14b_on_two_cards_and_one_for_the_engine_needs_smaller_moments() -> None:
    """AdamW: 265.8 GB for two cards of 84.9 GB. With 8-bit moments and fp32 gradients 118.6 GB."""
    job = PlannedJob(find_shape("Qwen3-14B"), train_gpus=2, engine_gpus=1, is_checkpointed=True, micro_tokens=4096)
    states = ("weights", "gradients", "masters", "optimizer moments")
    pool = of(estimate(job, H100), TRAINER_GPU)
    assert sum(pool.find(name) for name in states) == 18 * 14_768_307_200 / 2
    assert pool.verdict == "does not fit"
    assert offers(job, H100)[0] == ("fits", "--train.optimizer adamw_8bit")
    assert ("fits", "--engine.gpus 0 --train.gpus 1-4") in offers(job, H100)


def test_24b_on_192_gb_cards_trains_with_adamw_on_three() -> None:
    """18 bytes a parameter are 424 GB: 141 GB on each of three cards, with 8 GB for whole layers and embeddings."""
    machine = Machine("a GPU of 192 GB", 192 * 10**9, None)
    job = PlannedJob(find_shape("Mistral-Small-24B"), engine_gpus=1, is_checkpointed=True, gpu_memory_utilization=0.9)
    verdicts = {n: estimate(replace(job, train_gpus=n), machine).verdict for n in (1, 2, 3)}
    assert verdicts == {1: "does not fit", 2: "does not fit", 3: "fits"}


def test_72b_on_six_80_gb_cards_is_offered_host_memory_lora_or_more_cards() -> None:
    """AdamW on two ranks: 654 GB for each card. 145 GB of weights on two cards leave room for nothing else."""
    job = PlannedJob(QWEN_72B, train_gpus=2, engine_gpus=4, gpu_memory_utilization=0.9)
    budget = estimate(job, H100)
    assert [pool.verdict for pool in budget.pools] == ["does not fit", "fits", "not known"]
    assert of(budget, ENGINE_GPU).find("engine's weights") == 2 * 72_706_203_648 / 4
    states = ("weights", "gradients", "masters", "optimizer moments")
    assert sum(of(budget, TRAINER_GPU).find(name) for name in states) == 18 * 72_706_203_648 / 2
    found = dict(reversed(pair) for pair in offers(job, H100))
    host = "--train.optimizer adamw_cpu --train.gradient-checkpointing true --train.offload-weights true"
    assert found[host] == "fits"
    assert found["--train.lora true --train.gradient-checkpointing true --train.offload-weights true"] == "fits"
    more = [command for command in found if "optimizer" not in command and "lora" not in command]
    assert more == [
        "--engine.gpus 0-3 --train.gpus 4-27 --train.use-shared-memory true --train.gradient-checkpointing true "
        "--train.micro-tokens 4096"
    ]


def test_the_host_memory_of_72b_is_counted_before_it_is_offered() -> None:
    job = PlannedJob(QWEN_72B, train_gpus=2, engine_gpus=4, gpu_memory_utilization=0.9)
    one_terabyte = replace(H100, host_bytes=10**12)
    commands = [command for _, command in offers(job, one_terabyte)]
    assert not [command for command in commands if "adamw_cpu" in command and "gpus" not in command]
    assert "--train.lora true --train.gradient-checkpointing true --train.offload-weights true" in commands


def test_a_mixture_of_30b_on_eight_cards_shards_all_its_experts() -> None:
    job = PlannedJob(find_shape("Qwen3-30B-A3B"), train_gpus=7, engine_gpus=1, gpu_memory_utilization=0.9)
    pool = of(estimate(job, H100), TRAINER_GPU)
    assert pool.find("masters") == round(4 * 30_532_122_624 / 7)
    assert pool.find("whole layers") == 2 * 2 * 623_120_640  # all 128 experts, though a token uses 8
    assert offers(job, H100)[0] == (
        "fits",
        "--train.gradient-checkpointing true --train.micro-tokens 4096 --train.gradient-dtype bfloat16",
    )


def test_14b_on_six_cards_only_needs_smaller_micros() -> None:
    job = PlannedJob(find_shape("Qwen3-14B"), train_gpus=5, engine_gpus=1)
    assert offers(job, H100)[0] == ("fits", "--train.gradient-checkpointing true")


def test_a_gpu_for_the_engine_is_suggested_before_several_trainers() -> None:
    found = offers(PlannedJob(find_shape("Qwen3-4B"), mode="single-copy"), H100)
    assert [command for _, command in found if "--engine.gpus 0 --train.gpus 1" in command]


def test_weights_are_broadcast_to_an_engine_of_several_cards() -> None:
    assert "--train.use-shared-memory true" in layout_flags(2, 4, "shared_vllm")
    assert layout_flags(2, 4, "lora_only") == ("--engine.gpus 0-3", "--train.gpus 4-5")
    assert layout_flags(7, 1, "shared_vllm") == ("--engine.gpus 0", "--train.gpus 1-7")


def test_every_suggestion_fits_when_its_flags_are_taken() -> None:
    job = PlannedJob(find_shape("Qwen3-4B"), has_reference=True)
    machine = Machine("rtx4090", card_bytes("rtx4090"), 64 * 10**9)
    found = suggest(job, machine)
    assert found
    for offer in found:
        assert estimate(offer.budget.job, machine).verdict == "fits"
        assert all(place.peak <= (place.capacity or 0) for place in offer.budget.pools)


def test_a_model_whose_16_bit_weights_fill_a_card_is_offered_4_bits() -> None:
    found = offers(PlannedJob(find_shape("Llama-3.3-70B")), Machine("h200", card_bytes("h200"), None))
    quantized = "--train.lora true --train.weight-bridge-mode lora_only --train.quantization nf4"
    assert found[0][1].startswith(quantized)


def test_nothing_is_promised_for_a_model_whose_4_bit_weights_fill_a_card() -> None:
    assert suggest(PlannedJob(find_shape("Llama-3.3-70B")), Machine("rtx4090", card_bytes("rtx4090"), None)) == []


def test_a_cpu_is_offered_nothing_that_needs_a_gpu() -> None:
    job = PlannedJob(find_shape("Qwen3-0.6B"), micro_tokens=768, is_compiled=False, has_block_attention=True)
    found = offers(job, Machine("cpu", None, 16 * 10**9))
    assert found
    assert not [command for _, command in found if "gpus" in command or "adamw_cpu" in command]


@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_the_largest_micro_fits_and_the_next_one_does_not(is_checkpointed: bool) -> None:
    job = PlannedJob(find_shape("Qwen3-1.7B"), optimizer="adamw_8bit", is_checkpointed=is_checkpointed)
    largest = largest_micro_tokens(job, H100)
    assert largest is not None
    assert estimate(replace(job, micro_tokens=largest), H100).verdict == "fits"
    assert estimate(replace(job, micro_tokens=largest + 256), H100).verdict != "fits"


def test_no_micro_is_small_enough_when_the_states_alone_are_too_large() -> None:
    assert largest_micro_tokens(PlannedJob(find_shape("Qwen3-8B")), H100) is None
