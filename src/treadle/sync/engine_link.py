"""Call the engine's HTTP API, and check at attach time that it serves what is to be trained."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from treadle.config import TrainConfig
from treadle.errors import ConfigError, SyncError
from treadle.net.address import is_loopback
from treadle.net.client import OK, BlockingHttpClient, Failure, HttpAnswer, LateAnswer, NoAnswer, Retries, RetryPolicy
from treadle.net.tokens import bearer_headers
from treadle.sync.model_folders import LiveFolder, is_same_model, local_folder
from treadle.sync.process_identity import PUBLISHER_HEADER, this_publisher
from treadle.sync.protocol import AttachedModel
from treadle.wire.bridge import TOKEN_VARIABLE, BridgeInfo

LOADING_S = 900.0  # a large model from a cold disk
QUICK_S = 5.0  # for requests that an engine answers at once
_STILL_LOADING = 503

T = TypeVar("T")


class EngineLink:
    """One HTTP client for all calls of a sync mode.

    >>> engine = EngineLink("http://127.0.0.1:9001", timeout_s=180.0)  # doctest: +SKIP
    >>> engine.post("/bridge/pause", Pause(mode="keep"), BridgeState)  # doctest: +SKIP
    BridgeState(status='paused', policy_version=4)
    """

    def __init__(self, url: str, timeout_s: float, token: str | None = None, save_path: Path | None = None) -> None:
        """`save_path`: of the trained run; an engine accepts weights of one run only. None: nothing is published."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        token = token or os.environ.get(TOKEN_VARIABLE)
        headers = bearer_headers(token)
        if save_path is not None:
            headers[PUBLISHER_HEADER] = this_publisher(save_path).as_header()
        self._client = BlockingHttpClient(
            self.url,
            headers=headers,
            timeout_s=timeout_s,
            connect_timeout_s=QUICK_S,
            trust_env=not is_loopback(self.url),
        )

    @classmethod
    def of_trainer(cls, config: TrainConfig) -> Self:
        return cls(config.engine_url, config.publish_deadline_s, save_path=config.save_path)

    @property
    def is_on_this_machine(self) -> bool:
        return is_loopback(self.url)

    def post(self, path: str, body: msgspec.Struct, answer: type[T]) -> T:
        """Send a request that may take as long as a publish."""
        content = msgspec.json.encode(body)
        return self._ask("POST", path, answer, content=content, timeout_s=self._timeout_s)

    def get(self, path: str, answer: type[T]) -> T:
        """Read something that the engine answers at once."""
        return self._ask("GET", path, answer, content=None, timeout_s=min(self._timeout_s, QUICK_S))

    def wait_for(self, path: str, answer: type[T], wait_s: float = LOADING_S) -> T:
        """Like `get`, but wait for an engine that is still loading its model."""
        policy = RetryPolicy(give_up_after_s=wait_s, longest_pause_s=0.5, statuses=(_STILL_LOADING,))
        retries = Retries(policy)
        while isinstance(outcome := self._try(path, policy), Failure):
            pause_s = retries.pause_s(outcome)
            if pause_s is None:
                raise SyncError(
                    f"the engine at {self.url} is not there after {wait_s:.0f} s: {outcome.problem}",
                    fix="start one, or check --engine-url",
                )
            time.sleep(pause_s)
        return self._read("GET", path, outcome, answer)

    def _try(self, path: str, policy: RetryPolicy) -> HttpAnswer | Failure:
        try:
            return policy.check(self._client.request("GET", path, timeout_s=QUICK_S), "engine")
        except NoAnswer as error:
            return policy.check(error, "engine")

    def _ask(self, method: str, path: str, answer: type[T], *, content: bytes | None, timeout_s: float) -> T:
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            response = self._client.request(method, path, body=content, headers=headers, timeout_s=timeout_s)
        except LateAnswer:
            raise SyncError(
                f"the engine at {self.url} did not answer {method} {path} within {timeout_s:.0f} s",
                fix="its log says what it is doing; if it only needs longer, give --publish-timeout-s more",
            ) from None
        except NoAnswer as error:
            raise SyncError(
                f"the engine at {self.url} ended during {method} {path}: {error}",
                fix="its log says why; start it again, then continue with treadle run --resume",
            ) from None
        return self._read(method, path, response, answer)

    def _read(self, method: str, path: str, response: HttpAnswer, answer: type[T]) -> T:
        said = response.message or "nothing"
        if response.status in (401, 403):
            raise SyncError(
                f"the engine at {self.url} refused {method} {path}: {said}",
                fix=f"put its token into {TOKEN_VARIABLE}",
            )
        if response.status == 404:
            raise SyncError(
                f"the engine at {self.url} does not do {method} {path}: {said}",
                fix="start it for this --weight-bridge-mode (docs/weights.md says how), or choose another mode",
            )
        if response.status != OK:
            raise SyncError(
                f"the engine at {self.url} failed in {method} {path} ({response.status}): {said}",
                fix="its log says why",
            )
        try:
            return msgspec.json.decode(response.content, type=answer)
        except msgspec.MsgspecError as error:
            raise SyncError(
                f"the engine at {self.url} answered {method} {path} with something else than was asked for: {error}",
                fix="use an engine of the same release",
            ) from None


# ---- attach: the engine must serve the model, number format and quantization that are to be trained


def attach_own_weights(config: TrainConfig, engine: EngineLink) -> AttachedModel:
    """For modes in which the trainer has its own copy of the weights."""
    info = engine.wait_for("/bridge/info", BridgeInfo)
    check_same_dtype(config, info.dtype)
    check_same_quantization(config, info)
    return AttachedModel(folder=choose_folder(config, Path(info.model_name)), dtype=info.dtype)


def attach_remote(config: TrainConfig, info: BridgeInfo) -> AttachedModel:
    """For an engine that may be on another machine, where its paths mean nothing. Names, shapes and number format of
    the weights are compared when it joins the process group."""
    check_same_dtype(config, info.dtype)
    check_same_quantization(config, info)
    served = Path(info.model_name)
    folder = local_folder(config.model) if "model" in config.model_fields_set else None
    if folder is None:
        _check_same_model(config, served)
        folder = served
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {served} here, which the engine serves", fix="give --model a folder")
    return AttachedModel(folder=folder, dtype=info.dtype)


def attach_adapters(config: TrainConfig, engine: EngineLink) -> AttachedModel:
    """For modes that publish adapters."""
    attached = attach_own_weights(config, engine)
    info = engine.get("/bridge/info", BridgeInfo)
    if not info.has_lora:
        raise ConfigError(
            f"the engine at {engine.url} takes no adapters, which --weight-bridge-mode {config.weight_bridge_mode} "
            "publishes",
            fix="start it with --enable-lora, or choose --weight-bridge-mode reload",
        )
    if info.max_lora_rank is not None and config.lora_r > info.max_lora_rank:
        raise ConfigError(
            f"adapters of rank {config.lora_r} are over the engine's largest, {info.max_lora_rank}",
            fix=f"start the engine with --max-lora-rank {config.lora_r}, or set --lora-r {info.max_lora_rank}",
        )
    return attached


def choose_folder(config: TrainConfig, served: Path) -> Path:
    """The folder of the model that training starts from: the one that the engine serves.

    If an earlier run with this save_path restarted the engine, it serves trained weights, and --model is used instead.
    """
    if LiveFolder(config).holds(served):
        requested = local_folder(config.model)
        if requested is None:
            raise ConfigError(
                f"the engine serves {served}, which is trained already",
                fix="give --model the folder that training began with",
            )
        return requested
    _check_same_model(config, served)
    if not served.is_dir():
        raise ConfigError(f"there is no folder {served}, which the engine serves", fix="give --model a folder")
    return served


def _check_same_model(config: TrainConfig, served: Path) -> None:
    """Without --model the trainer takes the engine's model."""
    if "model" in config.model_fields_set and not is_same_model(config.model, served):
        raise ConfigError(
            f"the engine serves the model {served}, and the trainer is to train {config.model}",
            fix="give both the same --model, or leave the trainer's out",
        )


def check_same_quantization(config: TrainConfig, info: BridgeInfo) -> None:
    """Weights of 4 and of 16 bits are different policies."""
    if info.quantization != config.base_quantization:
        raise ConfigError(
            f"the engine's weights have the quantization {info.quantization}, and base_quantization is "
            f"{config.base_quantization}",
            fix=f"start the engine with --quantization {config.base_quantization}, or give the trainer "
            f"--base-quantization {info.quantization}",
        )


def check_same_dtype(config: TrainConfig, served: str) -> None:
    if config.dtype not in ("auto", served):
        raise ConfigError(f"the engine's weights are {served}, not {config.dtype}", fix="set --dtype at the engine")
