"""Measure one step of TRL's GRPOTrainer and of Atropos' example trainer, on the work of bench/step.py, on one GPU.

    python bench/step_peers.py                                    all configurations, one line each
    python bench/step_peers.py --only "TRL bf16"                  those whose name contains it
    python bench/step_peers.py --tiny --device cpu --layers 2     to test the script; its numbers are meaningless

Both peers run unpatched, with the work's own weights: the shape of Qwen3-1.7B, random, 64 sequences, no shared prompts.
Each configuration runs in a separate process; a failed one prints a line with the reason, and the next one runs.

Counted, for both: from scored completions to updated weights. That is advantages, forward, backward, the metrics that a
step always computes, clipping, update, zeroing of gradients. Not counted: rollout, reading data, logging.
- TRL: `train()` with a `rollout_func` that returns the recorded completions. The clock starts when the reward
  function returns and stops at the end of the step. TRL has already padded by then, so its padding is not counted:
  milliseconds in its favour. Its defaults are fp32 weights with bf16 autocast, gradient checkpointing, 8 sequences at
  once, and fused AdamW. "bf16" is without autocast and without fp32 masters.
- Atropos: `pad_data_to_good_offset`, as its data code calls it, and `run_training_step`, on the model from its own
  loader: bf16 weights, gradient checkpointing, no fp32 masters. Its defaults are 2 sequences at once and 8-bit AdamW
  of bitsandbytes; without bitsandbytes it uses torch's AdamW, which is measured here.
Attention is torch's own (sdpa). TRL passes a padding mask, Atropos passes none.

Tokens are real tokens, "forwarded" includes padding. MFU: 6 operations per parameter and real token, so padding and
recomputation do not count.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from step import GROUP_SIZE, Result, build_model, make_groups
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, TrainerCallback

from treadle.train.loop import peak_flops
from treadle.wire.groups import IGNORED, NO_LOGPROB, ScoredGroup

NUM_WARM_UP = 2
TINY_VOCABULARY, TINY_FRACTION = 512, 16
TINY_LOGPROB = -6.2  # about the logprob of every token with tiny random weights; another value would clip every ratio
FAILED = "failed"


@dataclass(frozen=True)
class Variant:
    """`settings` are those of the peer: TRL's GRPOConfig or Atropos' TrainingConfig."""

    peer: Literal["TRL", "Atropos"]
    configuration: str
    at_once: int
    fp32_weights: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.peer} {self.configuration}, {self.at_once} at once"


_KEEP: dict[str, Any] = {"gradient_checkpointing": False}
_PURE: dict[str, Any] = {"bf16": False}
VARIANTS = (
    Variant("TRL", "defaults (fp32, recomputing)", 8, fp32_weights=True),
    Variant("TRL", "fp32", 8, fp32_weights=True, settings=_KEEP),
    Variant("TRL", "bf16, recomputing", 8, settings=_PURE),
    Variant("TRL", "bf16", 8, settings=_PURE | _KEEP),
    Variant("TRL", "bf16", 16, settings=_PURE | _KEEP),
    Variant("TRL", "bf16", 32, settings=_PURE | _KEEP),
    Variant("TRL", "bf16, Liger", 8, settings=_PURE | _KEEP | {"use_liger_kernel": True}),
    Variant("TRL", "fp32, Liger", 8, fp32_weights=True, settings=_KEEP | {"use_liger_kernel": True}),
    Variant("Atropos", "defaults (bf16, recomputing)", 2),
    Variant("Atropos", "bf16, recomputing", 8),
    # last: compiling takes minutes
    Variant("TRL", "bf16, compiled", 8, settings=_PURE | _KEEP | {"torch_compile": True}),
)


@dataclass(frozen=True)
class Work:
    groups: list[ScoredGroup]
    model: Any
    device: torch.device
    num_steps: int

    @property
    def num_sequences(self) -> int:
        return sum(len(group.tokens) for group in self.groups)

    @property
    def num_tokens(self) -> int:
        return sum(len(row) for group in self.groups for row in group.tokens)


@dataclass
class Clock:
    device: torch.device
    steps_s: list[float] = field(default_factory=list)
    _started: float = 0.0

    def start(self) -> None:
        self._synchronize()
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._synchronize()
        self.steps_s.append(time.perf_counter() - self._started)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Run:
    """Result of a peer: seconds and gradient norm of each step, and how the work was split and padded."""

    steps_s: list[float]
    grad_norms: list[float]
    num_micros: int
    forwarded: int


def make_work(variant: Variant, options: argparse.Namespace) -> Work:
    groups = make_groups(shared_prompts=False)
    if options.tiny:
        groups = [_shrunk(group) for group in groups]
        model = _tiny_model(options.layers).to(options.device)
    else:
        model = build_model(options.layers)
    if variant.fp32_weights:
        model = model.float()
    return Work(groups, model, torch.device(options.device), NUM_WARM_UP + options.repeat)


def _shrunk(group: ScoredGroup) -> ScoredGroup:
    def ids(rows: Sequence[Sequence[int]]) -> list[list[int]]:
        return [[t if t == IGNORED else t % TINY_VOCABULARY for t in row[::TINY_FRACTION]] for row in rows]

    masks = ids(group.masks)
    return ScoredGroup(
        tokens=ids(group.tokens),
        masks=masks,
        scores=group.scores,
        inference_logprobs=[[NO_LOGPROB if t == IGNORED else TINY_LOGPROB for t in row] for row in masks],
    )


def _tiny_model(layers: int) -> Any:
    config = Qwen3Config(
        vocab_size=TINY_VOCABULARY, hidden_size=64, intermediate_size=192, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def run_trl(variant: Variant, work: Work) -> Run:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    clock = Clock(work.device)
    grad_norms: list[float] = []
    rows = [(t, m.count(IGNORED)) for group in work.groups for t, m in zip(group.tokens, group.masks, strict=True)]
    scores = [score for group in work.groups for score in group.scores]

    def recorded_rollouts(prompts: list[str], _trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """All groups of a step in order: the dataset is not shuffled, and has one prompt per group."""
        assert len(prompts) == len(rows)
        return {
            "prompt_ids": [tokens[:prompt] for tokens, prompt in rows],
            "completion_ids": [tokens[prompt:] for tokens, prompt in rows],
            "logprobs": [[0.0] * (len(tokens) - prompt) for tokens, prompt in rows],  # TRL uses only vLLM's
        }

    def recorded_scores(**_: Any) -> list[float]:
        clock.start()
        return scores

    class StepEnd(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.stop()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "grad_norm" in logs:
                grad_norms.append(float(logs["grad_norm"]))

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=work.device.type == "cpu",
            per_device_train_batch_size=variant.at_once,
            gradient_accumulation_steps=work.num_sequences // variant.at_once,
            num_generations=GROUP_SIZE,
            max_completion_length=max(len(tokens) - prompt for tokens, prompt in rows),
            max_steps=work.num_steps,
            shuffle_dataset=False,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **variant.settings,
        )
        trainer = GRPOTrainer(
            model=work.model,
            args=config,
            processing_class=_empty_tokenizer(),
            train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(len(work.groups))]),
            reward_funcs=recorded_scores,
            rollout_func=recorded_rollouts,
            callbacks=[StepEnd()],
        )
        trainer.train()
    micros = trainer._buffered_inputs  # read only: the step's micro-batches as TRL padded them
    forwarded = sum(micro["prompt_ids"].numel() + micro["completion_ids"].numel() for micro in micros)
    return Run(clock.steps_s, grad_norms, len(micros), forwarded)


def _empty_tokenizer() -> Any:
    """TRL needs a tokenizer to decode samples; no reward here reads text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    named = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "unk")}
    words = WordLevel({word: number for number, word in enumerate(named.values())}, unk_token=named["unk_token"])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), padding_side="left", **named)


def run_atropos(variant: Variant, work: Work) -> Run:
    from example_trainer.config import TrainingConfig
    from example_trainer.data import pad_data_to_good_offset
    from example_trainer.model import _setup_gradient_checkpointing
    from example_trainer.trainers import create_optimizer
    from example_trainer.training import run_training_step

    config = TrainingConfig(
        model_name="",
        device=str(work.device),
        lr=1e-6,
        batch_size=variant.at_once,
        gradient_accumulation_steps=work.num_sequences // variant.at_once,
        optimizer="adamw",
        **variant.settings,
    )
    _setup_gradient_checkpointing(work.model, config)
    work.model.train()
    optimizer = create_optimizer(work.model, config)
    delivered = {
        "batch": [
            {
                "tokens": group.tokens, "masks": group.masks, "scores": group.scores, "overrides": None,
                "inference_logprobs": group.inference_logprobs,
            }
            for group in work.groups
        ]
    }  # fmt: skip
    clock = Clock(work.device)
    grad_norms = []
    for step in range(work.num_steps):
        data = copy.deepcopy(delivered)  # padding changes it in place
        clock.start()
        tokens, labels, advantages, temperatures, logprobs = pad_data_to_good_offset(data, config.batch_size)
        metrics = run_training_step(
            work.model, optimizer, tokens, labels, advantages, temperatures, config, step,
            inference_logprob_batches=logprobs,
        )  # fmt: skip
        clock.stop()
        grad_norms.append(metrics["grad_norm"])
    return Run(clock.steps_s, grad_norms, len(tokens), sum(micro.numel() for micro in tokens))


def measure(variant: Variant, options: argparse.Namespace) -> Result:
    work = make_work(variant, options)
    assert work.model.config._attn_implementation == "sdpa"
    num_parameters = sum(p.numel() for p in work.model.parameters())
    if work.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(work.device)
    run = (run_trl if variant.peer == "TRL" else run_atropos)(variant, work)
    assert len(run.steps_s) == len(run.grad_norms) == work.num_steps
    assert all(norm > 0 for norm in run.grad_norms)  # also false for NaN
    step_s = statistics.median(run.steps_s[NUM_WARM_UP:])
    peak = peak_flops(work.device)
    mfu = 6 * num_parameters * work.num_tokens / step_s / peak if peak else None
    peak_gib = torch.cuda.max_memory_allocated(work.device) / 2**30 if work.device.type == "cuda" else 0.0
    return Result(
        variant.name, step_s, work.num_tokens / step_s, mfu, peak_gib, run.steps_s[0], run.num_micros, run.forwarded,
    )  # fmt: skip


def measure_here(name: str, options: argparse.Namespace) -> dict[str, Any]:
    variant = next(variant for variant in VARIANTS if variant.name == name)
    try:
        with redirect_stdout(sys.stderr):  # both peers print
            return asdict(measure(variant, options))
    except torch.OutOfMemoryError as error:
        return {"name": name, FAILED: f"out of memory: {_first_line(error)}"}
    except Exception as error:  # an error of a peer is the result of its line, and the next one runs
        sys.excepthook(type(error), error, error.__traceback__)
        return {"name": name, FAILED: f"{type(error).__name__}: {_first_line(error)}"}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def measure_apart(variant: Variant, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure in a separate process: Liger patches classes permanently, and a failed run may not free its memory."""
    command = [sys.executable, __file__, *arguments, "--here", variant.name]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode != 0 or not done.stdout:
        return {"name": variant.name, FAILED: f"its process ended with {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names to measure")
    parser.add_argument("--layers", type=int, default=28, help="fewer, to try the script out")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and a sixteenth of the tokens")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu with --tiny only")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        raise SystemExit("the full work needs a GPU: add --tiny to try the script out on a CPU")
    if options.here:
        print(json.dumps(measure_here(options.here, options)), flush=True)
        return
    chosen = [variant for variant in VARIANTS if options.only in variant.name]
    if not chosen:
        raise SystemExit("no such name; there are:\n" + "\n".join(variant.name for variant in VARIANTS))
    for variant in chosen:
        found = measure_apart(variant, sys.argv[1:])
        if options.json:
            print(json.dumps(found), flush=True)
        elif FAILED in found:
            print(f"{found['name']:44s} {FAILED}: {found[FAILED]}", flush=True)
        else:
            print(Result(**found).line(), flush=True)


if __name__ == "__main__":
    main()
