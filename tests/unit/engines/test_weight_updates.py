"""Weights from files: what fits is loaded, anything else is refused before anything is written."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from treadle.engines.weight_updates import read_weights, write_weights
from treadle.errors import RequestError
from treadle.sync.delta import DELTA_FROM

VERSION = 4


@pytest.fixture
def weights():
    """The last one is tied to the first."""
    embedding = torch.zeros(5, 3).bfloat16()
    return {"embed": embedding, "norm": torch.ones(3).bfloat16(), "head": embedding}


def elements(name, indices, values, kind=torch.bfloat16):
    places = torch.tensor(indices, dtype=torch.int32)
    return {f"{name}#indices": places, f"{name}#values": torch.tensor(values, dtype=kind)}


def save(folder, tensors, base=VERSION, file="model.safetensors"):
    save_file(tensors, folder / file, metadata=None if base is None else {DELTA_FROM: str(base)})


def test_full_weights_and_deltas_of_several_files_are_loaded(tmp_path, weights):
    save(tmp_path, elements("embed", [1, 14], [2.0, -0.0]))
    save(tmp_path, {"norm": torch.tensor([1.0, 2.0, 3.0])}, file="more.safetensors")
    write_weights(read_weights(tmp_path, weights, VERSION), weights)
    assert weights["norm"].tolist() == [1.0, 2.0, 3.0]
    assert weights["embed"][0].tolist() == [0.0, 2.0, 0.0]
    assert torch.signbit(weights["embed"].view(-1)).nonzero().view(-1).tolist() == [14]


def test_a_delta_may_use_the_second_name_of_a_tied_weight(tmp_path, weights):
    save(tmp_path, elements("head", [14], [2.0]))
    write_weights(read_weights(tmp_path, weights, VERSION), weights)
    assert weights["embed"][-1].tolist() == [0.0, 0.0, 2.0]


def test_a_delta_to_another_version_is_refused(tmp_path, weights):
    save(tmp_path, elements("embed", [1], [2.0]), base=3)
    with pytest.raises(RequestError, match="what changed since version 3, and the engine has version 4") as refused:
        read_weights(tmp_path, weights, VERSION)
    assert "all weights" in refused.value.fix
    save(tmp_path, {"norm": torch.zeros(3)}, base=None)
    assert list(read_weights(tmp_path, weights, VERSION)) == ["norm"]


def test_only_a_complete_set_of_weights_repairs_a_mixture(tmp_path, weights):
    norm, embedding = {"norm": torch.zeros(3)}, torch.ones(5, 3)
    for sent in (norm, norm | elements("embed", [1], [2.0])):
        save(tmp_path, sent)
        with pytest.raises(RequestError, match=r"are a mixture since a publish broke off.* has not all of embed"):
            read_weights(tmp_path, weights, VERSION, must_be_all=True)
    for name in ("embed", "head"):
        save(tmp_path, norm | {name: embedding}, base=None)
        assert set(read_weights(tmp_path, weights, VERSION, must_be_all=True)) == {"norm", name}


def test_a_delta_may_be_empty_and_a_file_of_weights_may_not(tmp_path, weights):
    save(tmp_path, {})
    assert read_weights(tmp_path, weights, VERSION) == {}
    save(tmp_path, {}, base=None)
    with pytest.raises(RequestError, match="hold no weights"):
        read_weights(tmp_path, weights, VERSION)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (elements("nothing", [1], [2.0]), "holds nothing, which this model does not have"),
        (elements("norm", [3], [2.0]), "norm in .* does not fit: its indices go from 3 to 3, of 3 elements"),
        (elements("norm", [1, 0], [2.0, 2.0]), "norm in .* do not rise"),
        (elements("norm", [1], [2.0], torch.float32), "norm in .* torch.float32, the engine's are torch.bfloat16"),
        ({"norm#values": torch.zeros(1).bfloat16()}, "norm must be whole, or both"),
        ({"norm": torch.zeros(2)}, "norm in .* does not fit"),
    ],
)
def test_a_weight_that_does_not_fit_is_named_and_nothing_written(tmp_path, weights, wrong, words):
    save(tmp_path, elements("embed", [1], [2.0]) | wrong)
    with pytest.raises(RequestError, match=words) as refused:
        read_weights(tmp_path, weights, VERSION)
    assert refused.value.fix


def test_a_torn_file_and_an_empty_folder_are_refused(tmp_path, weights):
    with pytest.raises(RequestError, match=r"holds no \*.safetensors"):
        read_weights(tmp_path, weights, VERSION)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(RequestError, match="cannot be read"):
        read_weights(tmp_path, weights, VERSION)
