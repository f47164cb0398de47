from __future__ import annotations

import msgspec

from treadle.sync.layout import ALIGNMENT, Layout, plan_layout


def test_parameters_are_aligned_and_do_not_overlap():
    shapes = [("a", (3,)), ("b", (7, 5)), ("c", (64, 2)), ("d", ())]
    layout = plan_layout("file", "model", "float32", shapes)
    ends = 0
    for placement in layout.parameters:
        assert placement.offset % ALIGNMENT == 0
        assert placement.offset >= ends
        ends = placement.offset + placement.num_elements * 4
    assert layout.num_bytes >= ends
    assert [p.name for p in layout.parameters] == ["a", "b", "c", "d"]


def test_an_engine_that_does_not_say_its_version_is_understood():
    told = msgspec.to_builtins(plan_layout("file", "model", "float32", [("a", (3,))]))
    silent = {key: value for key, value in told.items() if key not in ("policy_version", "is_held")}
    layout = msgspec.json.decode(msgspec.json.encode(silent), type=Layout)
    assert (layout.policy_version, layout.is_held) == (None, False)
