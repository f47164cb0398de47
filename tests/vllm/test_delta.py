"""Load changed elements into real vLLM, which fuses several weights into one parameter."""

from __future__ import annotations

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from treadle.sync.delta import DELTA_FROM, as_tensors, find_changes
from treadle.sync.fingerprint import fingerprints as fingerprints_of

LAYER = "model.layers.1"
NAMES = (
    f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.self_attn.v_proj.weight",
    f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight", f"{LAYER}.input_layernorm.weight",
)  # fmt: skip
EMBEDDING, TIED_NAME = "model.embed_tokens.weight", "lm_head.weight"


def post(served, route, **body):
    return httpx.post(served.url + route, json=body, timeout=300, trust_env=False)


def fingerprints(served):
    return post(served, "/bridge/fingerprints", policy_version=0).json()["fingerprints"]


def version_of(served):
    return httpx.get(served.url + "/bridge/info", timeout=60, trust_env=False).json()["update_count"]


@pytest.fixture
def first_weights(served):
    """The served weights; reloaded after the test."""
    yield load_file(served.folder / "model.safetensors")
    assert post(served, "/reload_weights", path=str(served.folder)).status_code == 200


def change_some(weights, names):
    """Change a few elements of each weight, including the first and the last."""
    changed = {name: weights[name].clone() for name in names}
    for weight in changed.values():
        weight.view(-1)[[0, 7, -1]] = torch.tensor([0.5, -0.0, 0.25])
    return changed


def test_a_delta_changes_only_its_elements_and_needs_its_version(served, first_weights, tmp_path):
    before, version = fingerprints(served), version_of(served)
    changed = change_some(first_weights, [*NAMES, EMBEDDING])
    elements = {name: find_changes(weight, first_weights[name]) for name, weight in changed.items()}
    elements[TIED_NAME] = elements.pop(EMBEDDING)  # a checkpoint may use either name
    file = tmp_path / "model.safetensors"

    save_file(as_tensors(elements), file, metadata={DELTA_FROM: str(version + 1)})
    refused = post(served, "/reload_weights", path=str(tmp_path), policy_version=version + 1)
    assert refused.status_code == 400
    assert f"since version {version + 1}, and the engine has version {version}" in refused.json()["error"]
    assert (fingerprints(served), version_of(served)) == (before, version)

    save_file(as_tensors(elements), file, metadata={DELTA_FROM: str(version)})
    taken = post(served, "/reload_weights", path=str(tmp_path), policy_version=version + 1)
    assert taken.json()["policy_version"] == version + 1, taken.text
    assert fingerprints(served) == before | fingerprints_of(changed.items(), 0)
