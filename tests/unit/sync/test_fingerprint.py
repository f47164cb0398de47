"""Fingerprints: equal for equal bytes, and different for anything that can go wrong with a weight."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from treadle.sync import fingerprint as module
from treadle.sync.fingerprint import (
    BLOCK_WORDS,
    PARTS,
    FingerprintCache,
    begin_fingerprints,
    fingerprints,
    whole_fingerprint,
)

WORD = 8 // 2  # bf16 numbers in a 64-bit word
BLOCK = BLOCK_WORDS * WORD


def fingerprint(weight, version):
    return fingerprints([("weight", weight)], version)["weight"]


def weight(num, seed=0):
    return torch.randn(num, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("num", [1, 3, 4, 7, BLOCK - 1, BLOCK, BLOCK + 1, 40 * BLOCK, 40 * BLOCK + 5])
def test_equal_bytes_have_equal_fingerprints_wherever_they_lie(num):
    own = weight(num)
    shifted = torch.empty(num + 1, dtype=torch.bfloat16)[1:]  # words begin in the middle of a word of memory
    shifted.copy_(own)
    for version in (0, 5, 16):
        assert fingerprint(own, version) == fingerprint(shifted, version) == fingerprint(own.clone(), version)
    assert whole_fingerprint(own) == whole_fingerprint(shifted)


def test_any_change_is_found_within_sixteen_versions():
    for num in (1, 7, BLOCK, 2 * BLOCK, 40 * BLOCK + 5):
        own = weight(num)
        for place in {0, num // 3, num // 2, num - 1}:
            changed = own.clone()
            changed[place] += 0.5
            differs = [fingerprint(own, v) != fingerprint(changed, v) for v in range(PARTS)]
            assert any(differs)
            assert num > 2 * BLOCK or all(differs)
            assert whole_fingerprint(own) != whole_fingerprint(changed)


def test_a_weight_that_was_not_loaded_or_moved_shows_at_every_version():
    own = weight(40 * BLOCK + 5)
    half = torch.cat([own[: 20 * BLOCK], weight(20 * BLOCK + 5, seed=1)])
    for version in range(PARTS):
        found = {fingerprint(w, version) for w in (own, weight(len(own), seed=1), own.roll(BLOCK), own.flip(0), half)}
        assert len(found) == 5


def test_shapes_do_not_count_and_number_formats_do():
    own = weight(64)
    assert fingerprint(own.view(8, 8), 0) == fingerprint(own, 0)
    assert fingerprint(own.float(), 0) != fingerprint(own, 0)
    assert fingerprint(own.view(8, 8).t(), 0) != fingerprint(own, 0)


def test_many_together_have_the_fingerprints_that_they_have_alone(monkeypatch):
    """Also in several batches, and for weights without a whole block or without a remainder."""
    monkeypatch.setattr(module, "BATCH_BYTES", 500_000)
    sizes = (1, 40 * BLOCK + 5, 7, BLOCK, 40 * BLOCK, 3, 2 * BLOCK + 1, 17 * BLOCK)
    weights = {f"{i}": weight(num, seed=i) for i, num in enumerate(sizes)}
    for version in range(PARTS):
        alone = {name: fingerprint(own, version) for name, own in weights.items()}
        assert fingerprints(weights.items(), version) == alone
    assert fingerprints([], 0) == {}


def test_weights_that_do_not_move_are_read_again_each_time():
    """Views are cached, values are not, even for weights that must be copied to be read."""
    sizes = (1, 7, 40 * BLOCK + 5, 17 * BLOCK, 2 * BLOCK)
    for weights in (
        {f"{i}": weight(num, seed=i) for i, num in enumerate(sizes)},  # some are no whole words
        {f"{i}": weight(num, seed=i) for i, num in enumerate(sizes[3:])},
        {"turned": weight(64 * BLOCK).view(64, BLOCK).t()},
        {"shifted": weight(17 * BLOCK + 1)[1:]},
    ):
        standing = FingerprintCache()
        for version in range(PARTS + 4):
            found = begin_fingerprints(weights.items(), version, standing)()
            assert found == fingerprints(weights.items(), version)
            for own in weights.values():
                own[0] += 1.0  # in place
            if version % 5 == 4:  # one lies elsewhere now
                weights |= {name: own.clone() for name, own in list(weights.items())[:1]}


def test_a_fingerprint_is_of_the_weights_at_the_call():
    own = weight(40 * BLOCK)
    before = fingerprints([("w", own)], 3)
    read = begin_fingerprints([("w", own)], 3, FingerprintCache())
    own += 1.0
    assert read() == before


def test_the_sum_equals_the_documented_formula():
    """Computed word by word with Python integers: trainer and engine may be of different releases."""
    num_blocks, version = 35, 3
    own = weight(num_blocks * BLOCK + 9)
    words = torch.nn.functional.pad(own, (0, 3)).view(torch.int64).tolist()
    factors = [(i * 2 * 11400714819323198485 + 1) for i in range(BLOCK_WORDS)]
    sums = [sum(w * f for w, f in zip(words[b * BLOCK_WORDS :], factors, strict=False)) for b in range(num_blocks + 1)]
    part = module.sampled_part(version)
    total = sums[-1] + len(own) + sums[0] * factors[5] + sums[num_blocks - 1] * factors[6]
    total += sum(sums[b] * (2 * b + 7) for b in range(part, num_blocks, PARTS))
    assert fingerprint(own, version) == f"{total % 2**64:016x}"


def test_weights_computed_on_demand_do_not_all_exist_at_once(monkeypatch):
    """For example merged adapters: they are freed before the next ones are computed."""
    monkeypatch.setattr(module, "BATCH_BYTES", 40_000)
    made = []

    def num_alive():
        return sum(not storage.expired() for storage in made)  # a view would keep it, and not the tensor

    def merged():
        for number in range(50):
            own = weight(BLOCK // 2, seed=number)  # 8 kB
            made.append(StorageWeakRef(own.untyped_storage()))
            assert num_alive() < 8
            yield f"{number}", own

    read = begin_fingerprints(merged(), 0)
    assert num_alive() == 0
    assert len(set(read().values())) == 50


def test_every_tensor_has_a_fingerprint():
    """Also tensors that can be viewed as words only when flattened, or not at all."""
    base = weight(64)
    for own in (
        base.as_strided((1, 4), (5, 1)),
        base.as_strided((4, 1, 4), (4, 3, 1)),
        torch.empty(3, 0),
        torch.tensor(3.0),
        torch.tensor([True, False]),
        torch.nn.Parameter(weight(9)),
    ):
        flat = own.detach().flatten().clone()
        assert fingerprint(own, 0) == fingerprint(flat, 0)
        assert begin_fingerprints([("w", own)], 0, FingerprintCache())() == {"w": fingerprint(flat, 0)}


def test_the_same_memory_in_another_order_is_another_weight():
    own, standing = weight(BLOCK * 64).view(512, -1)[:, :512].contiguous(), FingerprintCache()
    (first,) = begin_fingerprints([("w", own)], 0, standing)().values()
    (turned,) = begin_fingerprints([("w", own.t())], 0, standing)().values()
    assert first != turned == fingerprint(own.t(), 0)
