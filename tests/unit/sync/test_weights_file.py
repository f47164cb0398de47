from __future__ import annotations

import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from treadle.errors import SyncError
from treadle.sync.layout import Layout, Placement
from treadle.sync.weights_file import bind_parameters, remove_shared_file, share_parameters
from treadle.train.policy import share_policy


@pytest.fixture
def shared(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    layout = share_parameters(model, tmp_path / "weights", str(folder))
    return model, layout, before


def test_sharing_keeps_every_value_and_the_file_is_private(shared):
    model, layout, before = shared
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert os.stat(layout.path).st_mode & 0o777 == 0o600
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_the_trainers_model_stands_on_the_same_bytes(shared):
    model, layout, _ = shared
    policy = share_policy(layout, logprob_chunk=64)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        for master in policy.masters.values():
            master.add_(0.01)
        before = model(ids).logits
        policy.write_live_weights()
        after = model(ids).logits
    assert not torch.allclose(before, after)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), policy.masters[name].detach(), atol=0, rtol=0)


def test_a_model_that_does_not_fit_is_refused(shared):
    model, layout, _ = shared
    renamed = tuple(Placement(name=p.name + "x", shape=p.shape, offset=p.offset) for p in layout.parameters)
    other = Layout(
        path=layout.path, model=layout.model, dtype=layout.dtype, num_bytes=layout.num_bytes, parameters=renamed
    )
    with pytest.raises(SyncError, match="do not fit"):
        bind_parameters(model, other)


def test_removal_leaves_nothing(shared, tmp_path):
    remove_shared_file(tmp_path / "weights")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
