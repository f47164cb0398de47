from __future__ import annotations

from treadle.sync.layout import ALIGNMENT, plan_layout


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
