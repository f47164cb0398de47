"""Find changes of a weight on a GPU against a copy in host memory, and apply them to a weight on a GPU."""

from __future__ import annotations

import pytest
import torch

from treadle.sync.delta import CHUNK, find_changes, set_weight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_changes_are_found_and_applied_on_the_gpu_in_little_memory(kind):
    num_elements = 3 * CHUNK + 5
    old = torch.randn(num_elements, generator=torch.Generator().manual_seed(0)).to(kind)
    new = old.cuda()
    places = [0, CHUNK - 1, CHUNK, num_elements - 1]
    new[places] = torch.tensor([float("nan"), -0.0, 2.0, 3.0], dtype=kind, device="cuda")
    new[torch.arange(7, num_elements - 1, 100, device="cuda")] *= -1
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    changes = find_changes(new, old)
    assert torch.cuda.max_memory_allocated() - before < new.nbytes
    assert set(places) <= set(changes.indices.tolist())
    assert changes.indices.device.type == changes.values.device.type == "cpu"
    engines = old.cuda()
    set_weight(engines, changes)
    set_weight(old, changes)
    assert torch.equal(engines.view(torch.int16), new.view(torch.int16))
    assert torch.equal(old.view(torch.int16), new.cpu().view(torch.int16))
