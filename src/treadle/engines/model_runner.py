"""Run a transformers model: batched generation with a KV cache on a CPU or one GPU.

    admit(requests)      prefill the prompts, each once for all of its completions
    step()               sample one token for every running sequence; finished ones leave the batch
    recompute(version)   the weights have changed: recompute keys and values from the tokens so far

On a CPU, completions of one request share a row of the batch until their tokens differ:

    row 0: s0 s1 s2 s3  "28 + 63 ="      step      row 0: s0 s2     "28 + 63 = 9"
                                       -------->   row 1: s1 s3     "28 + 63 = 8"

Not thread-safe: only the generation thread (scheduler.py) may call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from treadle.config import EngineConfig
from treadle.engines.decoding import CudaGraphCapture, Decoder, KVCache, install_attention
from treadle.engines.interface import Request, SampledCompletion
from treadle.engines.model_folder import REFETCH_FIX
from treadle.engines.sampling import sample, token_logprobs, uniforms
from treadle.engines.tokenizer import IncrementalDetokenizer, ModelTokenizer
from treadle.errors import ModelError, is_out_of_memory
from treadle.loading import choose_device, choose_matmul_backend, loading_options
from treadle.support import fast_dtype
from treadle.sync.layout import Layout
from treadle.sync.shared_memory import share_parameters
from treadle.wire.groups import common_prefix

if TYPE_CHECKING:
    from treadle.engines.lora import LoraAdapters

PROBE = [1, 2, 3, 4, 5, 6, 7]
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
COMPACT_AT = 1 / 8  # drop finished rows when they make up this share of the batch
PREFILL_TOKENS = 16384  # per forward; bounds the memory of activations
LOGITS_ROWS = 256  # positions whose logits are computed at once for prompt logprobs


@dataclass(kw_only=True)
class Sequence(SampledCompletion):
    """A completion in progress."""

    request: Request
    uniform: np.ndarray
    end_ids: frozenset[int]
    detokenizer: IncrementalDetokenizer | None  # only if text is needed before the end (stop strings, streams)

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.token_ids)


Row = list[Sequence]  # sequences with the same tokens so far; one row of the KV cache


class ModelRunner:
    def __init__(self, config: EngineConfig, folder: Path, tokenizer: ModelTokenizer | None = None) -> None:
        """`tokenizer`: for a folder without one, as a trainer saves weights."""
        self.device = choose_device(config.device)
        if config.threads:
            torch.set_num_threads(config.threads)
        self.folder = folder
        self.max_model_len = config.max_model_len
        dtype = fast_dtype(self.device.type) if config.dtype == "fast" else config.dtype
        torch_dtype = "auto" if dtype == "auto" else getattr(torch, dtype)
        options = loading_options(config.quantization, torch_dtype, self.device)
        model = load_model(folder, torch_dtype, options)
        self.model = (model if options else model.to(self.device)).eval()
        choose_matmul_backend(self.model)
        self.tokenizer = tokenizer or ModelTokenizer.load(folder)
        eos = self.model.generation_config.eos_token_id
        eos = self.model.config.eos_token_id if eos is None else eos
        self.eos_ids = frozenset(eos) if isinstance(eos, list) else frozenset({eos} - {None})
        # By the trainer's names, kept now: adapters wrap modules later, which renames parameters.
        self.named_weights: Mapping[str, nn.Parameter] = dict(self.model.named_parameters(remove_duplicate=False))
        self.weights: Mapping[str, nn.Parameter] = dict(self.model.named_parameters())  # tied ones once
        self._cache = KVCache(self.model.config.num_hidden_layers)
        with torch.inference_mode():  # before its attention is replaced
            expected = self.model(torch.tensor([PROBE], device=self.device)).logits[0, -1].float()
        install_attention(self.model, self._cache)
        self._rows: list[Row] = []  # row i of the cache; finished ones stay until the batch is compacted
        # The time of a decode step on a CPU is proportional to its rows. CUDA graphs need a batch that keeps its rows.
        self._shares_rows = self.device.type == "cpu"
        self._next_hidden = torch.empty(0)  # last hidden state of every row, from which the next token is sampled
        # With a 4-dimensional mask transformers builds none of its own; KVCache's attention ignores it.
        no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        # No reference to self: a runner that was replaced must be freed.
        self._forward = partial(_forward, self.model.base_model, no_mask)
        self._check_against(expected)
        # Switching adapters changes layers under a graph, and graphs of quantized layers are untested.
        can_capture = self.device.type == "cuda" and not config.enable_lora and not options
        self._decoder = Decoder(self._forward, self._cache, CudaGraphCapture(self.device) if can_capture else None)
        self.layout: Layout | None = None
        if config.weights_file is not None:
            self.layout = share_parameters(self.model, config.weights_file, str(folder))

    @cached_property
    def adapters(self) -> LoraAdapters:
        from treadle.engines.lora import LoraAdapters  # imports PEFT, which is slow and rarely needed

        return LoraAdapters(self.model)

    @property
    def num_running(self) -> int:
        return sum(1 for row in self._rows for s in row if s.finish_reason is None)

    def synchronize(self) -> None:
        """Wait for pending GPU work, which may still read the weights."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def admit(
        self, requests: list[Request], policy_version: int = 0, *, streamed: Iterable[int] = ()
    ) -> list[list[Sequence]]:
        """Prefill requests; their sequences grow in later steps. `streamed`: indices of requests that are streamed."""
        self._compact()
        groups = self._sequences(requests, policy_version, streamed)
        rows = [[group] if self._shares_rows else [[s] for s in group] for group in groups]
        self._begin([r.prompt_ids for r in requests], [len(rows_of_request) for rows_of_request in rows])
        self._rows += [row for rows_of_request in rows for row in rows_of_request]
        return groups

    @torch.inference_mode()
    def recompute(self, policy_version: int) -> None:
        """The weights have changed: recompute keys and values of every running sequence."""
        running = [row for row in map(_unfinished, self._rows) if row]
        self.clear()
        if running:
            self._begin([row[0].request.prompt_ids + row[0].token_ids for row in running], [1] * len(running))
            self._rows = running
        for s in (s for row in running for s in row):
            if s.policy_versions[-1] != policy_version:
                s.policy_versions.append(policy_version)

    @torch.inference_mode()
    def generate_single_tokens(
        self, requests: list[Request], policy_version: int = 0, *, streamed: Iterable[int] = ()
    ) -> list[list[Sequence]]:
        """Answer requests for one token each, which their prefill alone gives.

        They do not join the batch, so running sequences compute exactly the same without them.
        """
        groups = self._sequences(requests, policy_version, streamed)
        for request, group in zip(requests, groups, strict=True):
            self._sample([group], self._prefill([request.prompt_ids]))
        self._cache.begin_prefill()
        return groups

    @torch.inference_mode()
    def step(self) -> None:
        """Sample one token for every running sequence."""
        if not self._rows:
            return
        self._sample(self._rows, self._next_hidden)
        if not self.num_running:
            self.clear()
            return
        tokens = self._fork()
        positions = [row[0].length - 1 for row in self._rows]
        self._next_hidden = self._decoder.step(tokens, positions)

    def _fork(self) -> Tensor:
        """Split rows whose sequences sampled different tokens; returns the last token of each row."""
        children = [_by_last_token(row) for row in self._rows]
        num_finished = sum(not by_token for by_token in children)
        if all(len(by_token) <= 1 for by_token in children) and num_finished < COMPACT_AT * len(self._rows):
            # Finished rows are still computed: removing them from the cache would cost more.
            self._rows = [
                next(iter(by_token.values()), row) for by_token, row in zip(children, self._rows, strict=True)
            ]
        else:
            parents = [index for index, by_token in enumerate(children) for _ in by_token]
            self._rows = [row for by_token in children for row in by_token.values()]
            self._cache.keep_rows(torch.tensor(parents, dtype=torch.long, device=self.device))
        return torch.tensor([row[0].token_ids[-1] for row in self._rows], device=self.device)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """End these sequences with the tokens they have."""
        for s in sequences:
            if s.finish_reason is None:
                self._finish(s, "abort")
        if not self.num_running:
            self.clear()

    def clear(self) -> None:
        """Drop all sequences."""
        self._rows = []
        self._cache.clear()

    def take_over(self, other: ModelRunner) -> None:
        """Continue the sequences of another runner; `recompute` must follow."""
        self._rows, other._rows = other._rows, []
        other.clear()

    @torch.inference_mode()
    def prompt_tops(self, prompt_ids: list[int], num_top: int) -> list[dict[int, float]]:
        """Raw logprobs of each prompt token and of the top tokens at its position; {} for the first token."""
        self._cache.begin_prefill()
        hidden_T = self._forward(torch.tensor([prompt_ids], device=self.device), self._positions(0, len(prompt_ids)))[0]
        self._cache.begin_prefill()
        tops: list[dict[int, float]] = [{}]
        following = torch.tensor(prompt_ids[1:], device=self.device)
        for start in range(0, len(following), LOGITS_ROWS):
            tokens = following[start : start + LOGITS_ROWS]
            logits = self.model.get_output_embeddings()(hidden_T[start : start + len(tokens)])
            own, top = token_logprobs(logits, [], tokens, num_top=num_top, raw=True)
            for token, logprob, others in zip(tokens.tolist(), own.tolist(), top, strict=True):
                tops.append({token: logprob} | others)
        return tops

    def _sequences(self, requests: list[Request], policy_version: int, streamed: Iterable[int]) -> list[list[Sequence]]:
        streams = set(streamed)
        return [
            [
                Sequence(
                    request=r,
                    uniform=uniforms(r.seed, index, r.max_tokens),
                    end_ids=r.stop_ids if r.ignore_eos else r.stop_ids | self.eos_ids,
                    detokenizer=(
                        IncrementalDetokenizer(self.tokenizer, r.stop, r.prompt_ids)
                        if r.stop or request_index in streams
                        else None
                    ),
                    policy_versions=[policy_version],
                )
                for index in range(r.n)
            ]
            for request_index, r in enumerate(requests)
        ]

    def _sample(self, rows: list[Row], hidden_B: Tensor) -> None:
        """Append the next token to each unfinished sequence, sampled from its row's last hidden state."""
        sequences = [s for row in rows for s in row]
        uniform = [s.uniform[min(len(s.token_ids), len(s.uniform) - 1)] for s in sequences]
        params = [s.request.sampling for s in sequences]
        logits_SV = self.model.get_output_embeddings()(hidden_B)
        if len(sequences) > len(rows):
            logits_SV = logits_SV.repeat_interleave(torch.tensor([len(row) for row in rows], device=self.device), 0)
        tokens_S, logprobs_S = sample(logits_SV, params, torch.tensor(uniform, device=self.device))
        num_top = max(s.request.num_top for s in sequences)
        tops: list[dict[int, float]] = [{}] * len(sequences)
        if num_top:
            logprobs_S, tops = token_logprobs(logits_SV, params, tokens_S, num_top=num_top, raw=False)
        for s, token, logprob, top in zip(sequences, tokens_S.tolist(), logprobs_S.tolist(), tops, strict=True):
            if s.finish_reason is None:
                s.token_ids.append(token)
                s.logprobs.append(logprob)
                if s.request.num_top:
                    s.tops.append(dict(islice(top.items(), s.request.num_top)))
                if (reason := self._finished(s, token)) is not None:
                    self._finish(s, reason)

    def _finished(self, s: Sequence, token: int) -> str | None:
        if token in s.end_ids:
            return "stop"  # the token itself is not part of the text
        if s.detokenizer is not None and s.detokenizer.add(token):
            return "stop"
        return "length" if len(s.token_ids) >= s.request.max_tokens else None

    def _finish(self, s: Sequence, reason: str) -> None:
        if s.detokenizer is None:
            visible_ids = s.token_ids[:-1] if reason == "stop" else s.token_ids
            s.text = self.tokenizer.decode_after(s.request.prompt_ids, visible_ids)
        else:
            s.detokenizer.finish()
            s.text = s.detokenizer.text
        s.finish_reason = reason

    @torch.inference_mode()
    def _check_against(self, expected: Tensor) -> None:
        """Refuse a model whose attention or output layer does something that this engine does not implement.

        `expected`: logits of the model's own code for PROBE.
        """
        ours = self.model.get_output_embeddings()(self._prefill([PROBE]))[0].float()
        difference = (torch.log_softmax(ours, -1) - torch.log_softmax(expected, -1)).abs().max().item()
        if difference > PROBE_TOLERANCE[self.model.dtype]:
            raise ModelError(
                f"this engine computes other logits than {self.folder.name}'s own code (by {difference:.2g})",
                fix="its architecture needs another engine",
            )
        self.clear()

    def _begin(self, prompts: list[list[int]], copies: list[int]) -> None:
        """Prefill the prompts, and append `copies[i]` rows for prompt i."""
        for first, last in _parts(prompts):
            hidden = self._prefill(prompts[first:last])
            self._cache.add_rows(copies[first:last])
            begun = hidden.repeat_interleave(torch.tensor(copies[first:last], device=self.device), 0)
            self._next_hidden = torch.cat([self._next_hidden, begun]) if self._rows or first else begun

    def _prefill(self, prompts: list[list[int]]) -> Tensor:
        """The last hidden state of each prompt; a common prefix is computed once."""
        shared = common_prefix(prompts) if len(prompts) > 1 else 0
        shared = min(shared, min(map(len, prompts)) - 1)  # every prompt needs a last token of its own
        self._cache.begin_prefill()
        if shared:
            self._forward(torch.tensor([prompts[0][:shared]], device=self.device), self._positions(0, shared))
        rest = [prompt[shared:] for prompt in prompts]
        width = max(map(len, rest))
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in rest], device=self.device)
        if shared:
            self._cache.continue_prefill(shared, width, self.device)
        hidden = self._forward(padded, self._positions(shared, shared + width).expand(len(rest), -1))
        ends = torch.tensor([len(ids) - 1 for ids in rest], device=self.device)
        return hidden[torch.arange(len(rest), device=self.device), ends]

    def _positions(self, start: int, end: int) -> Tensor:
        return torch.arange(start, end, device=self.device)[None]

    def _compact(self) -> None:
        """Drop rows whose sequences are all finished."""
        rows = [_unfinished(row) for row in self._rows]
        kept = [index for index, row in enumerate(rows) if row]
        if len(kept) < len(rows):
            kept_rows = torch.tensor(kept, dtype=torch.long, device=self.device)
            self._next_hidden = self._next_hidden[kept_rows]
            self._cache.keep_rows(kept_rows)
        self._rows = [rows[index] for index in kept]


def _unfinished(row: Row) -> Row:
    return [s for s in row if s.finish_reason is None]


def _by_last_token(row: Row) -> dict[int, Row]:
    """The unfinished sequences of a row, by their last token."""
    by_token: dict[int, Row] = {}
    for s in _unfinished(row):
        by_token.setdefault(s.token_ids[-1], []).append(s)
    return by_token


def load_model(folder: Path, dtype: Any, options: Mapping[str, Any]) -> Any:
    """Load the model in `folder`; refuses sliding-window attention. `options`: see loading.py."""
    transformers_logging.disable_progress_bar()  # it would clutter the log
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            raise ModelError(f"{folder.name} uses sliding-window attention, which this engine does not do yet")
        model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    except Exception as error:  # of many types; except for out-of-memory, they mean that the files are invalid
        if isinstance(error, ModelError) or is_out_of_memory(repr(error)):
            raise
        raise ModelError(f"{folder} cannot be loaded: {repr(error)[:500]}", fix=REFETCH_FIX) from None
    if missing := sorted(loading["missing_keys"]):  # transformers would initialize them randomly
        raise ModelError(f"{folder} has no {missing[0]} ({len(missing)} weights are missing)", fix=REFETCH_FIX)
    return model


def _forward(base: Any, mask: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
    hidden: Tensor = base(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).last_hidden_state
    return hidden


def _parts(prompts: list[list[int]]) -> Iterator[tuple[int, int]]:
    """Split prompts into ranges (first, last) of at most PREFILL_TOKENS padded tokens."""
    first, longest = 0, 0
    for index, prompt in enumerate(prompts):
        longest = max(longest, len(prompt))
        if index > first and longest * (index + 1 - first) > PREFILL_TOKENS:
            yield first, index
            first, longest = index, len(prompt)
    yield first, len(prompts)
