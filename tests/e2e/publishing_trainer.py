"""A trainer that publishes versions whose weights follow from their number; in a process of its own, to be killed.

Version v has the weights base + v * noise. So a test can say which version a token was sampled from, and whether the
weights were all of that one.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from treadle.config import TrainConfig
from treadle.errors import TreadleError
from treadle.sync.modes import choose_sync
from treadle.sync.protocol import AttachedModel
from treadle.train.policy import build_policy

MODES = {
    "one_copy": {},
    "two_copies": {"use_shared_memory": True, "broadcast_by": "memory"},
    "gloo": {"use_shared_memory": True, "broadcast_by": "gloo"},
    "reload": {"weight_bridge_mode": "reload"},
    "delta": {"weight_bridge_mode": "delta"},
    "lora_only": {"weight_bridge_mode": "lora_only"},
    "none": {"weight_bridge_mode": "none", "vllm_restart_interval": 1},
}
SIZE = 0.02  # of the noise: a mixture of two versions has other logprobs than each


class NumberedPolicy:
    """A policy whose live weights are set to those of a version."""

    def __init__(self, attached: AttachedModel, config: TrainConfig, write_s: float = 0.0) -> None:
        """`write_s`: that a write takes, so that it can be killed in the middle."""
        self.policy = build_policy(attached, config)
        at_start = AttachedModel(folder=Path(config.model), dtype="float32")  # the engine's weights may be torn
        own = build_policy(at_start, config)
        generator = torch.Generator().manual_seed(0)
        self._base = {name: weight.detach().clone() for name, weight in own.live.items()}
        self._noise = {name: SIZE * torch.randn(base.shape, generator=generator) for name, base in self._base.items()}
        self._noise = {name: noise.to(config.device) for name, noise in self._noise.items()}
        if config.lora:  # as initialized, A differs from process to process, and B is zero
            self._base = {name: torch.zeros_like(base) for name, base in self._base.items()}
            self._noise = {name: 5 * noise for name, noise in self._noise.items()}
        self._pause_s = write_s / len(self._base)
        self.version = 0
        self.policy.write_step = self._write

    @torch.no_grad()
    def _write(self) -> None:
        for name, weight in self.policy.live.items():
            weight.copy_(self._base[name] + self.version * self._noise[name])
            time.sleep(self._pause_s)

    def logprobs(self, version: int, prompt: list[int], token_ids: list[int]) -> list[float]:
        """Of the tokens, under that version."""
        self.version = version
        self._write()
        return self.policy.score_tokens([*prompt, *token_ids]).logprobs_T[len(prompt) - 1 :].tolist()


class PublishingTrainer:
    """`steps`: its last version. A restart of the engine is waited for then, and with others by the next publish."""

    def __init__(
        self, model: Path, save_path: Path, url: str, mode: str, device: str, *, steps: int, write_s: float = 0.0
    ) -> None:
        config = TrainConfig(
            model=str(model), save_path=save_path, engine_url=url, device=device, steps=steps,
            lora_r=4, publish_timeout_s=60.0, **MODES[mode],
        )  # fmt: skip
        self._sync = choose_sync(config)
        self.numbered = NumberedPolicy(self._sync.attach(), config, write_s)

    def publish(self, version: int) -> None:
        self.numbered.version = version
        self._sync.publish(self.numbered.policy, version)
        self._sync.settle()


def publish_in_process(connection, model, save_path, url, mode, device, versions, write_s=0.0):
    """Says of each version that it is published, or why not."""
    torch.set_num_threads(1)
    try:
        trainer = PublishingTrainer(model, save_path, url, mode, device, steps=versions[-1], write_s=write_s)
        for version in versions:
            trainer.publish(version)
            connection.send(version)
    except TreadleError as error:
        connection.send(str(error))
