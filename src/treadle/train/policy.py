"""The policy: the model that is trained, its live weights, and how packed rollouts are scored.

      optimizer ──write_step──> live weights (bf16, possibly shared with the engine) ──> what the engine reads
          ^                          |
          └────── gradients <── backward

An engine may generate from the live weights, so they change only in `write_live_weights`, which a sync mode calls while
the engine is paused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from treadle.config import TrainConfig
from treadle.config.train import LOGPROB_CHUNK
from treadle.errors import ConfigError, ModelError
from treadle.loading import choose_device, choose_matmul_backend, loading_options, num_weights
from treadle.log import get_logger
from treadle.support import fast_dtype
from treadle.sync.layout import Layout
from treadle.sync.protocol import AttachedModel, TokenScores
from treadle.sync.shared_memory import bind_parameters, map_weights
from treadle.train.attention import VARIABLE_LENGTH, choose_kind, head_size, install_attention, plan_attention
from treadle.train.context_parallel import ContextGroup, check_heads
from treadle.train.logprobs import chosen_logprobs
from treadle.train.model_files import FULL, write_adapter, write_folder, write_model, write_tensors
from treadle.train.model_loading import build_model, read_own_rows
from treadle.train.model_setup import (
    check_packed,
    choose_trainable,
    packed_sample,
    prepare_layers,
    sample_group,
    score_unpacked,
    use_fused_kernels,
    use_recomputing_modules,
)
from treadle.train.pack import Micro, Segment, pack
from treadle.train.ranks import ALONE, Ranks
from treadle.train.reference import Reference, build_reference
from treadle.train.sharding import release_whole_weights, shard_model, whole, with_whole_weights

if TYPE_CHECKING:
    from treadle.train.lora import ServedAdapter

log = get_logger("trainer")
_write_live = partial(write_folder, is_durable=False)  # after a power failure everything is published again


class Policy:
    """`score(micro)` returns logprobs; backward leaves gradients on `live` for the optimizer's hooks."""

    def __init__(
        self,
        model: Any,
        config: TrainConfig,
        *,
        folder: Path | None = None,
        shared: Mapping[str, Tensor] | None = None,
        ranks: Ranks = ALONE,
        is_the_engines: bool = False,
        has_placeholders: bool = False,
    ) -> None:
        """`shared`: where an engine reads the weights, if rank 0 copies them there; other ranks pass an empty mapping.
        `is_the_engines`: the weights (with adapters: the base model's) are the engine's own memory.
        `has_placeholders`: as `build_model` says; this rank's rows are read from `folder`."""
        if getattr(model.get_output_embeddings(), "bias", None) is not None:
            raise ModelError("the output layer has a bias, which the trainer does not handle", fix="use another model")
        self.model = model
        self.ranks = ranks
        self.is_the_engines = is_the_engines
        self.adapter: Any | None = None
        self._served_adapter: ServedAdapter | None = None
        self._config = config
        self._folder = folder or Path(model.name_or_path)  # of the starting model
        self._shared = shared
        self.write_step: Callable[[], None] = lambda: None  # set by the optimizer: writes its last step to `live`
        self.computing: Callable[[], AbstractContextManager[None]] = nullcontext  # around long computations
        self._without_dropout: Callable[[], AbstractContextManager[None]] = nullcontext
        # A model that will be sharded may still be in host memory.
        self.device: torch.device = next(model.parameters()).device if ranks.size == 1 else choose_device(config.device)
        num_tokens, num_hidden = model.get_input_embeddings().weight.shape
        self.vocab_size = int(num_tokens)
        self.token_cost = 6.0 * num_hidden  # of one token in the linear layers, in query-key pairs (see pack)
        self._chunk = LOGPROB_CHUNK["cuda" if self.device.type == "cuda" else "cpu"]
        self._attention = choose_kind(
            config.attention, self.device, next(model.parameters()).dtype, head_size(model.config)
        )
        self._context = ContextGroup.of(ranks, config.context_parallel)
        if self._context is not None:
            check_heads(model.config, config.context_parallel)
        # The ranks of a context group compute the same micros.
        self.counts_micros = self._context is None or self._context.place == 0
        model.eval()  # no dropout, as in the rollout policy
        if self.device.type == "cpu":
            use_recomputing_modules(model)
            choose_matmul_backend(model)
        if config.lora:
            self._add_adapters()
        else:
            choose_trainable(model, config.train_layer_indices)
        shard_model(model, config, ranks, self.device)  # replaces all parameters, so they are looked up after it
        self.weights, self.live = self._find_parameters()
        if has_placeholders:
            read_own_rows(self.weights, self._folder)
        # With a four-dimensional mask transformers builds no mask; packed attention ignores it.
        self._no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        expected = score_unpacked(model)
        install_attention(model)
        use_fused_kernels(model, config, self.device)
        with torch.no_grad():
            check_packed(model, self.score(packed_sample(model))[0], expected)
        if config.lora and config.lora_dropout > 0:
            self._switch_dropout_on()
        self._detached = {name: parameter.detach() for name, parameter in self.weights.items()}
        self.dtype = next(iter(self.weights.values())).dtype
        self.serves_copies = self.adapter is not None or ranks.size > 1
        # liger's kernels break torch.compile (an assertion inside of it, torch 2.11 with liger-kernel 0.8)
        is_alone = self._context is None  # attention exchanges heads between the ranks of a context group
        can_compile = self._attention in VARIABLE_LENGTH and config.fused_kernels == "none" and is_alone
        prepare_layers(model, config, can_compile=can_compile)

    @property
    def flops_per_token(self) -> float:
        """2 operations per weight forward, 2 backward, and 2 for the gradient of a trained weight. An embedding that is
        not also the output layer is looked up, not multiplied."""
        embedding, output = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        multiplied = [p for p in self.weights.values() if p is output or p is not embedding]
        return sum((6.0 if p.requires_grad else 4.0) * num_weights(p) for p in multiplied)

    def score(self, micro: Micro) -> tuple[Tensor, Tensor]:
        """(logprobs_L, entropy_L) of the loss tokens, in fp32."""
        return self._score(self.model, micro)

    def score_held_out(self, micro: Micro) -> Tensor:
        """logprobs_L of the loss tokens, for a measurement: without dropout, and without a gradient to come.

        Gradients are computed and dropped: without them, compiled layers would be compiled again.
        """
        with self.computing(), self._without_dropout():
            logprobs_L = self._score(self.model, micro)[0].detach()
        release_whole_weights(self.model)  # no backward pass does
        return logprobs_L

    def reference(self, folder: Path) -> Reference:
        """The starting policy; `folder`: of the base model."""
        # On a CPU the weights are in host memory already.
        is_offloaded = self._config.reference_offload and self.device.type != "cpu"
        options = self._config.model_copy(update={"offload_weights": self._config.offload_weights or is_offloaded})

        def build_copy() -> Any:
            model, has_placeholders = build_model(folder, self.dtype, self.ranks)
            shard_model(model, options, self.ranks, self.device)
            if has_placeholders:
                read_own_rows(dict(model.named_parameters()), folder)
            install_attention(model)
            return model

        return build_reference(
            self._score,
            adapted=self.adapter,
            build_copy=build_copy,
            device=self.device,
            is_sharded=self.ranks.size > 1,
            offload=is_offloaded,
        )

    @torch.no_grad()
    def write_live_weights(self) -> None:
        """Write the last step into the live weights, and copy them to where the engine reads."""
        self.write_step()
        if self._shared is not None:
            for name, weight in self._changed_weights():
                full = whole(weight)
                if self.ranks.leads:
                    self._shared[name].copy_(full)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # they are read next by another process

    def served_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """In the order of `served_weights`."""
        from treadle.train.lora import merged_names

        merged = [] if self.adapter is None else merged_names(self.adapter)
        names = dict.fromkeys([*merged, *self._detached])
        return [(name, tuple(self._detached[name].shape)) for name in names]

    @torch.no_grad()
    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that an engine serves, by name: whole, and with adapters merged, one at a time."""
        merged: set[str] = set()
        if self.adapter is not None:
            for name, weight in self._changed_weights():
                merged.add(name)
                yield name, whole(weight)
        for name, weight in self._detached.items():
            if name not in merged:
                yield name, whole(weight)

    def served_adapter(self) -> Iterator[tuple[str, Tensor]]:
        from treadle.train.lora import ServedAdapter

        if self._served_adapter is None:
            self._served_adapter = ServedAdapter(self.adapter, self.dtype, self.device)
        self._served_adapter.refresh()
        yield from self._served_adapter.named.items()

    def score_tokens(self, token_ids: Sequence[int]) -> TokenScores:
        """Score one text by itself, through the same packed forward as training."""
        with self.computing(), self._without_dropout():
            scores = with_whole_weights(self.model, self._score_tokens, token_ids)
        release_whole_weights(self.model)  # no backward pass does
        return scores

    def _score_tokens(self, token_ids: Sequence[int]) -> TokenScores:
        """Gradients are computed and dropped: without them, compiled layers would be compiled again."""
        ids_T = torch.tensor(token_ids, device=self.device)
        text = Segment((0, 0), (0, 0), ((0, len(ids_T)),))
        hidden_TE = self._hidden(self.model, ids_T, torch.arange(len(ids_T), device=self.device), (text,)).detach()
        if self._context is not None:
            hidden_TE = self._context.gather(hidden_TE, [len(hidden_TE)] * self._context.size)[: len(ids_T)]
        weight_VE = self.model.get_output_embeddings().weight.detach()
        ones_T = torch.ones(len(ids_T) - 1, device=self.device)
        logprobs_T, _ = chosen_logprobs(hidden_TE[:-1], weight_VE, ids_T[1:], ones_T, chunk=self._chunk)
        last_E = hidden_TE[-1].float()
        next_V = torch.cat([part.float() @ last_E for part in weight_VE.split(self._chunk)])
        return TokenScores(logprobs_T.cpu(), next_V.log_softmax(-1).cpu())

    def save_model(self, root: Path, name: str) -> Path:
        return self.write_served(self.served_weights(), root, name)

    def write_served(self, weights: Iterator[tuple[str, Tensor]], root: Path, name: str) -> Path:
        """Write what `served_weights` yields, one weight at a time."""
        return _write_live(root, name, lambda folder: write_model(folder, weights, self.weights, self._folder))

    def save_weights(self, root: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
        return _write_live(root, name, lambda folder: write_tensors(tensors, folder / FULL.weights, metadata))

    def save_adapter(self, root: Path, name: str) -> Path:
        live = dict(self.saved_live())
        return _write_live(root, name, lambda folder: write_adapter(folder, self.adapter, live))

    def saved_live(self) -> Iterator[tuple[str, Tensor]]:
        """The trained parameters, whole, one at a time; all ranks must iterate together."""
        return ((name, whole(p.detach())) for name, p in self.live.items())

    def saved_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's own weights, without adapters, in the same way."""
        return ((name, whole(weight)) for name, weight in self._detached.items())

    def _changed_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights that training changes, by the engine's names, possibly sharded."""
        if self.adapter is None:
            return self.live.items()
        from treadle.train.lora import merged_weights

        return merged_weights(self.adapter)

    def _add_adapters(self) -> None:
        from treadle.train.lora import add_adapters, without_dropout

        self.adapter = add_adapters(self.model, self._config)
        self._without_dropout = partial(without_dropout, self.adapter)

    def _switch_dropout_on(self) -> None:
        from treadle.train.lora import set_dropout

        set_dropout(self.adapter, on=True)

    def _find_parameters(self) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """(all weights of the model, those that are trained)"""
        if self.adapter is not None:
            from treadle.train.lora import adapter_parameters, original_weights

            return original_weights(self.adapter), adapter_parameters(self.adapter)
        weights = dict(self.model.named_parameters())  # a tied parameter appears once
        return weights, {name: p for name, p in weights.items() if p.requires_grad}

    def _hidden(self, model: Any, ids_T: Tensor, positions_T: Tensor, segments: tuple[Segment, ...]) -> Tensor:
        """The last hidden states of a packed row; of a context group those of this rank's tokens."""
        more: dict[str, Any] = plan_attention(segments, self.device, self._attention)
        if self._context is not None:
            more |= {"context": self._context, "num_tokens": len(ids_T)}
            ids_T, positions_T = self._context.take(ids_T), self._context.take(positions_T)
        states = model.base_model(
            input_ids=ids_T[None].to(self.device),
            position_ids=positions_T[None].to(self.device),
            attention_mask=self._no_mask,
            use_cache=False,
            **more,
        )
        return states.last_hidden_state[0]

    def _score(self, model: Any, micro: Micro) -> tuple[Tensor, Tensor]:
        return with_whole_weights(model, self._score_micro, model, micro)

    def _score_micro(self, model: Any, micro: Micro) -> tuple[Tensor, Tensor]:
        hidden_TE = self._hidden(model, micro.token_ids_T, micro.positions_T, micro.segments)
        source_D, target_D, temperature_D = (
            values_L[micro.first_D].to(self.device)
            for values_L in (micro.source_L, micro.targets_L, micro.temperatures_L)
        )
        context, counts, own = self._context, [], slice(None)
        if context is not None:
            counts = context.count_by_rank(source_D, len(micro.token_ids_T))  # they are in the order of their tokens
            own = slice(sum(counts[: context.place]), sum(counts[: context.place + 1]))
            source_D = source_D - context.place * len(hidden_TE)
        weight_VE = model.get_output_embeddings().weight
        of_predictions = chosen_logprobs(
            hidden_TE[source_D[own]], weight_VE, target_D[own], temperature_D[own], chunk=self._chunk
        )
        if context is not None:
            of_predictions = (context.gather(of_predictions[0], counts), context.gather(of_predictions[1], counts))
        logprobs_L, entropy_L = (values_D[micro.prediction_L.to(self.device)] for values_D in of_predictions)
        return logprobs_L, entropy_L


def load_policy(
    folder: Path, config: TrainConfig, *, shared: Mapping[str, Tensor] | None = None, ranks: Ranks = ALONE
) -> Policy:
    """A policy with its own weights; publishes are also written to `shared`."""
    kind: Any = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    device = choose_device(config.device)
    options = loading_options(config.quantization, kind, device)
    model, has_placeholders = build_model(folder, kind, ranks, **options)
    model = model if options or ranks.size > 1 else model.to(device)  # shards are moved there
    return Policy(model, config, folder=folder, shared=shared, ranks=ranks, has_placeholders=has_placeholders)


def share_policy(layout: Layout, config: TrainConfig, ranks: Ranks = ALONE, *, has_one_copy: bool = True) -> Policy:
    """A policy whose live weights are the engine's: the model is built empty and bound to the shared memory.

    The weights are a copy that is written to the shared memory at every publish if: not `has_one_copy`; the engine's
    weights are on another device; adapters are merged or a batch is trained on more than once, so that the weights
    differ from the engine's between publishes; or there are several ranks, of which rank 0 writes its copy.

    Modes that publish adapters have a frozen base: it is always the engine's memory, and never written.
    """
    is_elsewhere = bool(layout.storages) != (choose_device(config.device).type == "cuda")
    if is_elsewhere and config.single_copy:
        raise ConfigError(
            "the engine's weights and the trainer are not both on the GPU or both on the CPU, so one copy cannot do",
            fix="leave --single-copy out, or give engine and trainer the same --device",
        )
    if ranks.size > 1 and config.single_copy:
        raise ConfigError(
            f"one copy of the weights is for one trainer process, and there are {ranks.size}",
            fix="leave --single-copy out, or start one process",
        )
    is_frozen = config.mode.adapters
    has_one_copy = has_one_copy and (is_frozen or not (config.lora or config.epochs > 1))
    if not has_one_copy or is_elsewhere or ranks.size > 1:
        own = config.model_copy(update={"dtype": layout.dtype})
        return load_policy(Path(layout.model), own, shared=map_weights(layout) if ranks.leads else {}, ranks=ranks)
    # Only parameters are empty; buffers (such as the rotary frequencies) are computed by the model's code.
    model_config = AutoConfig.from_pretrained(layout.model)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(model_config, dtype=getattr(torch, layout.dtype))
    model.tie_weights()  # tied parameters were separated when they were emptied
    bind_parameters(model, layout)
    model.to(next(model.parameters()).device)  # moves the buffers; the parameters are there
    return Policy(model, config, folder=Path(layout.model), is_the_engines=True)


def compile_ahead(folder: Path, config: TrainConfig) -> None:
    """Compile the layers before the engine's weights are there: with two layers of this model, small and random.

    The compiled code serves all sizes, so the policy's first step finds it in the caches of this process. The small
    model's memory is not given back to the GPU: vLLM fails to start if memory becomes free while it measures its own.
    """
    device = choose_device(config.device)
    if device.type != "cuda" or config.compile == "off" or config.quantization != "none" or config.train_layer_indices:
        return
    started = time.monotonic()
    settings = AutoConfig.from_pretrained(folder)
    settings.num_hidden_layers, settings.vocab_size, settings.pad_token_id = 2, 1024, None
    if getattr(settings, "layer_types", None):
        settings.layer_types = settings.layer_types[:2]
    dtype = getattr(torch, fast_dtype("cuda") if config.dtype == "auto" else config.dtype)
    with torch.random.fork_rng(devices=[device]), device:
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    policy = Policy(model, config, folder=folder)
    policy.score_tokens(range(17))
    (micro,) = pack([sample_group(policy.vocab_size, (20, 28, 37))], TrainConfig(share_prompts="on")).micros
    policy.score(micro)[0].sum().backward()
    log.info("compiled_ahead", seconds=time.monotonic() - started)


def build_policy(engine: AttachedModel, config: TrainConfig, ranks: Ranks = ALONE) -> Policy:
    """Build the policy for what a sync mode attached to."""
    if engine.layout is None:
        own = config.model_copy(update={"dtype": engine.dtype})
        return load_policy(engine.folder, own, ranks=ranks)
    return share_policy(engine.layout, config, ranks, has_one_copy=engine.has_one_copy)
