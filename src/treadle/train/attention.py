"""Choose and apply attention for packed rows: each completion sees the root, its group's prompt and itself.

    on a CPU    short completions: dense blocks; long ones: piece by piece (attention_cpu.py)
    on CUDA     variable-length kernels without padding: FlashAttention 4 if it is installed and supports the card, else
                torch's; fp32, which has no such kernel, piece by piece

The plan of a micro is made once and passed to every layer through arguments of the model's forward.

For variable-length kernels, queries are the packed row. Keys and values are too, unless prompts are shared: then each
piece's keys are gathered (root, prompt, own), and the kernel's causal mask, aligned at the end, is correct.

FlashAttention 4 is faster on Hopper and Blackwell. torch can switch to it, but only for one version of it; as custom
operators it works with every torch and with torch.compile. Its private backward function is the one that torch calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from treadle.errors import ConfigError, MissingExtra, ModelError, UserError
from treadle.train.attention_cpu import SdpaPlan, num_pairs, pieces_of, plan_blocks
from treadle.train.context_parallel import ContextGroup
from treadle.train.pack import Segment
from treadle.train.requirements import has_flash4

ATTENTION = "treadle_packed"
MAX_BLOCK_PAIRS = 1_000_000  # probabilities that dense blocks store, per head and layer
# Features that change the scores: such a model would be trained on other numbers than it is served with.
_UNSUPPORTED = {"softcap": "soft-capped scores", "s_aux": "attention sinks", "position_bias": "position biases"}

OTHER_MODEL = "use a model of another family (Llama, Qwen, Mistral, SmolLM)"

AttentionKind = Literal["auto", "blocks", "sdpa", "varlen", "flash4"]
VARIABLE_LENGTH = ("varlen", "flash4")  # kernels that support compiled layers
HEAD_SIZES = (64, 128)  # of FlashAttention 4: those that tests compare with torch's kernel
FIRST_CARD = (9, 0)  # compute capability: Hopper
# torch 2.11 detects fewer key and value heads; later versions need a flag.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
GATHERING = ("token_K", "place_T", "shared_S", "place_D", "slot_D")  # see `plan_gathering`


def plan_attention(segments: Sequence[Segment], device: torch.device, kind: AttentionKind) -> dict[str, Any]:
    """Arguments of the model's forward for the attention of one micro."""
    if kind in VARIABLE_LENGTH:
        return {**plan_varlen(segments, device), "use_flash4": kind == "flash4"}
    few_pairs = num_pairs(segments) <= MAX_BLOCK_PAIRS
    if kind == "blocks" or (kind == "auto" and device.type == "cpu" and few_pairs):
        return {"plan": plan_blocks(segments)}
    return {"plan": SdpaPlan.of(segments, device)}


def choose_kind(requested: AttentionKind, device: torch.device, dtype: torch.dtype, head_size: int) -> AttentionKind:
    """Variable-length attention if there is a kernel; else "auto", which is decided by the size of each micro."""
    has_kernel = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if requested in VARIABLE_LENGTH and not has_kernel:
        raise ConfigError(f"there is no variable-length attention for {dtype} on {device.type}", fix="--attention auto")
    if requested == "blocks" and device.type != "cpu":
        raise ConfigError("attention in blocks is for CPUs", fix="--attention auto")
    if requested == "flash4" or (requested == "auto" and has_kernel):
        problem = flash4_problem(device, head_size)
        if problem is not None and requested == "flash4":
            raise problem
        return "varlen" if problem is not None else "flash4"
    return requested


def head_size(config: Any) -> int:
    """Size of an attention head, given or implied by a model's configuration."""
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def install_attention(model: Any) -> None:
    """Make `model` use packed attention, through transformers' attention interface."""
    AttentionInterface.register(ATTENTION, attend)
    model.set_attn_implementation(ATTENTION)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float,
    plan: Any = None,
    sliding_window: int | None = None,
    context: ContextGroup | None = None,
    num_tokens: int = 0,
    **more: Any,
) -> tuple[Tensor, None]:
    """Called by transformers in every layer: [1, heads, T, D] in, [1, T, heads, D] out. `context`: T are the tokens of
    this rank, of `num_tokens`."""
    for name, meaning in _UNSUPPORTED.items():
        if more.get(name) is not None:
            raise ModelError(f"the model's attention has {meaning}, which the trainer does not do", fix=OTHER_MODEL)
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    if context is None:
        return _attend_rows(*rows, plan=plan, scaling=scaling, sliding_window=sliding_window, more=more)[None], None
    attend_rows = partial(_attend_rows, plan=plan, scaling=scaling, sliding_window=sliding_window, more=more)
    return context.attend(*rows, num_tokens, attend_rows)[None], None


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Any,
    scaling: float,
    sliding_window: int | None,
    more: Mapping[str, Any],
) -> Tensor:
    if plan is not None:
        if sliding_window is not None and query.shape[0] > sliding_window:
            raise ModelError(
                f"the model sees only the last {sliding_window} tokens, which the CPU's attention does not do",
                fix="train on a GPU, or lower --train.micro-tokens to the window",
            )
        out: Tensor = plan.attend(query, key, value, scaling)
        return out
    if "starts_q" not in more:
        raise ModelError("the model does not hand the packing to its attention", fix=OTHER_MODEL)
    names = ("starts_q", "starts_k", "longest_q", "longest_k", "use_flash4", *GATHERING)
    arguments = {name: more[name] for name in names}
    window = -1 if sliding_window is None else sliding_window - 1
    return attend_varlen(query, key, value, scaling, window, **arguments)


# ---- FlashAttention 4


def flash4_problem(device: torch.device, head_size: int) -> UserError | None:
    """Why FlashAttention 4 cannot be used; None if it can."""
    has_card = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CARD
    if not has_card or head_size not in HEAD_SIZES:
        return ConfigError(
            f"FlashAttention 4 is for Hopper and Blackwell cards and heads of {HEAD_SIZES}, not {head_size} here",
            fix="--attention auto",
        )
    if not has_flash4():
        return MissingExtra("--attention flash4 needs flash-attn-4", fix="pip install 'treadle[gpu]'")
    return None


@torch.library.custom_op("treadle::flash4", mutates_args=())
def attend_flash4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """(attended [T, heads, D], log-sum-exp [heads, T]). `window` -1: unlimited."""
    from flash_attn.cute import flash_attn_varlen_func

    attended, sums = flash_attn_varlen_func(
        query, key, value, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=longest_q,
        max_seqlen_k=longest_k, softmax_scale=scaling, return_lse=True, **_mask(window),
    )  # fmt: skip
    return attended, sums


@attend_flash4.register_fake
def _shapes(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@torch.library.custom_op("treadle::flash4_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    sums: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    mask = _mask(window)
    left, right = mask.get("window_size", (None, None))
    d_query, d_key, d_value = _flash_attn_bwd(
        query, key, value, attended, gradient, sums, scaling, mask["causal"], window_size_left=left,
        window_size_right=right, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
    )  # fmt: skip
    return d_query, d_key, d_value


@_backward.register_fake
def _gradient_shapes(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts_q, starts_k, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, starts_q, starts_k)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.numbers), *[None] * 6


attend_flash4.register_autograd(_gradients, setup_context=_keep)


def _mask(window: int) -> dict[str, Any]:
    return {"causal": True} if window == -1 else {"causal": False, "window_size": (window, 0)}


# ---- plans


def plan_varlen(segments: Sequence[Segment], device: torch.device) -> dict[str, Any]:
    """Arguments of `attend_varlen`, as plain tensors and numbers: torch.compile's guards fail on objects and on
    optional tuples (torch 2.11).

    `starts_q` and `starts_k` have the start of each piece, and the end of the last; without shared prompts the keys are
    the packed row itself.
    """
    pieces = pieces_of(segments)
    starts_q = starts_k = _starts([piece.num_queries for piece in pieces], device)
    gathering: dict[str, Tensor | None] = dict.fromkeys(GATHERING)
    if any(piece.before for piece in pieces):
        starts_k = _starts([piece.num_keys for piece in pieces], device)
        tokens = np.concatenate([np.arange(*span) for piece in pieces for span in (*piece.before, piece.own)])
        gathering = plan_gathering(tokens, pieces[-1].own[1], device)
    return {
        "starts_q": starts_q,
        "starts_k": starts_k,
        "longest_q": max(piece.num_queries for piece in pieces),
        "longest_k": max(piece.num_keys for piece in pieces),
        **gathering,
    }


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


def plan_gathering(token_K: np.ndarray, num_tokens: int, device: torch.device) -> dict[str, Tensor | None]:
    """Which packed token each gathered key is, and where each token's keys are.

    token_K    the packed token that each gathered key is
    place_T    index of the first copy of each token among the gathered keys
    shared_S   tokens that were gathered more than once (roots and prompts)
    place_D    indices of their additional copies
    slot_D     index into S of the token that each of these is a copy of
    """
    order_K = np.argsort(token_K, kind="stable")
    counts_T = np.bincount(token_K, minlength=num_tokens)
    first_T = np.concatenate([[0], counts_T.cumsum()[:-1]])
    shared_S = np.flatnonzero(counts_T > 1)
    is_further_K = np.ones(len(token_K), dtype=bool)
    is_further_K[first_T] = False
    slot_D = np.repeat(np.arange(len(shared_S)), counts_T[shared_S] - 1)
    arrays = (token_K, order_K[first_T], shared_S, order_K[is_further_K], slot_D)
    tensors = (torch.from_numpy(array).to(device, non_blocking=True) for array in arrays)
    return dict(zip(GATHERING, tensors, strict=True))


class GatherKeys(torch.autograd.Function):
    """x[token_K]. The gradient of a shared token is summed over its copies in fp32: bf16 sums are slow and
    imprecise."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, token_K: Tensor, place_T: Tensor, shared_S: Tensor, place_D: Tensor, slot_D: Tensor
    ) -> Tensor:
        ctx.save_for_backward(place_T, shared_S, place_D, slot_D)
        return x.index_select(0, token_K)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        place_T, shared_S, place_D, slot_D = ctx.saved_tensors
        d_x = grads[0].index_select(0, place_T)
        d_shared = d_x.index_select(0, shared_S).float()
        d_shared = d_shared.index_add(0, slot_D, grads[0].index_select(0, place_D).float())
        return d_x.index_copy(0, shared_S, d_shared.to(d_x.dtype)), None, None, None, None, None


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int,
    *,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    use_flash4: bool,
    token_K: Tensor | None,
    **gathering: Tensor | None,
) -> Tensor:
    """query [T, heads, D], key and value [T, kv heads, D] -> [T, heads, D]. `window` -1: unlimited."""
    if token_K is not None:
        gathered = (token_K, *(gathering[name] for name in GATHERING[1:]))
        key, value = GatherKeys.apply(key, *gathered), GatherKeys.apply(value, *gathered)
    if use_flash4:
        return attend_flash4(query, key, value, starts_q, starts_k, longest_q, longest_k, scaling, window)[0]
    out = varlen_attn(
        query, key, value, starts_q, starts_k, longest_q, longest_k,
        scale=scaling, window_size=(window, 0), **_GROUPED,
    )  # fmt: skip
    assert isinstance(out, Tensor)  # noqa: S101  # a pair only if log-sum-exp is requested
    return out
