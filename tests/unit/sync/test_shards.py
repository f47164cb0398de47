"""Parts of weights that workers of a tensor-parallel vLLM hold: against weights that are split here as vLLM splits them
(its linear and embedding layers), over numbers of workers, heads, KV heads and vocabularies."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from treadle.engines.weight_updates import read_weights, write_weights
from treadle.errors import RequestError, SyncError
from treadle.sync.delta import DELTA_FROM, as_tensors, find_changes
from treadle.sync.fingerprint import fingerprints
from treadle.sync.layout import Worker, map_fused
from treadle.sync.process_group import plan_buckets
from treadle.sync.shards import HeldWeight, check_shards, cut, distinct_shards, for_every_holder, shard_name, whole_part
from treadle.wire.bridge import WeightPart

Q, O_PROJ = "attn.q_proj.weight", "attn.o_proj.weight"
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
HEAD_DIM = 4
FEW = settings(max_examples=10, deadline=None)  # each moves every element of a model, in up to a hundred pieces
MANY = settings(max_examples=60, deadline=None)


@st.composite
def models(draw):
    """(full weights by name, workers, KV heads, vocabulary) that vLLM can serve."""
    num_workers = draw(st.sampled_from([1, 2, 4, 8]))
    num_kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads_per_kv = draw(st.sampled_from([1, 2, 3]))
    num_heads = num_kv_heads * heads_per_kv
    if num_heads % num_workers:
        num_heads *= num_workers
    hidden, middle = draw(st.sampled_from([8, 24])), num_workers * draw(st.integers(1, 3))
    vocab = draw(st.integers(1, 140))
    shapes = {
        "embed_tokens.weight": (vocab, hidden), "norm.weight": (hidden,), "q_norm.weight": (HEAD_DIM,),
        "attn.q_proj.weight": (num_heads * HEAD_DIM, hidden), "attn.q_proj.bias": (num_heads * HEAD_DIM,),
        "attn.k_proj.weight": (num_kv_heads * HEAD_DIM, hidden), "attn.k_proj.bias": (num_kv_heads * HEAD_DIM,),
        "attn.v_proj.weight": (num_kv_heads * HEAD_DIM, hidden), "attn.v_proj.bias": (num_kv_heads * HEAD_DIM,),
        "attn.o_proj.weight": (hidden, num_heads * HEAD_DIM), "attn.o_proj.bias": (hidden,),
        "mlp.gate_proj.weight": (middle, hidden), "mlp.up_proj.weight": (middle, hidden),
        "mlp.down_proj.weight": (hidden, middle), "lm_head.weight": (vocab, hidden),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    full = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    return full, num_workers, num_kv_heads, vocab


def rows_of(weight, rank, num_parts):
    return weight.chunk(num_parts)[rank] if num_parts > 1 else weight


def split_as_vllm_does(full, rank, num_workers, num_kv_heads, vocab):
    """vLLM's parameters on one worker, each with memory of its own."""
    own = {}
    for leaf in ("weight", "bias"):
        kv_parts = min(num_workers, num_kv_heads)  # QKVParallelLinear
        kv_rank = rank // (num_workers // kv_parts)
        q, k, v = (full[f"attn.{name}_proj.{leaf}"] for name in "qkv")
        stacked = [rows_of(q, rank, num_workers), rows_of(k, kv_rank, kv_parts), rows_of(v, kv_rank, kv_parts)]
        own[f"attn.qkv_proj.{leaf}"] = torch.cat(stacked)
    gate, up = (rows_of(full[f"mlp.{name}_proj.weight"], rank, num_workers) for name in ("gate", "up"))
    own["mlp.gate_up_proj.weight"] = torch.cat([gate, up])
    for name in ("attn.o_proj.weight", "mlp.down_proj.weight"):  # RowParallelLinear
        own[name] = rows_of(full[name].T, rank, num_workers).T.clone(memory_format=torch.contiguous_format)
    padded = -(-vocab // 64) * 64
    for name in ("embed_tokens.weight", "lm_head.weight"):  # VocabParallelEmbedding
        with_padding = torch.cat([full[name], torch.zeros(padded - vocab, full[name].shape[1]).bfloat16()])
        own[name] = rows_of(with_padding, rank, num_workers).clone()
    return own | {name: full[name].clone() for name in ("norm.weight", "q_norm.weight", "attn.o_proj.bias")}


def held_by(rank, model):
    """(vLLM's parameters, the same by the trainer's names) of one worker."""
    full, num_workers, num_kv_heads, vocab = model
    own = split_as_vllm_does(full, rank, num_workers, num_kv_heads, vocab)
    slices = map_fused(
        {name: tuple(weight.shape) for name, weight in full.items()},
        {name: tuple(weight.shape) for name, weight in own.items()},
        PACKED, vocab_size=vocab, num_kv_heads=num_kv_heads, worker=Worker(rank, num_workers),
    )  # fmt: skip
    held = {
        s.name: HeldWeight(own[s.source][s.first_row : s.first_row + s.part_shape[0]], s.shape, s.part) for s in slices
    }
    return own, held


def bits(weight):
    return weight.contiguous().view(torch.int16)


@given(models())
@MANY
def test_the_parts_of_all_workers_are_those_of_vllm_and_cover_every_weight(model):
    full, num_workers, num_kv_heads, _ = model
    workers = [held_by(rank, model)[1] for rank in range(num_workers)]
    for held in workers:
        for name, weight in full.items():
            assert torch.equal(bits(held[name].tensor), bits(cut(weight, held[name].part))), name
    check_shards(
        [(name, tuple(weight.shape)) for name, weight in full.items()],
        [{name: own.part for name, own in held.items()} for held in workers],
    )
    for name, weight in full.items():
        times_held = torch.zeros(weight.shape, dtype=torch.int64)
        for held in workers:
            cut(times_held, held[name].part).add_(1)
        is_kv = any(part in name for part in ("k_proj", "v_proj"))
        is_whole = name in ("norm.weight", "q_norm.weight", "attn.o_proj.bias")
        expected = max(1, num_workers // num_kv_heads) if is_kv else num_workers if is_whole else 1
        assert (times_held == expected).all(), name


@given(models(), st.integers(100, 3000))
@FEW
def test_buckets_of_any_size_fill_exactly_the_workers_part(model, bucket):
    full, num_workers, _, _ = model
    for rank in range(num_workers):
        own, held = held_by(rank, model)
        expected = {name: weight.clone() for name, weight in own.items()}
        for weight in own.values():
            weight.zero_()
        for filled in plan_buckets([(name, weight.shape) for name, weight in full.items()], bucket):
            for s in filled.slices:
                held[s.name].write_run(s.start, s.stop, full[s.name].view(-1)[s.start : s.stop])
        assert all(torch.equal(bits(weight), bits(expected[name])) for name, weight in own.items())


@given(models(), st.integers(0, 99), st.sampled_from([0.0, 0.1, 1.0]))
@FEW
def test_changes_of_whole_weights_change_exactly_the_workers_part(model, seed, share):
    full, num_workers, num_kv_heads, vocab = model
    generator = torch.Generator().manual_seed(seed)
    changed = {
        name: torch.where(torch.rand(weight.shape, generator=generator) < share, weight + 1, weight)
        for name, weight in full.items()
    }
    for rank in range(num_workers):
        own, held = held_by(rank, model)
        updates = {name: held[name].own_update(find_changes(changed[name], full[name])) for name in full}
        write_weights(updates, held)
        expected = split_as_vllm_does(changed, rank, num_workers, num_kv_heads, vocab)
        assert all(torch.equal(bits(weight), bits(expected[name])) for name, weight in own.items())


MODEL = ({
    "attn.q_proj.weight": (16, 8), "attn.k_proj.weight": (8, 8), "attn.v_proj.weight": (8, 8),
    "attn.q_proj.bias": (16,), "attn.k_proj.bias": (8,), "attn.v_proj.bias": (8,), "attn.o_proj.weight": (8, 16),
    "attn.o_proj.bias": (8,), "mlp.gate_proj.weight": (6, 8), "mlp.up_proj.weight": (6, 8),
    "mlp.down_proj.weight": (8, 6), "embed_tokens.weight": (20, 8), "lm_head.weight": (20, 8), "norm.weight": (8,),
    "q_norm.weight": (4,),
}, 2, 2, 20)  # fmt: skip


@pytest.fixture
def model():
    """Of two workers, the second has no row of the vocabulary: 20 rows are padded to 64."""
    shapes, *rest = MODEL
    generator = torch.Generator().manual_seed(0)
    return ({name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}, *rest)


def test_files_of_whole_weights_and_deltas_are_read_in_part(model, tmp_path):
    full, num_workers, num_kv_heads, vocab = model
    new = {name: weight + 1 for name, weight in full.items()}
    save_file(
        {name: weight for name, weight in new.items() if name != "attn.o_proj.weight"}, tmp_path / "a.safetensors"
    )
    changes = {"attn.o_proj.weight": find_changes(new["attn.o_proj.weight"], full["attn.o_proj.weight"])}
    save_file(as_tensors(changes), tmp_path / "b.safetensors", metadata={DELTA_FROM: "4"})
    for rank in range(num_workers):
        own, held = held_by(rank, model)
        write_weights(read_weights(tmp_path, held, 4), held)
        expected = split_as_vllm_does(new, rank, num_workers, num_kv_heads, vocab)
        assert all(torch.equal(bits(weight), bits(expected[name])) for name, weight in own.items())
    save_file({"attn.o_proj.weight": held["attn.o_proj.weight"].tensor.clone()}, tmp_path / "b.safetensors")
    with pytest.raises(RequestError, match=r"attn.o_proj.weight in .* does not fit: it is \[8, 8\], the engine's is"):
        read_weights(tmp_path, held, 4)


def shard_fingerprints(workers, version=0):
    """As the engine would answer."""
    return {
        shard_name(name, rank, len(workers)): fingerprint
        for rank, held in enumerate(workers)
        for name, fingerprint in fingerprints(((n, own.tensor) for n, own in held.items()), version).items()
    }


def expected_fingerprints(full, workers, version=0):
    shards = [{name: own.part for name, own in held.items()} for held in workers]
    return for_every_holder(fingerprints(distinct_shards(full.items(), shards), version), shards)


FAULTS = {
    "swapped": (lambda first, second: _swap(first[Q].tensor, second[Q].tensor), {0, 1}, Q),
    "skipped": (lambda _, second: second[O_PROJ].tensor.zero_(), {1}, O_PROJ),
    "of another worker": (lambda first, second: first[O_PROJ].tensor.copy_(second[O_PROJ].tensor), {0}, O_PROJ),
    "a replica that differs": (lambda _, second: second["norm.weight"].tensor.add_(1), {1}, "norm.weight"),
}


def _swap(one, other):
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


@pytest.mark.parametrize(("fault", "ranks", "weight"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("version", [0, 5])
def test_each_fault_of_a_shard_changes_its_fingerprint(model, fault, ranks, weight, version):
    workers = [held_by(rank, model)[1] for rank in range(2)]
    expected = expected_fingerprints(model[0], workers, version)
    assert shard_fingerprints(workers, version) == expected
    fault(*workers)
    found = shard_fingerprints(workers, version)
    assert {name for name in found if found[name] != expected[name]} == {shard_name(weight, r, 2) for r in ranks}


def test_replicated_parts_are_computed_once(model):
    full, *_ = model
    workers = [{name: own.part for name, own in held_by(rank, model)[1].items()} for rank in range(2)]
    names = [name for name, _ in distinct_shards(full.items(), workers)]
    assert [name for name in names if name.startswith("norm")] == ["norm.weight on worker 0 of 2"]
    assert len(names) == len(set(names)) == 2 * len(full) - 3


SHAPE = {"w": (8, 6)}
WRONG_PARTS = {
    "the same twice": (
        [WeightPart(0, 0, 4), WeightPart(0, 0, 4)],
        r"end at 4 along dimension 0, its shape is \[8, 6\]",
    ),
    "in another order": ([WeightPart(0, 4, 4), WeightPart(0, 0, 4)], "w on worker 0 of 2 is said to be 4 from 4"),
    "a gap": ([WeightPart(1, 0, 2), WeightPart(1, 3, 3)], "w on worker 1 of 2 is said to be 3 from 3"),
    "two dimensions": ([WeightPart(1, 0, 3), WeightPart(0, 3, 3)], "w on worker 1 of 2"),
    "no dimension": ([WeightPart(2, 0, 3)] * 2, "along dimension 2"),
}


@pytest.mark.parametrize(("parts", "words"), WRONG_PARTS.values(), ids=WRONG_PARTS)
def test_parts_that_do_not_cover_a_weight_in_order_are_refused(parts, words):
    with pytest.raises(SyncError, match=words):
        check_shards(SHAPE.items(), [{"w": part} for part in parts])


def test_workers_with_other_weights_are_refused():
    whole = whole_part((8, 6))
    with pytest.raises(SyncError, match="worker 1 of 2 of the engine: w is a weight that it does not have"):
        check_shards(SHAPE.items(), [{"w": whole}, {}])
    with pytest.raises(SyncError, match="v is a weight that it has, and the trainer does not"):
        check_shards(SHAPE.items(), [{"w": whole, "v": whole}] * 2)


@pytest.mark.parametrize(("num_workers", "num_kv_heads"), [(3, 2), (4, 3)])
def test_heads_that_cannot_be_divided_are_refused_by_name(model, num_workers, num_kv_heads):
    full, *_ = model
    shapes = {name: tuple(weight.shape) for name, weight in full.items()}
    served = {name.replace("q_proj", "qkv_proj"): shape for name, shape in shapes.items() if "k_" not in name}
    with pytest.raises(SyncError, match=r"attn.q_proj.weight has the shape \[16, 8\].* on worker 1 of"):
        map_fused(
            {n: s for n, s in shapes.items() if n.startswith("attn") and n.endswith("proj.weight") and "o_" not in n},
            served, PACKED, vocab_size=20, num_kv_heads=num_kv_heads, worker=Worker(1, num_workers),
        )  # fmt: skip


def test_a_run_within_a_row_writes_only_the_columns_that_are_held():
    whole = torch.arange(24.0).view(4, 6)
    for start, stop in itertools.combinations(range(25), 2):
        held = HeldWeight(torch.full((4, 2), -1.0), (4, 6), WeightPart(1, 3, 2))
        held.write_run(start, stop, whole.view(-1)[start:stop])
        sent = torch.full((4, 6), -1.0)
        sent.view(-1)[start:stop] = whole.view(-1)[start:stop]
        assert torch.equal(held.tensor, sent[:, 3:5])


def test_a_part_of_three_dimensions_is_a_range_of_columns_too():
    whole = torch.randn(2, 6, 5)
    for part in (WeightPart(0, 1, 1), WeightPart(1, 2, 3), WeightPart(2, 1, 3)):
        held = HeldWeight(torch.zeros_like(cut(whole, part)).contiguous(), (2, 6, 5), part)
        for bucket in plan_buckets([("w", whole.shape)], 7):
            for s in bucket.slices:
                held.write_run(s.start, s.stop, whole.view(-1)[s.start : s.stop])
        assert torch.equal(held.tensor, cut(whole, part))
        assert math.prod(held.tensor.shape) < whole.numel()
