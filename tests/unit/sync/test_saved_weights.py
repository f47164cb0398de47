"""One copy of the weights: what an engine says of where they lie is held against the model's files."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_model import write_tiny_model
from treadle.errors import SyncError
from treadle.sync.saved_weights import refuse_misplaced

GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2)


@pytest.fixture
def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_their_places_pass_in_the_engines_number_format(folder, weights, dtype):
    shared = {name: weight.to(dtype) for name, weight in weights.items()}
    assert refuse_misplaced(shared.items(), folder) == len(weights)


def test_two_halves_in_each_others_place_are_named(folder, weights):
    shared = weights | {GATE: weights[UP], UP: weights[GATE]}
    with pytest.raises(SyncError, match="have changed places") as error:
        refuse_misplaced(shared.items(), folder)
    assert GATE in str(error.value)
    assert UP in str(error.value)


def test_a_weight_that_begins_a_row_too_late_is_named(folder, weights):
    with pytest.raises(SyncError, match=f"1 of {len(weights)} weights differ, {GATE}"):
        refuse_misplaced((weights | {GATE: weights[GATE].roll(1, 0)}).items(), folder)


def test_names_that_only_one_side_has_are_not_compared(folder, weights):
    save_file(weights | {"lm_head.weight": torch.ones(2)}, folder / "model.safetensors")
    assert refuse_misplaced({**weights, "new.weight": torch.ones(3)}.items(), folder) == len(weights)


def test_only_the_files_that_are_the_model_are_looked_at(folder, weights):
    save_file({GATE: torch.zeros_like(weights[GATE])}, folder / "pytorch_model.safetensors")  # left over
    assert refuse_misplaced(weights.items(), folder) == len(weights)
    shard = {name: weight for name, weight in weights.items() if name != GATE}
    save_file(shard, folder / "model-00001-of-00002.safetensors")
    save_file({GATE: weights[GATE]}, folder / "model-00002-of-00002.safetensors")
    save_file({GATE: torch.zeros_like(weights[GATE])}, folder / "model.safetensors")
    places = {name: f"model-0000{1 + (name == GATE)}-of-00002.safetensors" for name in weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert refuse_misplaced(weights.items(), folder) == len(weights)
