from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from treadle.sync.buckets import Bucket, Piece, plan_buckets

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=12)


def test_weights_lie_end_to_end_and_a_large_one_goes_over_several_buckets():
    plan = plan_buckets([("a", (3,)), ("b", (2, 4)), ("c", ())], elements_per_bucket=5)
    assert plan == (
        Bucket(5, (Piece("a", 0, 3, 0), Piece("b", 0, 2, 3))),
        Bucket(5, (Piece("b", 2, 7, 0),)),
        Bucket(2, (Piece("b", 7, 8, 0), Piece("c", 0, 1, 1))),
    )


def test_nothing_needs_no_bucket():
    assert plan_buckets([], elements_per_bucket=5) == ()
    assert plan_buckets([("empty", (0, 3))], elements_per_bucket=5) == ()


@given(SHAPES, st.integers(1, 40))
def test_every_element_travels_once_in_order_and_only_the_last_bucket_is_short(shapes, size):
    weights = [(f"w{number}", shape) for number, shape in enumerate(shapes)]
    plan = plan_buckets(weights, size)
    travelled = [(p.name, e) for bucket in plan for p in bucket.pieces for e in range(p.start, p.stop)]
    assert travelled == [(name, e) for name, shape in weights for e in range(math.prod(shape))]
    assert all(bucket.num_elements == size for bucket in plan[:-1])
    for bucket in plan:
        places = [place for p in bucket.pieces for place in range(p.place, p.place + p.stop - p.start)]
        assert places == list(range(bucket.num_elements))
        assert 0 < bucket.num_elements <= size
