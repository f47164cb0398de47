"""Failed publishes in a real vLLM are detected. Other faults, with an engine that can have all of them:
tests/unit/sync/test_verify.py."""

from __future__ import annotations

import pytest
import torch

from tests.vllm.conftest import SAME
from tests.vllm.reference import load, logits_after
from treadle.config import TrainConfig
from treadle.errors import SyncError
from treadle.sync.protocol import EngineLink, TokenScores
from treadle.sync.verify import PublishVerifier

LAYER = "model.layers.1."
OUTPUT, GATE, UP = (f"{LAYER}{name}.weight" for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"))


class Trained:
    """The part of a trainer's policy that verification needs: a model in which every weight has changed."""

    serves_copies = False
    dtype = torch.float32

    def __init__(self, folder):
        self.model = load(folder)
        self.vocab_size = self.model.config.vocab_size
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(torch.randn_like(weight) * 0.05)

    device = torch.device("cpu")

    def served_shapes(self):
        return [(name, tuple(weight.shape)) for name, weight in self.model.named_parameters()]

    def served_weights(self):
        return ((name, weight.detach()) for name, weight in self.model.named_parameters())

    def score_tokens(self, token_ids):
        logprobs = torch.log_softmax(logits_after(self.model, token_ids[:1], [*token_ids[1:], 0]), -1)
        return TokenScores(logprobs[:-1].gather(1, torch.tensor(token_ids[1:])[:, None]).squeeze(1), logprobs[-1])


def publish(served, weights, written):
    """The version that is served now."""
    version = served(served.engine.status()).policy_version + 1
    served(served.engine.hold("keep", 60))
    for name, weight in written.items():
        weights[name].copy_(weight)
    served(served.engine.release(version))
    return version


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda new, old: {OUTPUT: old[OUTPUT]}, f"1 of .* weights differ, {OUTPUT}: skipped or half written"),
        (lambda new, _old: {GATE: new[UP], UP: new[GATE]}, f"{GATE} and {UP} have changed places in the engine"),
        (lambda _new, old: old, "it did not load them, was restarted meanwhile"),
    ],
    ids=["skipped", "swapped", "none came"],
)
def test_weights_that_vllm_has_otherwise_are_named(served, weights, fault, words):
    policy = Trained(served.folder)
    new, old = dict(policy.served_weights()), {name: weight.clone() for name, weight in weights.items()}
    version = publish(served, weights, new | fault(new, old))
    proof = PublishVerifier(TrainConfig(engine_url=served.url, canary_tolerance=SAME), EngineLink(served.url, 120.0))
    expected = proof.expect(policy, version)
    with pytest.raises(SyncError, match=words):
        proof.check(expected, version)
    version = publish(served, weights, new)
    verified = proof.check(proof.expect(policy, version), version)
    assert verified.canary_mean < SAME
