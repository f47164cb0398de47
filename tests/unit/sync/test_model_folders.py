"""Which model a name means: by content where it can be read, else by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_model
from treadle.config import DEFAULT_MODEL
from treadle.sync.model_folders import is_same_model, local_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-model")


@pytest.fixture
def cached(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same model as Hugging Face's cache keeps it, under the id owner/cached."""
    repository = tmp_path / "hub" / "models--owner--cached"
    snapshot = shutil.copytree(model, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_copy_is_the_same_model_whatever_it_is_called(model: Path, tmp_path: Path) -> None:
    assert is_same_model(str(shutil.copytree(model, tmp_path / "copy")), model)


def test_other_values_are_another_model_even_under_the_same_name(model: Path, tmp_path: Path) -> None:
    assert not is_same_model(str(write_tiny_model(tmp_path / model.name, seed=1)), model)


def test_another_config_is_another_model(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert not is_same_model(str(other), model)


def test_an_id_in_the_cache_is_compared_by_content(model: Path, cached: Path, tmp_path: Path) -> None:
    assert local_folder("owner/cached") == cached
    assert is_same_model("owner/cached", model)
    assert is_same_model("owner/cached", cached)
    assert not is_same_model("owner/cached", write_tiny_model(tmp_path / "cached", seed=1))


@pytest.mark.parametrize(
    ("name", "served", "is_same"),
    [
        ("Owner/Tiny-Model", "/elsewhere/tiny-model", True),
        ("owner/tiny-model", "/cache/models--owner--tiny-model/snapshots/abc", True),
        ("owner/another", "/elsewhere/tiny-model", False),
        (DEFAULT_MODEL, f"/cache/{DEFAULT_MODEL}-0123abcd", True),
        (DEFAULT_MODEL, "/elsewhere/tiny-model", False),
        ("not an id at all", "/elsewhere/tiny-model", False),
    ],
)
def test_what_cannot_be_read_is_compared_by_name(name: str, served: str, is_same: bool) -> None:
    assert is_same_model(name, Path(served)) is is_same
