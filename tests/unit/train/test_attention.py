"""Every attention implementation against one masked softmax over the whole packed row."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from treadle.errors import ConfigError
from treadle.train.attention import GATHERING, GatherKeys, attend_flash4, choose_kind, plan_attention
from treadle.train.attention_cpu import Blocks, SdpaPlan, pieces_of
from treadle.train.pack import Segment

CPU = torch.device("cpu")


def lay_segments(num_root, prompt_length, completions):
    segments, end = [], num_root
    for lengths in completions:
        start, end = end, end + prompt_length
        spans = []
        for length in lengths:
            spans.append((end, end + length))
            end += length
        segments.append(Segment((0, num_root), (start, start + prompt_length), tuple(spans)))
    return segments, end


def visible(segments, num_root, num_tokens):
    mask = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    mask[:num_root, :num_root] = torch.ones(num_root, num_root).tril().bool()
    mask[num_root:, :num_root] = True
    for s in segments:
        a, b = s.prompt
        mask[a:b, a:b] = torch.ones(b - a, b - a).tril().bool()
        for c, d in s.completions:
            mask[c:d, a:b] = True
            mask[c:d, c:d] = torch.ones(d - c, d - c).tril().bool()
    return mask


@pytest.mark.parametrize("kind", ["blocks", "sdpa"])
@pytest.mark.parametrize(("num_root", "prompt_length"), [(0, 0), (0, 5), (3, 4), (4, 0)])
def test_packed_attention_equals_a_masked_softmax_forward_and_backward(kind, num_root, prompt_length):
    torch.manual_seed(0)
    segments, end = lay_segments(num_root, prompt_length, ([3, 1, 7], [2, 2]))
    query, key, value = (torch.randn(end, heads, 8, requires_grad=True) for heads in (6, 2, 2))
    upstream = torch.randn(end, 6, 8)
    rows = [x.transpose(0, 1)[None] for x in (query, key, value)]
    mask = visible(segments, num_root, end)
    plain = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask, scale=0.3, enable_gqa=True)
    ours = plan_attention(segments, CPU, kind)["plan"].attend(query, key, value, 0.3)
    expected = plain[0].transpose(0, 1)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(ours, (query, key, value), upstream)
    for got, wanted in zip(grads, torch.autograd.grad(expected, (query, key, value), upstream), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_root", "prompt_length"), [(0, 0), (0, 5), (3, 4), (4, 0)])
def test_the_plan_for_variable_length_attention_names_every_visible_key(num_root, prompt_length):
    """The kernel needs a GPU, its arguments do not: the keys of each piece end with the piece's own queries."""
    segments, end = lay_segments(num_root, prompt_length, ([3, 1, 7], [2, 2]))
    plan = plan_attention(segments, CPU, "varlen")
    keys = plan["token_K"] if plan["token_K"] is not None else torch.arange(end)
    got = torch.zeros(end, end, dtype=torch.bool)
    starts_q, starts_k = plan["starts_q"].tolist(), plan["starts_k"].tolist()
    for i in range(len(starts_q) - 1):
        num_queries, num_keys = starts_q[i + 1] - starts_q[i], starts_k[i + 1] - starts_k[i]
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)  # aligned at the end
        rows = torch.arange(starts_q[i], starts_q[i + 1])
        got[rows[:, None], keys[starts_k[i] : starts_k[i + 1]][None, :]] = seen
    assert torch.equal(got, visible(segments, num_root, end))
    assert plan["longest_k"] == max(p.num_keys for p in pieces_of(segments))


def test_the_gradient_of_gathered_keys_is_the_sum_over_their_copies():
    segments, end = lay_segments(3, 4, ([3, 1, 7], [2, 2]))
    plan = plan_attention(segments, CPU, "varlen")
    gathering = [plan[name] for name in GATHERING]
    token_K, _, shared_S, place_D, _ = gathering
    x = torch.randn(end, 2, 8, dtype=torch.float64, requires_grad=True)
    gathered = GatherKeys.apply(x, *gathering)
    assert torch.equal(gathered, x[token_K])
    upstream = torch.randn(gathered.shape, dtype=torch.float64)
    (got,) = torch.autograd.grad(gathered, x, upstream)
    wanted = torch.zeros_like(x).index_add(0, token_K, upstream)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)  # summed in fp32
    assert len(shared_S) == 3 + 2 * 4
    assert len(place_D) == len(token_K) - end  # as many as there are further copies, no padding


def test_short_completions_go_in_blocks_and_long_ones_piece_by_piece():
    short, _ = lay_segments(0, 90, [[24] * 8] * 8)
    long, _ = lay_segments(0, 90, [[900, 100, 400]] * 8)
    assert isinstance(plan_attention(short, CPU, "auto")["plan"], Blocks)
    assert isinstance(plan_attention(long, CPU, "auto")["plan"], SdpaPlan)


def test_a_card_has_variable_length_attention_for_half_precision_only():
    card = torch.device("cuda")
    odd = 48  # a head size FlashAttention 4 is not used for
    assert choose_kind("varlen", card, torch.bfloat16, odd) == "varlen"
    assert choose_kind("auto", card, torch.float32, odd) == "auto"
    assert choose_kind("sdpa", card, torch.bfloat16, odd) == "sdpa"
    for kind in ("varlen", "flash4"):
        with pytest.raises(ConfigError, match="no variable-length attention"):
            choose_kind(kind, CPU, torch.bfloat16, 64)


@pytest.mark.parametrize("window", [-1, 100])
def test_flash4_is_an_operator_that_compilers_can_see_through(window):
    """Without a card only its shapes can be seen, and that they are those of queries, keys and values."""
    with FakeTensorMode():
        query = torch.empty(30, 4, 64, dtype=torch.bfloat16, requires_grad=True)
        key, value = (torch.empty(50, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        starts = torch.zeros(3, dtype=torch.int32)
        attended, sums = attend_flash4(query, key, value, starts, starts, 20, 30, 0.1, window)
        gradients = torch.autograd.grad(attended.sum(), (query, key, value))
    assert attended.shape == query.shape
    assert sums.shape == (4, 30)
    assert [g.shape for g in gradients] == [query.shape, key.shape, value.shape]
