"""Jobs people ask about: the verdict, and the exact flags that make each fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treadle.budget.estimate import estimate
from treadle.budget.hardware import Machine, card_bytes
from treadle.budget.job import PlannedJob
from treadle.budget.shapes import find_shape
from treadle.budget.suggestions import largest_micro_tokens, suggest

H100 = Machine("h100", card_bytes("h100"), None)
A100 = Machine("a100-80gb", card_bytes("a100-80gb"), None)
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


def test_72b_fits_on_no_number_of_80_gb_gpus_with_replicated_weights() -> None:
    job = PlannedJob(
        find_shape("Qwen2.5-72B"), mode="lora", lora=True, train_gpus=2, engine_gpus=4, weight_mode="lora_only"
    )
    budget = estimate(job, H100)
    assert [place.verdict for place in budget.pools] == ["does not fit", "fits", "not known"]
    assert budget.pools[0].find("weights") == 2 * 72_706_203_648  # of 84.9 GB
    assert offers(job, H100) == []


def test_14b_on_six_cards_needs_smaller_moments_and_bf16_gradients() -> None:
    job = PlannedJob(find_shape("Qwen3-14B"), mode="two-copies", train_gpus=5, engine_gpus=1)
    assert offers(job, H100)[0] == (
        "fits",
        "--train.optimizer adamw_8bit --train.gradient-checkpointing true --train.gradient-dtype bfloat16",
    )


def test_a_gpu_for_the_engine_is_suggested_before_several_trainers() -> None:
    found = offers(PlannedJob(find_shape("Qwen3-4B"), mode="single-copy"), H100)
    placed = "--engine.device cuda:1 --train.device cuda:0 --train.use-shared-memory true"
    assert [command for _, command in found if placed in command]
    reloading = offers(PlannedJob(find_shape("Qwen3-4B"), weight_mode="reload"), H100)
    assert not [command for _, command in reloading if "use-shared-memory" in command]


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
    assert found  # more GPUs would not divide the weights
    assert all(command.startswith(quantized) for _, command in found)


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
