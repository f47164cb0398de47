"""Score completions with a reward model: a transformers model for sequence classification.

It runs in a worker of its own, which loads it once, so that neither the event loop nor other rewards wait for it.
torch and transformers are imported in that worker only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from treadle.envs.rewards.base import CallResult, OwnWorker, Reward, RewardInput
from treadle.envs.rewards.parsing import answer_text
from treadle.errors import ConfigError, ModelError


class RewardModelReward(Reward):
    """The output of a reward model for prompt and completion.

    registry.create("reward_model", model="./my-reward-model", device="cuda:1", activation="sigmoid")
    """

    needs: ClassVar = ("train", "torch", "transformers")
    may_abstain: ClassVar = True
    meaning_of_none: ClassVar = CallResult(
        outcome="too_long", detail="prompt and completion have more tokens than the reward model reads (max_length)"
    )
    reads_messages: ClassVar = True

    model: str = ""  # a folder, or the id of a model
    device: str = "cpu"  # "cuda:1"; numbers within CUDA_VISIBLE_DEVICES
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: as saved
    batch_size: int = 16  # completions in one forward
    label: int = -1  # the output to take, of a model with several
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    max_length: int = 0  # tokens of prompt and completion; 0: what the model can read
    with_thinking: bool = False  # whether it reads also what stands before </think>
    threads: int = 0  # of the CPU; 0: OMP_NUM_THREADS, which is 1 in a run
    timeout_s: float = 120.0  # for one group
    load_timeout_s: float = 900.0

    def check(self) -> None:
        if not self.model:
            raise ConfigError(
                f"reward '{self.name}' needs a model", fix=f'{{"type": "{self.name}", "params": {{"model": "FOLDER"}}}}'
            )
        lowest = {"batch_size": 1, "label": -1, "max_length": 0, "threads": 0}
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise ConfigError(f"reward '{self.name}' has {name} {getattr(self, name)}", fix=f"give {low} or more")
        if self.timeout_s <= 0 or self.load_timeout_s <= 0:
            raise ConfigError(f"reward '{self.name}' has a timeout of 0 s or less", fix="give seconds above 0")

    def check_installed(self) -> None:
        super().check_installed()
        is_path = self.model.startswith((".", "/", "~")) or Path(self.model).exists()
        if is_path and not (Path(self.model).expanduser() / "config.json").is_file():
            raise ModelError(
                f"reward '{self.name}': {self.model} is not the folder of a model",
                fix="name a folder with config.json, weights and tokenizer, as save_pretrained writes it",
            )

    @property
    def own_worker(self) -> OwnWorker:
        return OwnWorker(time_limit_s=self.timeout_s, load_limit_s=self.load_timeout_s)

    def warm_up(self) -> None:
        self._loaded  # noqa: B018

    def score(self, completion: RewardInput) -> float:
        return self.score_group([completion])[0]

    def score_group(self, group: Sequence[RewardInput]) -> Sequence[float]:
        """None for a text that is too long for the model: the reward of a part of it would be that of another text.

        In a sum it is no 0 either: where the scores of a group are negative, that would reward length.
        """
        encoded = [self._encode(completion) for completion in group]
        limit = self._loaded.max_length
        fitting = [place for place, ids in enumerate(encoded) if len(ids) <= limit]
        if len(fitting) < len(group):
            print(f"reward_model: {len(group) - len(fitting)} texts are longer than {limit} tokens", file=sys.stderr)
        # Texts of similar length share a batch, which saves padding.
        order = sorted(fitting, key=lambda place: len(encoded[place]))
        scores: list[Any] = [None] * len(group)
        for first in range(0, len(order), self.batch_size):
            places = order[first : first + self.batch_size]
            for place, score in zip(places, self._forward([encoded[place] for place in places]), strict=True):
                scores[place] = score
        return scores

    def _encode(self, completion: RewardInput) -> list[int]:
        """The token ids of the chat that ends with the completion; without a chat template, of the pair of texts."""
        tokenizer = self._loaded.tokenizer
        text = completion.text if self.with_thinking else answer_text(completion.text)
        if not tokenizer.chat_template:
            return list(tokenizer(completion.prompt, text)["input_ids"])
        messages = completion.messages or [{"role": "user", "content": completion.prompt}]
        chat = [*messages, {"role": "assistant", "content": text}]
        return list(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"])

    def _forward(self, encoded: Sequence[Sequence[int]]) -> list[float]:
        import torch

        model, pad = self._loaded.model, self._loaded.pad
        longest = max(map(len, encoded))
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in encoded], device=self.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in encoded], device=self.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=mask).logits.float()
        if self.activation == "softmax":
            logits = logits.softmax(-1)
        elif self.activation == "sigmoid":
            logits = logits.sigmoid()
        return [float(value) for value in logits[:, max(self.label, 0)].cpu()]

    @functools.cached_property
    def _loaded(self) -> _LoadedModel:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if self.threads:
            torch.set_num_threads(self.threads)
        place = str(Path(self.model).expanduser()) if self.model.startswith("~") else self.model
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
            model, report = AutoModelForSequenceClassification.from_pretrained(
                place, dtype=self.dtype, trust_remote_code=False, use_safetensors=True, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise ModelError(
                f"the reward model {self.model} cannot be loaded: {error}",
                fix="name the folder of a model for sequence classification, with safetensors and a tokenizer",
            ) from None
        if report["missing_keys"]:  # they would be random, above all the head of a plain language model
            raise ModelError(
                f"the reward model {self.model} lacks weights: {', '.join(sorted(report['missing_keys']))}",
                fix="name a model that was trained for sequence classification (num_labels, a score head)",
            )
        num_labels = model.config.num_labels
        if self.label >= num_labels or (self.label < 0 and num_labels != 1):
            labels = ", ".join(f"{place} ({name})" for place, name in sorted(model.config.id2label.items()))
            raise ConfigError(
                f"the reward model {self.model} has {num_labels} outputs and 'label' is {self.label}",
                fix=f"choose one: {labels}",
            )
        if model.config.pad_token_id is None:  # it tells the model where a row ends
            model.config.pad_token_id = tokenizer.pad_token_id
        if model.config.pad_token_id is None:
            raise ModelError(
                f"the reward model {self.model} has no padding token", fix="set pad_token_id in its config.json"
            )
        readable = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
        return _LoadedModel(
            model.to(self.device).eval(), tokenizer, int(model.config.pad_token_id), self.max_length or readable
        )


class _LoadedModel(NamedTuple):
    model: Any
    tokenizer: Any
    pad: int
    max_length: int
