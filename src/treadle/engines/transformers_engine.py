"""The transformers engine: batched generation with a KV cache on a CPU or one GPU.

    admit(requests)   prefill the prompts, each once however many completions it gets
    step()            one more token for every running sequence; finished ones leave

All state belongs to the one thread that calls these (scheduler.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from treadle.config import EngineConfig
from treadle.engines.kv_cache import KVCache, plug_in
from treadle.engines.sampling import SamplingParams, sample, uniforms
from treadle.errors import ModelError
from treadle.sync.device import choose_device
from treadle.sync.layout import Layout
from treadle.sync.weights_file import adopt_weights, share_parameters
from treadle.wire.groups import common_prefix

PROBE = [1, 2, 3, 4, 5, 6, 7]
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
COMPACT_AT = 1 / 8  # finished rows are dropped from the batch when they make up this share of it


@dataclass
class Request:
    """What is to be generated, checked and tokenized."""

    prompt_ids: list[int]
    n: int
    max_tokens: int
    sampling: SamplingParams
    seed: int | None
    stop: list[str]
    stop_ids: set[int]


@dataclass
class Sequence:
    """One completion while it grows."""

    request: Request
    uniform: np.ndarray
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    text: str | None = None  # set early when a stop string cut it


class TransformersEngine:
    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self.device = choose_device(config.device)
        if config.threads:
            torch.set_num_threads(config.threads)
        self.folder = folder
        self.max_model_len = config.max_model_len
        dtype: Any = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
        self.model = load_model(folder, dtype).to(self.device).eval()
        self.layout: Layout | None = None
        if config.weights_file is not None:
            self.layout = share_parameters(self.model, config.weights_file, str(folder))
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.eos_ids = _eos_ids(self.model)
        self._cache = KVCache(self.model.config.num_hidden_layers)
        expected = self._own_logits()
        plug_in(self.model, self._cache)
        self._rows: list[Sequence] = []  # row i of the cache; finished ones stay until the batch is compacted
        self._next_hidden = torch.empty(0)  # last hidden state of every row: the next token is read off it
        # A mask with four dimensions tells transformers to build none of its own; our attention ignores it.
        self._no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        self._check_against(expected)

    @property
    def num_running(self) -> int:
        return sum(1 for s in self._rows if s.finish_reason is None)

    def adopt(self) -> None:
        """Serve the weights that were published while nothing ran."""
        if self.layout is not None:
            adopt_weights(self.model, self.layout)

    @torch.inference_mode()
    def admit(self, requests: list[Request]) -> list[list[Sequence]]:
        """Begin to generate; the sequences of each request fill up during later steps."""
        self._compact()
        last = self._prefill([r.prompt_ids for r in requests])
        copies = [r.n for r in requests]
        self._cache.adopt(copies)
        begun = last.repeat_interleave(torch.tensor(copies, device=self.device), 0)
        self._next_hidden = torch.cat([self._next_hidden, begun]) if self._rows else begun
        groups = [[Sequence(r, uniforms(r.seed, index, r.max_tokens)) for index in range(r.n)] for r in requests]
        self._rows += [sequence for group in groups for sequence in group]
        return groups

    @torch.inference_mode()
    def step(self) -> None:
        """One more token for each running sequence."""
        rows = self._rows
        uniform = [s.uniform[min(len(s.token_ids), len(s.uniform) - 1)] for s in rows]
        logits = self.model.get_output_embeddings()(self._next_hidden)
        tokens, logprobs = sample(logits, [s.request.sampling for s in rows], torch.tensor(uniform, device=self.device))
        for s, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if s.finish_reason is None:
                s.token_ids.append(token)
                s.logprobs.append(logprob)
                s.finish_reason = self._finished(s, token)
        finished = [i for i, s in enumerate(rows) if s.finish_reason is not None]
        if len(finished) == len(rows):
            self.drop_all()
            return
        if len(finished) >= COMPACT_AT * len(rows):
            tokens = tokens[self._compact()]
        positions = [len(s.request.prompt_ids) + len(s.token_ids) - 1 for s in self._rows]
        positions_B = torch.tensor(positions, device=self.device)
        self._cache.begin_decode(positions_B)
        self._next_hidden = self._forward(tokens[:, None], positions_B[:, None])[:, -1]

    def drop_all(self) -> None:
        """Forget every sequence: after the last one finished, or after an error."""
        self._rows = []
        self._cache.clear()

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    @torch.inference_mode()
    def _own_logits(self) -> Tensor:
        """What the model's own, untouched code makes of a short text."""
        return self.model(torch.tensor([PROBE], device=self.device)).logits[0, -1].float()

    @torch.inference_mode()
    def _check_against(self, expected: Tensor) -> None:
        """Refuse a model whose attention or output does something that this engine does not know of."""
        ours = self.model.get_output_embeddings()(self._prefill([PROBE]))[0].float()
        difference = (torch.log_softmax(ours, -1) - torch.log_softmax(expected, -1)).abs().max().item()
        if difference > PROBE_TOLERANCE[self.model.dtype]:
            raise ModelError(
                f"this engine computes other logits than {self.folder.name}'s own code (by {difference:.2g})",
                fix="its architecture needs another engine",
            )
        self.drop_all()

    def _prefill(self, prompts: list[list[int]]) -> Tensor:
        """Forward the prompts, what they begin with in common only once; the last hidden state of each."""
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

    def _finished(self, s: Sequence, token: int) -> str | None:
        if token in s.request.stop_ids:
            return "stop"
        if s.request.stop:
            text = self.decode(s.token_ids)
            cuts = [text.find(word) for word in s.request.stop if word in text]
            if cuts:
                s.text = text[: min(cuts)]
                return "stop"
        return "length" if len(s.token_ids) >= s.request.max_tokens else None

    def _compact(self) -> Tensor:
        """Drop finished rows; returns the indexes of those that stay."""
        kept = [i for i, s in enumerate(self._rows) if s.finish_reason is None]
        index = torch.tensor(kept, dtype=torch.long, device=self.device)
        if len(kept) < len(self._rows):
            self._rows = [self._rows[i] for i in kept]
            self._next_hidden = self._next_hidden[index]
            self._cache.keep(index)
        return index

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        base = self.model.base_model
        return base(
            input_ids=ids, position_ids=positions, attention_mask=self._no_mask, use_cache=False
        ).last_hidden_state


def load_model(folder: Path, dtype: Any) -> Any:
    """The model in `folder`; one that needs attention we do not have is refused."""
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ModelError(f"{folder.name} uses sliding-window attention, which this engine does not do yet")
    transformers_logging.disable_progress_bar()  # a log is no place for one
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def _eos_ids(model: Any) -> set[int]:
    named = model.generation_config.eos_token_id
    if named is None:
        named = model.config.eos_token_id
    return set(named) if isinstance(named, list) else {named} - {None}
