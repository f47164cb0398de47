"""Does this model compute packed rollouts as it computes them alone? Asked once, before anything is trained.

A model whose layers mix tokens outside of attention (convolutions, recurrent states), or that does something to its
logits after the output layer, would be trained on numbers that are not its own, and nothing would look wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treadle.config import TrainConfig
from treadle.errors import ModelError
from treadle.train.attention import OTHER_MODEL
from treadle.train.pack import Micro, pack
from treadle.wire.groups import IGNORED, ScoredGroup

PROMPT, COMPLETIONS = 12, (20, 28)
# What rounding explains is measured: the same rollouts through two of the model's own attentions. Packed rows may
# differ by a few times as much, or by next to nothing.
ROUNDINGS, NEXT_TO_NOTHING = 4.0, 1e-4


def sample_group(vocab_size: int) -> ScoredGroup:
    """Two rollouts of one prompt, of random tokens: what a packed row can get wrong shows with any."""
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocab_size, (count,), generator=draw).tolist()

    prompt = tokens(PROMPT)
    completions = [tokens(length) for length in COMPLETIONS]
    return ScoredGroup(
        tokens=[prompt + completion for completion in completions],
        masks=[[IGNORED] * PROMPT + completion for completion in completions],
        scores=[0.0, 1.0],
    )


@dataclass(frozen=True)
class Expected:
    logprobs_L: Tensor  # of the sample, each rollout alone, by the model's own code from end to end
    rounding: float  # how far two of its own ways to compute them are apart, in the mean


def ask_the_model(model: Any) -> Expected:
    """Before anything is plugged into it."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    by_hand_L = _plain_logprobs(model)
    model.set_attn_implementation(own)
    logprobs_L = _plain_logprobs(model)
    return Expected(logprobs_L, float((logprobs_L - by_hand_L).abs().mean()))


@torch.no_grad()
def _plain_logprobs(model: Any) -> Tensor:
    device = next(model.parameters()).device
    logprobs = []
    for tokens in sample_group(model.config.get_text_config().vocab_size).tokens:
        ids = torch.tensor([tokens], device=device)
        table = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)
        logprobs.append(table[PROMPT - 1 : -1].gather(1, ids[0, PROMPT:, None]).squeeze(1))
    return torch.cat(logprobs)


def packed_sample(model: Any) -> Micro:
    config = TrainConfig(share_prompts="on", micro_tokens=1000)
    (micro,) = pack([sample_group(model.config.get_text_config().vocab_size)], config).micros
    return micro


def check_agreement(model: Any, packed_L: Tensor, expected: Expected) -> None:
    mixing = next((name for name, module in model.named_modules() if isinstance(module, _MIXING)), None)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    mixing = mixing or next((kind for kind in kinds if not kind.endswith("attention") or "linear" in kind), None)
    if mixing is not None:
        raise ModelError(f"the model mixes neighbouring tokens outside of attention ({mixing})", fix=OTHER_MODEL)
    gap = float((packed_L - expected.logprobs_L).abs().mean())
    if not gap <= ROUNDINGS * expected.rounding + NEXT_TO_NOTHING:
        raise ModelError(
            f"packed rollouts and single ones differ by {gap:.3f} nats in the mean, where rounding explains "
            f"{expected.rounding:.4f}: the trainer would compute this model wrongly (it changes its logits after the "
            "output layer, or has layers that are no attention)",
            fix=OTHER_MODEL,
        )


_MIXING = (nn.Conv1d, nn.RNNBase)
