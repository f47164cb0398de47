"""One optimizer step's gradient: every micro forward and backward, the loss a mean over the whole step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from treadle.config import TrainConfig
from treadle.train.chance import undone_by_a_stop
from treadle.train.loss import LossTokens, policy_loss
from treadle.train.loss_stats import Stats
from treadle.train.pack import Micro, PackedBatch
from treadle.train.policy import Policy
from treadle.train.reference import Reference


class FrozenLogprobs:
    """What stays fixed while a batch is trained on, however often: the reference's logprobs, and the policy's own from
    before the first update. Kept by micro, since later epochs go through the same ones."""

    def __init__(self, reference: Reference | None = None) -> None:
        self._reference = reference
        self._of_reference: dict[int, Tensor] = {}
        self.own: dict[int, Tensor] = {}  # of this rank's micros, by their place in the batch

    def add_to(self, place: int, micro: Micro, policy: Policy) -> LossTokens:
        if self._reference is not None and place not in self._of_reference:
            self._of_reference[place] = self._reference(micro)
        tokens = micro.loss_tokens
        return replace(
            tokens,
            rollout_logprobs_L=tokens.rollout_logprobs_L.to(policy.device),
            old_logprobs_L=self.own.get(place),
            reference_logprobs_L=self._of_reference.get(place),
            advantages_L=tokens.advantages_L.to(policy.device),
            weights_L=tokens.weights_L.to(policy.device),
            sequences_L=tokens.sequences_L.to(policy.device),
        )

    def keep(self, place: int, logprobs_L: Tensor) -> None:
        """Only the first epoch's."""
        self.own.setdefault(place, logprobs_L.detach())


def accumulate_gradients(
    policy: Policy,
    batch: PackedBatch,
    config: TrainConfig,
    frozen: FrozenLogprobs | None = None,
    check_stop: Callable[[], None] = lambda: None,
) -> Stats:
    """Backward through every micro; what they add up to does not depend on how the batch was split.

    Of several ranks each takes its share of the micros; the gradients stay where they are until the optimizer's step.
    """
    frozen = frozen or FrozenLogprobs()
    stats = Stats()
    with undone_by_a_stop(), policy.ranks.agreeing(check_stop), policy.computing():
        for place in policy.ranks.own([micro.cost for micro in batch.micros]):
            check_stop()
            micro = batch.micros[place]
            tokens = frozen.add_to(place, micro, policy)
            logprobs_L, entropy_L = policy.score(micro)
            loss, of_micro = policy_loss(logprobs_L, entropy_L, tokens, config)
            loss.backward()
            frozen.keep(place, logprobs_L)
            stats = stats.add(of_micro)
    return policy.ranks.total(stats)
