"""Build the commands that start a planned job. Pure.

one trainer process          treadle run
several trainer processes    hub, engine and environment one by one, the trainers by torchrun
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from treadle.config.env import labels_of
from treadle.config.flags import given
from treadle.config.schema import EngineConfig, RunConfig
from treadle.config.sync import LORA_MODES
from treadle.launch.budget.job import Job
from treadle.launch.budget.levers import SHARED_BASE, engine_on_its_own_card
from treadle.launch.budget.request import settings_of

Settings = Mapping[str, str]  # {"train.optimizer": "adamw_8bit"}
BY_HAND = "start it with, each in a terminal of its own (treadle run starts one trainer process: docs/multi-gpu.md)"
_OF_TORCHRUN = ("world_size", "trainer_rank", "init_method", "device")  # what torchrun sets for each trainer process
_OF_MODE: Mapping[str, Settings] = {
    "single-copy": {"train.single_copy": "true"},
    "two-copies": {"train.use_shared_memory": "true"},
    "none": {"train.weight_bridge_mode": "offline"},
}


@dataclass(frozen=True)
class Start:
    """What the user gave for the run: `settings` and `config_file`, without the planner's own flags."""

    run: RunConfig
    settings: Settings
    config_file: Path | None = None
    is_model_known: bool = True  # False: only a size was given

    @classmethod
    def of(cls, run: RunConfig, values: argparse.Namespace) -> Start:
        settings = {key: str(value) for key, value in given(values).items()}
        if run.train.lora and values._mode == "single-copy":
            settings = {**settings, **settings_of(SHARED_BASE)}
        elif run.train.weight_bridge_mode == "shared_vllm":
            settings = {**_OF_MODE.get(values._mode, {}), **settings}
        return cls(run, settings, values._config, values._params is None)

    def heading(self, job: Job) -> str:
        return "start it with" if job.train_gpus == 1 else BY_HAND

    def commands(self, job: Job, flags: Iterable[str] = ()) -> list[str]:
        """Empty if no model was named. `flags`: those of a suggestion, ("--train.optimizer adamw_8bit",)."""
        if not self.is_model_known:
            return []
        settings = {**self.settings, **settings_of(flags)}
        if job.train_gpus == 1:
            return [self._command("treadle run", {**self._placing(job), **settings})]
        return self._by_hand(job, settings)

    def _placing(self, job: Job) -> Settings:
        """Which GPUs engine and trainer use, if they do not share one."""
        if job.engine_gpus == 0 or self.run.engine_url:
            return {}
        if job.engine_gpus > 1:
            split = str(job.engine_gpus)
            return {
                "engine.engine": "vllm",
                "engine.tensor_parallel_size": split,
                "train.device": f"cuda:{split}",  # the engine takes the first ones
            }
        return settings_of(engine_on_its_own_card(is_broadcast=job.is_shared_vllm))

    def _by_hand(self, job: Job, settings: Settings) -> list[str]:
        """torchrun gives rank N the GPU N, so the engine takes those after the trainers', or the first with a trainer.

        Settings that treadle run copies from one section to another are given to both processes.
        """
        run, mode = self.run, settings.get("train.weight_bridge_mode", self.run.train.weight_bridge_mode)
        common = {"model": settings.get("model", run.model)}
        engine = common | _section("engine", settings)
        train = common | {"steps": str(run.steps)} | _section("train", settings)
        for name in _OF_TORCHRUN:
            train.pop(name, None)
        if job.max_model_len != EngineConfig().max_model_len:
            engine["max_model_len"] = train["seq_len"] = str(job.max_model_len)
        if not run.envs and run.env.pace != "stream":
            train = {"max_age": str(run.env.max_age)} | train
        if mode in LORA_MODES:
            engine |= {"enable_lora": "true", "max_lora_rank": str(job.lora_r)}
            if job.base_quantization != "none":
                engine = {"quantization": job.base_quantization} | engine
        if job.engine_gpus == 0:
            engine = {"device": "cuda:0"} | engine
            if mode == "shared_vllm" or job.mode == "single-copy":
                engine = {"weights_file": "/dev/shm/mine.weights"} | engine  # noqa: S108 - memory, as in the README
        elif job.engine_gpus == 1:
            engine = {"device": f"cuda:{job.train_gpus}"} | engine
            if mode == "shared_vllm":
                train = {"use_shared_memory": "true"} | train
        visible = ""
        if job.engine_gpus > 1:
            engine |= {"engine": "vllm", "tensor_parallel_size": str(job.engine_gpus)}
            cards = range(job.train_gpus, job.train_gpus + job.engine_gpus)
            visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, cards))} "
        of_env = [key for key in settings if key.startswith(("env.", "openai.")) and key != "env.name"]
        env = {key: settings[key] for key in of_env}
        mixed = [
            (label, {"env.pace": "stream", "env.inference_weight": f"{one.inference_weight:g}"})
            for label, one in zip(labels_of(run.envs), run.envs, strict=True)
        ]
        return [
            self._command("treadle hub", _section("hub", settings)),
            self._command(f"{visible}treadle engine", engine),
            *(
                self._command(f"treadle env {shlex.quote(name)} serve", own | env)
                for name, own in mixed or [(run.env.name, {})]
            ),
            self._command(f"torchrun --nproc-per-node {job.train_gpus} -m treadle train", train),
        ]

    def _command(self, program: str, settings: Settings) -> str:
        file = [] if self.config_file is None else ["--config", shlex.quote(str(self.config_file))]
        flags = [f"--{key.replace('_', '-')} {shlex.quote(value)}" for key, value in settings.items()]
        return " ".join([program, *file, *flags])


def _section(name: str, settings: Settings) -> dict[str, str]:
    """The settings of one process, as its own verb calls them."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
