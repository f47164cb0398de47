"""Compute attention for packed rows without variable-length kernels: on a CPU, and in fp32 on CUDA.

`Blocks`, for short completions: batched products over dense blocks instead of a mask over the whole row. For G
completions of C tokens after P prompt tokens it costs G*C*(P+C), not (P+G*C)^2. On a CPU this is several times faster
than a masked scaled_dot_product_attention, especially backward. Prompts and completions are padded to the longest, and
probabilities are stored.

    prompts:      queries [N, kv, R*P]       keys [N, kv, P]           N groups, R query heads per kv head
    completions:  queries [N, kv, G, R*C]    keys [N, kv, G, P+C]      each completion's keys begin with its prompt's

Tokens are gathered into blocks and back by rows: a row is one head of one token.

`SdpaPlan`, for long completions: scaled_dot_product_attention piece by piece. Each prompt and each completion is a
piece: its queries see the pieces before it (root, prompt) and, causally, itself. Nothing is padded and no probabilities
are stored, so memory grows with tokens, not with pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from treadle.train.pack import Segment

FORBIDDEN = -1e30  # finite, so that rows of padding give unused numbers instead of NaN


@dataclass(frozen=True)
class Rows:
    """Index maps between rows of blocks and rows of tokens, for one number of heads."""

    of_blocks: Tensor  # the row of [T * heads] in each row of all blocks, prompts first
    of_tokens: Tensor  # the row of all blocks for each row of [T * heads]
    idle: Tensor  # block rows that are padding or repetitions of the root


@dataclass(frozen=True)
class Blocks:
    """Positions of packed tokens in the padded blocks. P: the longest prompt, C: the longest completion of a micro."""

    num_root: int  # the first columns of every prompt are the shared root
    prompt_NP: Tensor  # index into T; padding points at token 0
    completion_NGC: Tensor
    is_prompt_NP: Tensor  # real tokens; those of the root only in the first group
    is_completion_NGC: Tensor
    prompt_bias: Tensor  # [N, 1, 1, P, P], added to scores: causal, and no padding as key
    completion_bias: Tensor  # [N, 1, 1, 1, C, P + C]
    _rows: dict[Any, Rows] = field(default_factory=dict)  # computed by the first layer, used by all

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [T, heads, D], key and value [T, kv heads, D] -> [T, heads, D]; fp32 inside."""
        out: Tensor = BlockAttention.apply(query, key, value, self, scaling)
        return out

    def query_rows(self, num_heads: int, num_kv: int) -> Rows:
        if ("query", num_heads) not in self._rows:
            repeats = num_heads // num_kv
            heads = torch.arange(num_heads).view(num_kv, repeats)
            prompt = self.prompt_NP[:, None, None, :] * num_heads + heads[:, :, None]
            own = self.completion_NGC[:, None, :, None] * num_heads + heads[:, None, :, None]
            is_prompt = self.is_prompt_NP[:, None, None].expand(prompt.shape)
            is_own = self.is_completion_NGC[:, None, :, None].expand(own.shape)
            self._rows["query", num_heads] = _rows([(prompt, is_prompt), (own, is_own)])
        return self._rows["query", num_heads]

    def key_rows(self, num_kv: int) -> Rows:
        if ("key", num_kv) not in self._rows:
            num_completions = self.completion_NGC.shape[1]
            heads = torch.arange(num_kv)
            prompt = self.prompt_NP[:, None, :] * num_kv + heads[:, None]
            before = prompt[:, :, None].expand(-1, -1, num_completions, -1)
            own = self.completion_NGC[:, None] * num_kv + heads[:, None, None]
            is_prompt = self.is_prompt_NP[:, None].expand(prompt.shape)
            is_completion = self.is_completion_NGC[:, None].expand(own.shape)
            is_own = torch.cat([torch.zeros_like(before, dtype=torch.bool), is_completion], -1)
            self._rows["key", num_kv] = _rows([(prompt, is_prompt), (torch.cat([before, own], -1), is_own)])
        return self._rows["key", num_kv]


def _rows(blocks: Sequence[tuple[Tensor, Tensor]]) -> Rows:
    of_blocks = torch.cat([rows.reshape(-1) for rows, _ in blocks])
    is_own = torch.cat([owned.reshape(-1) for _, owned in blocks])
    places = torch.nonzero(is_own).squeeze(1)
    of_tokens = torch.empty(len(places), dtype=torch.long)
    of_tokens[of_blocks[places]] = places
    return Rows(of_blocks, of_tokens, torch.nonzero(~is_own).squeeze(1))


def num_pairs(segments: Sequence[Segment]) -> int:
    """Query-key pairs whose probabilities are stored for the backward pass, with padding."""
    num_root = segments[0].root[1] - segments[0].root[0]
    prompt = max(num_root + s.prompt[1] - s.prompt[0] for s in segments)
    most = max(len(s.completions) for s in segments)
    longest = max(end - start for s in segments for start, end in s.completions)
    return len(segments) * (prompt**2 + most * longest * (prompt + longest))


def plan_blocks(segments: Sequence[Segment]) -> Blocks:
    """Plan the blocks of a micro; every layer uses them."""
    num_groups = len(segments)
    root = segments[0].root
    num_root = root[1] - root[0]
    longest_prompt = max(1, *(num_root + s.prompt[1] - s.prompt[0] for s in segments))  # at least one column
    most = max(len(s.completions) for s in segments)
    longest = max(1, *(end - start for s in segments for start, end in s.completions))
    prompt = torch.zeros(num_groups, longest_prompt, dtype=torch.long)
    is_prompt = torch.zeros(num_groups, longest_prompt, dtype=torch.bool)
    prompt[:, :num_root] = torch.arange(*root)
    is_prompt[:, :num_root] = True
    completion = torch.zeros(num_groups, most, longest, dtype=torch.long)
    is_completion = torch.zeros(num_groups, most, longest, dtype=torch.bool)
    for n, segment in enumerate(segments):
        start, end = segment.prompt
        columns = slice(num_root, num_root + end - start)
        prompt[n, columns] = torch.arange(start, end)
        is_prompt[n, columns] = True
        for g, (start, end) in enumerate(segment.completions):
            completion[n, g, : end - start] = torch.arange(start, end)
            is_completion[n, g, : end - start] = True
    no_padding = torch.where(is_prompt, 0.0, FORBIDDEN)
    causal = _causal(longest).expand(num_groups, -1, -1)
    is_prompt[1:, :num_root] = False
    seen = torch.cat([no_padding[:, None].expand(-1, longest, -1), causal], -1)
    return Blocks(
        num_root=num_root,
        prompt_NP=prompt,
        completion_NGC=completion,
        is_prompt_NP=is_prompt,
        is_completion_NGC=is_completion,
        prompt_bias=(no_padding[:, None] + _causal(longest_prompt))[:, None, None],
        completion_bias=seen[:, None, None, None],
    )


class BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scaling: float) -> Tensor:
        layout = _BlockShapes(query, key, blocks)
        _, queries = layout.queries_of(query, scaling)
        _, keys = layout.keys_of(key)
        _, values = layout.keys_of(value)
        out, outs = layout.empty_queries(query.shape[-1])
        probs = []
        for place, bias in enumerate((blocks.prompt_bias, blocks.completion_bias)):
            scores = torch.bmm(queries[place], keys[place].mT)
            scores.view(layout.score_shapes[place]).add_(bias)
            probs.append(torch.softmax(scores, -1))
            torch.bmm(probs[place], values[place], out=outs[place])
        ctx.save_for_backward(query, key, value, *probs)
        ctx.blocks, ctx.scaling = blocks, scaling
        return layout.queries_back(out, query)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, *probs = ctx.saved_tensors
        layout = _BlockShapes(query, key, ctx.blocks)
        _, queries = layout.queries_of(query, ctx.scaling)
        _, keys = layout.keys_of(key)
        _, values = layout.keys_of(value)
        flat, d_outs = layout.queries_of(grads[0], 1.0)
        flat.index_fill_(0, layout.query_rows.idle, 0.0)  # padding and repetitions have no gradient
        d_query, d_queries = layout.empty_queries(query.shape[-1])
        d_key, d_keys = layout.empty_keys(query.shape[-1])
        d_value, d_values = layout.empty_keys(query.shape[-1])
        for place in range(2):
            torch.bmm(probs[place].mT, d_outs[place], out=d_values[place])
            d_scores = torch.bmm(d_outs[place], values[place].mT).mul_(probs[place])
            d_scores.addcmul_(probs[place], d_scores.sum(-1, keepdim=True), value=-1)
            torch.bmm(d_scores, keys[place], out=d_queries[place])
            torch.bmm(d_scores.mT, queries[place], out=d_keys[place])
        for gradients in (d_keys, d_values):
            layout.sum_shared(*gradients)
        return (
            layout.queries_back(d_query.mul_(ctx.scaling), query),
            layout.keys_back(d_key, key),
            layout.keys_back(d_value, value),
            None,
            None,
        )


class _BlockShapes:
    """Gathers tokens into blocks and back for the shapes of one layer. All blocks share one buffer."""

    def __init__(self, query: Tensor, key: Tensor, blocks: Blocks) -> None:
        num_heads, self._num_kv = query.shape[1], key.shape[1]
        self._blocks = blocks
        self.query_rows = blocks.query_rows(num_heads, self._num_kv)
        self.key_rows = blocks.key_rows(self._num_kv)
        repeats = num_heads // self._num_kv
        (n, p), (_, g, c) = blocks.prompt_NP.shape, blocks.completion_NGC.shape
        self._sizes = n, g
        self._query_shapes = ((n * self._num_kv, repeats * p), (n * self._num_kv * g, repeats * c))
        self._key_shapes = ((n * self._num_kv, p), (n * self._num_kv * g, p + c))
        self.score_shapes = ((n, self._num_kv, repeats, p, p), (n, self._num_kv, g, repeats, c, p + c))

    def queries_of(self, x: Tensor, scaling: float) -> tuple[Tensor, list[Tensor]]:
        rows = x.reshape(-1, x.shape[-1]).float()
        if scaling != 1.0:
            rows = rows * scaling
        flat = rows.index_select(0, self.query_rows.of_blocks)
        return flat, _split(flat, self._query_shapes)

    def keys_of(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        flat = x.reshape(-1, x.shape[-1]).float().index_select(0, self.key_rows.of_blocks)
        return flat, _split(flat, self._key_shapes)

    def empty_queries(self, num_dims: int) -> tuple[Tensor, list[Tensor]]:
        flat = torch.empty(len(self.query_rows.of_blocks), num_dims)
        return flat, _split(flat, self._query_shapes)

    def empty_keys(self, num_dims: int) -> tuple[Tensor, list[Tensor]]:
        flat = torch.empty(len(self.key_rows.of_blocks), num_dims)
        return flat, _split(flat, self._key_shapes)

    def queries_back(self, flat: Tensor, like: Tensor) -> Tensor:
        return flat.index_select(0, self.query_rows.of_tokens).to(like.dtype).view(like.shape)

    def keys_back(self, flat: Tensor, like: Tensor) -> Tensor:
        return flat.index_select(0, self.key_rows.of_tokens).to(like.dtype).view(like.shape)

    def sum_shared(self, d_prompt: Tensor, d_completion: Tensor) -> None:
        """Prompts are keys of all their completions, and the root of all groups: sum their gradients, the root's in the
        first group."""
        num_groups, num_completions = self._sizes
        num_prompt = d_prompt.shape[1]
        prompt = d_prompt.view(num_groups, self._num_kv, num_prompt, -1)
        copies = d_completion.view(num_groups, self._num_kv, num_completions, -1, d_completion.shape[-1])
        prompt += copies[:, :, :, :num_prompt].sum(2)
        root = slice(0, self._blocks.num_root)
        prompt[0, :, root] = prompt[:, :, root].sum(0)


def _split(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Split a buffer of rows into batches of rows."""
    sizes = [batch * rows for batch, rows in shapes]
    parts = flat.split(sizes)
    return [part.view(*shape, flat.shape[-1]) for part, shape in zip(parts, shapes, strict=True)]


def _causal(size: int) -> Tensor:
    return torch.full((size, size), FORBIDDEN).triu(1)


# ---- pieces


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
