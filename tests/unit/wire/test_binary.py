from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.hub.group_validation import ValidationRequest, admit
from treadle.hub.messages import GroupRules, Refused
from treadle.hub.own_routes import lease_binary
from treadle.store import Batch, StoredGroup
from treadle.wire.groups import ScoredGroup, join_groups, pack_group, unpack_answer, unpack_group

ids = st.integers(0, 2**31 - 1)
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def groups(draw) -> ScoredGroup:
    tokens = draw(st.lists(st.lists(ids, min_size=1, max_size=6), min_size=1, max_size=4))
    return ScoredGroup(
        tokens=tokens,
        masks=[[draw(st.sampled_from([-100, token])) for token in row] for row in tokens],
        scores=[draw(st.floats(-1e6, 1e6)) for _ in tokens],
        inference_logprobs=draw(st.none() | st.just([[draw(float32) for _ in row] for row in tokens])),
        env_id=draw(st.none() | st.just(0)),
        policy_version=draw(st.none() | st.integers(0, 2**40)),
        item=draw(st.none() | st.integers(0, 2**40)),
        metrics=draw(st.none() | st.just({"accuracy": 0.25})),
        overrides=draw(st.none() | st.just([{"temperature": 0.5}] * len(tokens))),
        messages=draw(st.none() | st.just([[{"role": "user", "content": "é"}]])),
    )


def posted(*packed: bytes, rules: GroupRules | None = None) -> list:
    request = ValidationRequest(kind="binary", rules=rules or GroupRules(num_envs=1))
    return admit(join_groups(packed), request).groups


@given(groups())
@settings(max_examples=100)
def test_a_group_comes_back_as_it_was_packed(group):
    assert unpack_group(pack_group(group)) == group


@given(groups())
@settings(max_examples=100)
def test_what_an_environment_posts_in_binary_is_what_the_trainer_leases(group):
    (new,) = posted(pack_group(group))
    stored = StoredGroup(1, new.format, new.payload, new.policy_version, new.item, new.metrics, 0.0)
    answer = unpack_answer(lease_binary(Batch(3, "t", 1, [stored]), 60.0, None))
    assert answer.batch is not None
    assert (answer.batch.step, answer.batch.token, answer.batch.lease_s) == (3, "t", 60.0)
    assert answer.batch.groups == [group]


def test_a_batch_may_hold_groups_of_both_forms():
    group = ScoredGroup(tokens=[[1, 2]], masks=[[-100, 2]], scores=[1.0], inference_logprobs=[[1.0, -0.5]], item=4)
    (packed,) = posted(pack_group(group))
    (plain,) = admit(msgspec.json.encode(group), ValidationRequest(kind="group", rules=GroupRules())).groups
    stored = [
        StoredGroup(i, g.format, g.payload, g.policy_version, g.item, g.metrics, 0.0)
        for i, g in enumerate((packed, plain))
    ]
    answer = unpack_answer(lease_binary(Batch(1, "t", 1, stored), 60.0, None))
    assert answer.batch is not None
    assert answer.batch.groups == [group, group]


def test_a_stale_group_arrives_with_its_weight():
    stored = StoredGroup(1, "binary", pack_group(good()), 2, None, None, 0.0)
    answer = unpack_answer(lease_binary(Batch(8, "t", 1, [stored]), 60.0, max_age=3))  # 5 versions old
    assert answer.batch is not None
    assert answer.batch.groups[0].weight == pytest.approx(1 / 3)


def good(**changes) -> ScoredGroup:
    fields = {"tokens": [[1, 2], [3]], "masks": [[-100, 2], [3]], "scores": [0.0, 1.0]}
    return ScoredGroup(**{**fields, "inference_logprobs": [[1.0, -0.5], [-0.25]], **changes})


def raw(**changes) -> bytes:
    fields = {"lengths": [2], "tokens": struct.pack("<2i", 1, 2), "masks": struct.pack("<2i", -100, 2), "scores": [1.0]}
    return msgspec.msgpack.encode({**fields, **changes})


@pytest.mark.parametrize(
    ("packed", "kind"),
    [
        (raw(lengths=[]), "too_short"),
        (raw(lengths=[2, 0], scores=[1.0, 1.0]), "too_short"),
        (raw(lengths=[3]), "length_mismatch"),
        (raw(lengths=[-1, 3], scores=[1.0, 1.0]), "too_short"),
        (raw(masks=b"1234"), "length_mismatch"),
        (raw(scores=[1.0, 2.0]), "length_mismatch"),
        (raw(scores=[float("nan")]), "finite_number"),
        (raw(inference_logprobs=struct.pack("<2f", 1.0, float("inf"))), "finite_number"),
        (raw(inference_logprobs=b"123"), "length_mismatch"),
        (raw(tokens=struct.pack("<2i", 1, -2)), "negative_id"),
        (raw(tokens=struct.pack("<2i", 1, 100)), "out_of_vocabulary"),
        (raw(env_id=7), "unknown_env"),
        (raw(policy_version=9), "future_version"),
        (raw(policy_version=-1), "future_version"),
        (raw(metrics={"a": float("nan")}), "finite_number"),
        (raw(rest={"messages": [[{"role": "user"}]]}), "value_error"),
        (raw(rest={"advantages": "none"}), "value_error"),
        (raw(rest={"advantages": [[float("inf")]]}), "finite_number"),
        (raw(rest={"tokens": [[1]]}), "value_error"),
        (raw(rest={"nonsense": 1}), "value_error"),
        (raw(lengths="2"), "value_error"),
        (b"\xff\xff", "value_error"),
        (b"", "value_error"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(packed, kind):
    rules = GroupRules(num_envs=1, vocab_size=100, max_token_len=10, batch_size=4, newest_version=5)
    with pytest.raises(Refused) as refused:
        posted(packed, rules=rules)
    assert (refused.value.status, refused.value.reason) == (422, kind)


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_random_bytes_are_refused_and_nothing_else(body):
    assert verdict(body) in (200, 422)  # an empty list is a list, too


def verdict(body: bytes) -> int:
    try:
        admit(body, ValidationRequest(kind="binary", rules=GroupRules()))
    except Refused as refused:
        return refused.status
    return 200
