"""Deltas of weights: for any two versions, the engine's becomes the trainer's, bit for bit."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.sync.delta import (
    CHUNK,
    INDICES,
    VALUES,
    Changes,
    as_tensors,
    find_changes,
    from_tensors,
    index_dtype,
    misfit,
    set_weight,
    smaller_form,
)
from treadle.sync.shards import as_held

KINDS = st.sampled_from([torch.bfloat16, torch.float16])
SHAPES = st.sampled_from([(1,), (7,), (1, 1), (3, 5), (2, 3, 4), (16, 9), (0,), ()])
NAN, MINUS_ZERO = 0x7FC1, -0x8000  # of bfloat16; of float16 the first is a NaN too


def bits(weight):
    return weight.view(torch.int16)


@st.composite
def versions(draw):
    """Any bits at all, of which some change."""
    kind, shape = draw(KINDS), draw(SHAPES)
    count = torch.Size(shape).numel()
    any_bits = st.integers(-(2**15), 2**15 - 1) | st.sampled_from([0, MINUS_ZERO, NAN])
    old = draw(st.lists(any_bits, min_size=count, max_size=count))
    new = [draw(any_bits) if draw(st.booleans()) else bit for bit in old]
    return tuple(torch.tensor(v, dtype=torch.int16).reshape(shape).view(kind) for v in (old, new))


@given(versions())
def test_what_changed_makes_the_old_weight_the_new_one(pair):
    old, new = pair
    changes = find_changes(new, old)
    sent = from_tensors(as_tensors({"w": smaller_form(new, changes)}))["w"]
    assert misfit(sent, old.shape, old.dtype) is None
    for what in (sent, changes):  # the smaller form, and the other one
        engines = old.clone()
        for _ in range(2):  # twice is harmless
            set_weight(engines, what)
            assert torch.equal(bits(engines), bits(new))


@given(versions())
def test_exactly_the_elements_with_other_bits_are_found_in_order(pair):
    old, new = pair
    changes = find_changes(new, old)
    flat_old, flat_new = bits(old).flatten().tolist(), bits(new).flatten().tolist()
    assert changes.indices.tolist() == [i for i, (a, b) in enumerate(zip(flat_old, flat_new, strict=True)) if a != b]
    assert bits(changes.values).tolist() == [b for a, b in zip(flat_old, flat_new, strict=True) if a != b]


@given(versions())
def test_the_form_that_is_sent_is_never_larger_than_the_whole_weight(pair):
    old, new = pair
    sent = as_tensors({"w": smaller_form(new, find_changes(new, old))})
    assert sum(t.nbytes for t in sent.values()) <= new.nbytes


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_changes_are_found_around_a_chunk_end_and_in_the_last_element(kind):
    old = torch.zeros(CHUNK + 3, dtype=kind)
    new = old.clone()
    places = [0, CHUNK - 1, CHUNK, CHUNK + 2]
    new[places] = torch.tensor([1.0, -0.0, float("nan"), 2.0], dtype=kind)
    changes = find_changes(new, old)
    assert changes.indices.tolist() == places
    set_weight(old, changes)
    assert torch.equal(bits(old), bits(new))


def test_unchanged_weights_have_no_changes_and_rewritten_ones_go_whole():
    weight = torch.tensor([1.0, float("nan"), -0.0]).bfloat16()
    assert len(find_changes(weight, weight.clone()).indices) == 0
    other = weight + 1
    assert isinstance(smaller_form(other, find_changes(other, torch.zeros(3).bfloat16())), torch.Tensor)


def test_16_bit_elements_with_indices_are_smaller_up_to_a_third():
    old = torch.zeros(300).bfloat16()
    for num_changed, kind in ((99, Changes), (100, torch.Tensor)):
        new = old.clone()
        new[:num_changed] = 1.0
        assert isinstance(smaller_form(new, find_changes(new, old)), kind)


def test_a_strided_weight_is_compared_in_the_engines_element_order():
    old = torch.zeros(4, 6).bfloat16()
    turned = torch.zeros(6, 4).bfloat16()
    turned[5, 1] = 1.0
    changes = find_changes(turned.T, old)
    assert changes.indices.tolist() == [1 * 6 + 5]


def test_indices_take_32_bits_unless_a_weight_has_too_many_elements():
    assert (index_dtype(2**31), index_dtype(2**31 + 1)) == (torch.int32, torch.int64)


def changes_of(indices, values, kind=torch.int32):
    return Changes(torch.tensor(indices, dtype=kind), torch.tensor(values).bfloat16())


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (changes_of([0, 1], [1.0]), r"\[2\] torch.int32 indices for \[1\] values"),
        (changes_of([[0]], [[1.0]]), r"\[1, 1\] torch.int32 indices"),
        (changes_of([0], [1.0], torch.int16), "torch.int16 indices"),
        (changes_of([1, 1], [1.0, 2.0]), "do not rise"),
        (changes_of([2, 1], [1.0, 2.0]), "do not rise"),
        (changes_of([-1, 0], [1.0, 2.0]), "from -1 to 0, of 6 elements"),
        (changes_of([0, 6], [1.0, 2.0]), "from 0 to 6, of 6 elements"),
        (Changes(torch.tensor([0]), torch.tensor([1.0])), "torch.float32, the engine's are torch.bfloat16"),
        (torch.zeros(3, 2).bfloat16(), r"it is \[3, 2\] torch.bfloat16, the engine's is \[2, 3\]"),
        (torch.zeros(2, 3, dtype=torch.int32), "torch.int32"),
    ],
)
def test_what_does_not_fit_is_reported(sent, words):
    assert re.search(words, misfit(sent, (2, 3), torch.bfloat16))


def test_elements_of_a_weight_that_lies_in_another_order_are_refused():
    held = as_held({"w": torch.zeros(3, 2).bfloat16().T})["w"]
    assert "order of its own" in held.misfit(changes_of([0], [1.0]))


@pytest.mark.parametrize("names", [["w" + INDICES], ["w" + VALUES], ["w", "w" + INDICES, "w" + VALUES]])
def test_a_weight_is_whole_or_both_of_its_parts(names):
    with pytest.raises(ValueError, match="w must be whole, or both w#indices and w#values"):
        from_tensors({name: torch.zeros(1) for name in names})
