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
    """Index maps between rows of blocks and rows of tokens, for one number of heads. All blocks share one buffer: those
    of the prompts, then those of the completions."""

    of_blocks: Tensor  # the row of [T * heads] in each row of all blocks
    of_tokens: Tensor  # the row of all blocks for each row of [T * heads]
    idle: Tensor  # block rows that are padding or repetitions of the root
    shapes: tuple[tuple[int, int], ...]  # (number of blocks, rows of each) of prompts and of completions

    @classmethod
    def of(cls, blocks: Sequence[tuple[Tensor, Tensor]], num_row_dims: int) -> Rows:
        """`blocks`: (row of [T * heads], is a real token), of prompts and of completions; the last `num_row_dims`
        dimensions are the rows of a block."""
        of_blocks = torch.cat([rows.reshape(-1) for rows, _ in blocks])
        is_own = torch.cat([owned.reshape(-1) for _, owned in blocks])
        places = torch.nonzero(is_own).squeeze(1)
        of_tokens = torch.empty(len(places), dtype=torch.long)
        of_tokens[of_blocks[places]] = places
        shapes = [(rows.shape[:-num_row_dims].numel(), rows.shape[-num_row_dims:].numel()) for rows, _ in blocks]
        return cls(of_blocks, of_tokens, torch.nonzero(~is_own).squeeze(1), tuple(shapes))

    def split(self, flat: Tensor) -> list[Tensor]:
        """The buffer of all rows as blocks of prompts and blocks of completions: [blocks, rows, D] each."""
        parts = flat.split([batch * rows for batch, rows in self.shapes])
        return [part.view(*shape, flat.shape[-1]) for part, shape in zip(parts, self.shapes, strict=True)]

    def gather(self, x: Tensor, scaling: float = 1.0) -> Tensor:
        """Tokens [T, heads, D] as the buffer of all rows, in fp32."""
        rows = x.reshape(-1, x.shape[-1]).float()
        return (rows if scaling == 1.0 else rows * scaling).index_select(0, self.of_blocks)

    def back(self, flat: Tensor, like: Tensor) -> Tensor:
        """The buffer of all rows as tokens, in the shape and dtype of `like`."""
        return flat.index_select(0, self.of_tokens).to(like.dtype).view(like.shape)


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
        if ("query", num_heads, num_kv) not in self._rows:
            repeats = num_heads // num_kv
            heads = torch.arange(num_heads).view(num_kv, repeats)
            prompt = self.prompt_NP[:, None, None, :] * num_heads + heads[:, :, None]
            own = self.completion_NGC[:, None, :, None] * num_heads + heads[:, None, :, None]
            is_prompt = self.is_prompt_NP[:, None, None].expand(prompt.shape)
            is_own = self.is_completion_NGC[:, None, :, None].expand(own.shape)
            self._rows["query", num_heads, num_kv] = Rows.of([(prompt, is_prompt), (own, is_own)], num_row_dims=2)
        return self._rows["query", num_heads, num_kv]

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
            own = torch.cat([before, own], -1)
            self._rows["key", num_kv] = Rows.of([(prompt, is_prompt), (own, is_own)], num_row_dims=1)
        return self._rows["key", num_kv]

    def sum_shared(self, d_prompt: Tensor, d_completion: Tensor) -> None:
        """Prompts are keys of all their completions, and the root of all groups: sum their gradients, the root's in the
        first group."""
        num_groups, num_completions, _ = self.completion_NGC.shape
        _, num_prompt, num_dims = d_prompt.shape
        prompt = d_prompt.view(num_groups, -1, num_prompt, num_dims)
        copies = d_completion.view(num_groups, prompt.shape[1], num_completions, -1, num_dims)
        prompt += copies[:, :, :, :num_prompt].sum(2)
        root = slice(0, self.num_root)
        prompt[0, :, root] = prompt[:, :, root].sum(0)


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
    size = max(longest, longest_prompt)
    causal = torch.full((size, size), FORBIDDEN).triu(1)
    is_prompt[1:, :num_root] = False
    own = causal[:longest, :longest].expand(num_groups, -1, -1)
    seen = torch.cat([no_padding[:, None].expand(-1, longest, -1), own], -1)
    return Blocks(
        num_root=num_root,
        prompt_NP=prompt,
        completion_NGC=completion,
        is_prompt_NP=is_prompt,
        is_completion_NGC=is_completion,
        prompt_bias=(no_padding[:, None] + causal[:longest_prompt, :longest_prompt])[:, None, None],
        completion_bias=seen[:, None, None, None],
    )


class BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scaling: float) -> Tensor:
        query_rows, key_rows = blocks.query_rows(query.shape[1], key.shape[1]), blocks.key_rows(key.shape[1])
        flat = query_rows.gather(query, scaling)
        out = torch.empty_like(flat)
        queries, outs = query_rows.split(flat), query_rows.split(out)
        keys, values = (key_rows.split(key_rows.gather(x)) for x in (key, value))
        num_kv, repeats = key.shape[1], query.shape[1] // key.shape[1]
        (n, p), (_, g, c) = blocks.prompt_NP.shape, blocks.completion_NGC.shape
        shapes = ((n, num_kv, repeats, p, p), (n, num_kv, g, repeats, c, p + c))
        probs = []
        for place, bias in enumerate((blocks.prompt_bias, blocks.completion_bias)):
            scores = torch.bmm(queries[place], keys[place].mT)
            scores.view(shapes[place]).add_(bias)
            probs.append(torch.softmax(scores, -1))
            torch.bmm(probs[place], values[place], out=outs[place])
        ctx.save_for_backward(query, key, value, *probs)
        ctx.blocks, ctx.scaling = blocks, scaling
        return query_rows.back(out, query)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, *probs = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        query_rows, key_rows = blocks.query_rows(query.shape[1], key.shape[1]), blocks.key_rows(key.shape[1])
        inputs = query_rows.gather(query, ctx.scaling), key_rows.gather(key), key_rows.gather(value)
        d_query, d_key, d_value = map(torch.empty_like, inputs)
        d_out = query_rows.gather(grads[0])
        d_out.index_fill_(0, query_rows.idle, 0.0)  # padding and repetitions have no gradient
        queries, d_outs, d_queries = (query_rows.split(flat) for flat in (inputs[0], d_out, d_query))
        keys, values, d_keys, d_values = (key_rows.split(flat) for flat in (*inputs[1:], d_key, d_value))
        for place in range(2):
            torch.bmm(probs[place].mT, d_outs[place], out=d_values[place])
            d_scores = torch.bmm(d_outs[place], values[place].mT).mul_(probs[place])
            d_scores.addcmul_(probs[place], d_scores.sum(-1, keepdim=True), value=-1)
            torch.bmm(d_scores, keys[place], out=d_queries[place])
            torch.bmm(d_scores.mT, queries[place], out=d_keys[place])
        for gradients in (d_keys, d_values):
            blocks.sum_shared(*gradients)
        return (
            query_rows.back(d_query.mul_(ctx.scaling), query),
            key_rows.back(d_key, key),
            key_rows.back(d_value, value),
            None,
            None,
        )


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
        masks = {
            (q, k): None if q == k else torch.ones(q, k, dtype=torch.bool, device=device).tril(k - q)
            for q, k in {(p.num_queries, p.num_keys) for p in pieces}
        }
        return cls(pieces, tuple(masks[p.num_queries, p.num_keys] for p in pieces))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [T, heads, D], key and value [T, kv heads, D] -> [T, heads, D]; fp32 inside."""
        q, k, v = (x.float().transpose(0, 1)[None] for x in (query, key, value))
        outputs = []
        for piece, mask in zip(self.pieces, self.masks, strict=True):
            spans = [slice(*span) for span in (*piece.before, piece.own)]
            keys, values = (torch.cat([x[:, :, span] for span in spans], 2) for x in (k, v))
            outputs.append(
                scaled_dot_product_attention(
                    q[:, :, spans[-1]],
                    keys,
                    values,
                    attn_mask=mask,
                    is_causal=mask is None,
                    scale=scaling,
                    enable_gqa=True,
                )
            )
        return torch.cat(outputs, 2)[0].transpose(0, 1).to(query.dtype)
