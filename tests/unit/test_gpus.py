"""The GPUs that a process sees, and the ones that it restricts itself to."""

from __future__ import annotations

import pytest

from treadle.errors import ConfigError
from treadle.gpus import Gpu, use_gpus, visible_gpus

TABLE = """0, GPU-aa11, NVIDIA H100 80GB HBM3, 81559
1, GPU-bb22, NVIDIA H100 80GB HBM3, 81559
2, GPU-cc33, NVIDIA L4, 23034
"""
H100, L4 = Gpu("NVIDIA H100 80GB HBM3", 81559 * 2**20), Gpu("NVIDIA L4", 23034 * 2**20)


@pytest.mark.parametrize(
    ("visible", "seen"),
    [(None, (H100, H100, L4)), ("", ()), ("2,0", (L4, H100)), ("GPU-cc", (L4,)), ("1,-1,2", (H100,)),
     ("0,7,1", (H100,)), ("MIG-dd44", (Gpu("", 0),))],
)  # fmt: skip
def test_a_process_sees_what_cuda_would_show_it(visible: str | None, seen: tuple[Gpu, ...]) -> None:
    assert visible_gpus(TABLE, visible) == seen


@pytest.mark.parametrize(
    ("before", "gpus", "after"),
    [
        ({}, (4, 5), {"CUDA_VISIBLE_DEVICES": "4,5", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ({"CUDA_VISIBLE_DEVICES": "6,GPU-bb"}, (1,), {"CUDA_VISIBLE_DEVICES": "GPU-bb"}),
        ({"CUDA_VISIBLE_DEVICES": "6,7"}, None, {"CUDA_VISIBLE_DEVICES": "6,7"}),
    ],
)
def test_gpus_are_counted_within_cuda_visible_devices(before, gpus, after) -> None:
    use_gpus(gpus, before)
    assert before == after


def test_a_gpu_that_is_not_visible_is_refused() -> None:
    with pytest.raises(ConfigError, match="names GPU 2, and CUDA_VISIBLE_DEVICES is '4,5': it lists 2"):
        use_gpus((2,), {"CUDA_VISIBLE_DEVICES": "4,5"})
