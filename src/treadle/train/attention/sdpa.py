"""Compute attention piece by piece with scaled_dot_product_attention, for long completions on a CPU.

Each prompt and each completion is a piece: its queries see the pieces before it (root, prompt) and, causally, itself.
Nothing is padded and no probabilities are stored, so memory grows with tokens, not with pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from treadle.train.pack import Segment


@dataclass(frozen=True)
class Piece:
    """Queries at `own`, which see all of `before`, and themselves causally. Pieces are in the order of the packed
    row."""

    before: tuple[tuple[int, int], ...]
    own: tuple[int, int]

    @property
    def num_queries(self) -> int:
        return self.own[1] - self.own[0]

    @property
    def num_keys(self) -> int:
        return self.num_queries + sum(end - start for start, end in self.before)


def pieces_of(segments: Sequence[Segment]) -> list[Piece]:
    """The packed row as pieces, without the empty ones.

    >>> from treadle.train.pack import Segment
    >>> [p.before for p in pieces_of([Segment((0, 2), (2, 4), ((4, 6), (6, 7)))])]
    [(), ((0, 2),), ((0, 2), (2, 4)), ((0, 2), (2, 4))]
    """
    root = segments[0].root
    pieces = [Piece((), root)]
    for segment in segments:
        pieces.append(Piece((root,), segment.prompt))
        pieces += [Piece((root, segment.prompt), completion) for completion in segment.completions]
    return [
        Piece(tuple(span for span in piece.before if span[0] < span[1]), piece.own)
        for piece in pieces
        if piece.num_queries
    ]


@dataclass(frozen=True)
class SdpaPlan:
    pieces: tuple[Piece, ...]
    masks: tuple[Tensor | None, ...]  # by piece: which keys a query sees; None: causal

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> SdpaPlan:
        pieces = tuple(pieces_of(segments))
        masks = {shape: _mask(*shape, device) for shape in {(p.num_queries, p.num_keys) for p in pieces}}
        return cls(pieces, tuple(masks[p.num_queries, p.num_keys] for p in pieces))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [T, heads, D], key and value [T, kv heads, D] -> [T, heads, D]; fp32 inside."""
        q, k, v = (x.float().transpose(0, 1)[None] for x in (query, key, value))
        outputs = []
        for piece, mask in zip(self.pieces, self.masks, strict=True):
            outputs.append(
                scaled_dot_product_attention(
                    q[:, :, slice(*piece.own)],
                    _gather(k, piece),
                    _gather(v, piece),
                    attn_mask=mask,
                    is_causal=mask is None,
                    scale=scaling,
                    enable_gqa=True,
                )
            )
        return torch.cat(outputs, 2)[0].transpose(0, 1).to(query.dtype)


def _gather(x: Tensor, piece: Piece) -> Tensor:
    return torch.cat([x[:, :, slice(*span)] for span in (*piece.before, piece.own)], 2)


def _mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
    if num_queries == num_keys:
        return None
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
