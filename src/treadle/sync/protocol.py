"""Define the interface of a sync mode, and what the modes share: HTTP calls to the engine and checks when they attach.

attach()                    called before the policy is built: what the engine serves, and where its weights are
publish(policy, version)    sends the last optimizer step to the engine and verifies that it arrived
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

import msgspec
import torch
from torch import Tensor

from treadle.config import TrainConfig
from treadle.errors import ConfigError, SyncError
from treadle.net.access_tokens import bearer_headers
from treadle.net.address import is_loopback
from treadle.net.client import OK, BlockingHttpClient, Failure, HttpAnswer, LateAnswer, NoAnswer, Retries, RetryPolicy
from treadle.sync.gate import PUBLISHER_HEADER, this_publisher
from treadle.sync.layout import Layout
from treadle.sync.model_folders import LiveFolder, is_same_model, local_folder
from treadle.wire.bridge import TOKEN_VARIABLE, BridgeInfo, UnloadAdapter


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Logprobs of a text at temperature 1, in fp32 and in host memory."""

    logprobs_T: Tensor  # of each token except the first
    next_logprobs_V: Tensor  # of every possible next token


class Publishable(Protocol):
    """What a sync mode needs from the trainer's policy."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights that an engine serves."""

    def write_live_weights(self) -> None:
        """Apply the last optimizer step to the live weights, and copy those to where the engine reads."""

    @property
    def serves_copies(self) -> bool:
        """Whether `served_weights` are made on each call (merged with adapters, gathered from several ranks); otherwise
        they are the live weights."""

    @property
    def device(self) -> torch.device:
        """Of the weights."""

    def served_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of `served_weights`, in the same order, without computing any."""

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that an engine serves after this publish, by name, with adapters merged in."""

    def served_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's matrices in the engine's number format (wire/bridge.py, AskFingerprints). Their memory does not
        move between publishes."""

    def score_tokens(self, token_ids: Sequence[int]) -> TokenScores:
        """Score one text under the live weights, without gradients."""

    def save_model(self, root: Path, name: str) -> Path:
        """Write a complete model folder for an engine, with adapters merged into the weights."""

    def save_weights(self, root: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
        """Write a folder with only these tensors."""

    def save_adapter(self, root: Path, name: str) -> Path:
        """Write the adapters in PEFT's format."""


@dataclass(frozen=True)
class AttachedModel:
    """What the trainer builds its policy from."""

    folder: Path  # of the model that training starts from
    dtype: str  # of the engine's weights; "auto": unknown
    layout: Layout | None = None  # where the engine's weights are, if the trainer may write there
    has_one_copy: bool = False  # use the engine's own memory for the live weights, if possible


class SyncMode(Protocol):
    def attach(self) -> AttachedModel: ...

    def publish(self, policy: Publishable, version: int) -> PublishResult: ...

    def settle(self) -> None:
        """Wait for the pending verification of the last publish and raise its error. The next publish does too."""

    def welcome(self) -> Callable[[Publishable], None] | None:
        """What gives the last published version to engines that joined since, for the trainer to call while it waits
        for a batch; None: no engine waits for that."""
        return None


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Result of verifying a publish. The canary is not sent with every publish; then its values are None."""

    seconds: float = 0.0
    canary_mean: float | None = None
    canary_max: float | None = None

    def metrics(self) -> dict[str, float]:
        canary = {"sync/canary_mean_abs_diff": self.canary_mean, "sync/canary_max_abs_diff": self.canary_max}
        return {"perf/weight_sync_verify_s": self.seconds} | {k: v for k, v in canary.items() if v is not None}


NOT_VERIFIED = Verified()


@dataclass(frozen=True, kw_only=True)
class PublishResult:
    """Result of a publish: the version that the engine reports, and the cost."""

    version: int
    wait_s: float  # until the engine was paused, or an earlier publish was complete
    write_s: float
    hold_s: float = 0.0  # during which the engine sampled no token, as reported by the engine
    num_bytes: int = 0  # sent
    verified: Verified = NOT_VERIFIED

    def metrics(self) -> dict[str, float]:
        return {
            "perf/weight_sync_pause_s": self.wait_s,
            "perf/weight_sync_transfer_s": self.write_s,
            "perf/weight_sync_hold_s": self.hold_s,
            "sync/bytes": self.num_bytes,
            **self.verified.metrics(),
        }


LOADING_S = 900.0  # a large model from a cold disk
QUICK_S = 5.0  # for requests that an engine answers at once
_STILL_LOADING = 503

T = TypeVar("T")


class FolderNotUsable(SyncError):
    """The engine does not see a folder, or may not load from it, and takes its files instead."""


class EngineGone(SyncError):
    """An engine that ended, or does not answer."""


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
        return cls(config.engine_url[0], config.publish_deadline_s, save_path=config.save_path)

    def post(self, path: str, body: msgspec.Struct, answer: type[T]) -> T:
        """Send a request that may take as long as a publish."""
        content = msgspec.json.encode(body)
        return self._ask("POST", path, answer, content=content, timeout_s=self._timeout_s)

    def post_bytes(self, path: str, content: bytes, answer: type[T], timeout_s: float) -> T:
        return self._ask("POST", path, answer, content=content, timeout_s=timeout_s, kind="application/octet-stream")

    @property
    def timeout_s(self) -> float:
        """Of a request that may take as long as a publish."""
        return self._timeout_s

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

    def _ask(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        content: bytes | None,
        timeout_s: float,
        kind: str = "application/json",
    ) -> T:
        headers = {} if content is None else {"Content-Type": kind}
        try:
            response = self._client.request(method, path, body=content, headers=headers, timeout_s=timeout_s)
        except LateAnswer:
            raise EngineGone(
                f"the engine at {self.url} did not answer {method} {path} within {timeout_s:.0f} s",
                fix="its log says what it is doing; if it only needs longer, give --publish-timeout-s more",
            ) from None
        except NoAnswer as error:
            raise EngineGone(
                f"the engine at {self.url} ended during {method} {path}: {error}",
                fix="its log says why; start it again, then continue with treadle run --resume",
            ) from None
        return self._read(method, path, response, answer)

    def _read(self, method: str, path: str, response: HttpAnswer, answer: type[T]) -> T:
        said = "" if response.status == OK else response.message or "nothing"
        if response.status in (401, 403):
            raise SyncError(
                f"the engine at {self.url} refused {method} {path}: {said}",
                fix=f"put its token into {TOKEN_VARIABLE}",
            )
        if response.status in (400, 404) and response.values.get("takes_files") is True:
            raise FolderNotUsable(
                f"the engine at {self.url} cannot load in {method} {path}: {said}", fix="its log says why"
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


class _AdapterStatus(msgspec.Struct):
    name: str
    policy_version: int | None  # None: loaded by hand, and left alone


class _LoraStatus(msgspec.Struct):
    """The used fields of GET /lora/status."""

    adapters: list[_AdapterStatus]


def unload_other_adapters(engine: EngineLink, kept: Sequence[str]) -> None:
    """Unload the policy's adapters that are two publishes old, or from before a resume."""
    for adapter in engine.get("/lora/status", _LoraStatus).adapters:
        if adapter.policy_version is not None and adapter.name not in kept:
            engine.post("/lora/unload", UnloadAdapter(adapter_name=adapter.name), dict)


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
    """The folder of the model that training starts from: the one that the engine serves, or on another machine the one
    that --model names here.

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
    own = local_folder(config.model) if "model" in config.model_fields_set else None
    if own is not None and not served.is_dir() and config.mode.uses_folder and not config.mode.restarts:
        return own  # the proof of each publish compares the weights
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
    if info.quantization != config.quantization:
        raise ConfigError(
            f"the engine's weights have the quantization {info.quantization}, and the trainer's {config.quantization}",
            fix=f"start the engine with --quantization {config.quantization}, or give the trainer "
            f"--quantization {info.quantization}",
        )


def check_same_dtype(config: TrainConfig, served: str) -> None:
    if config.dtype not in ("auto", served):
        raise ConfigError(f"the engine's weights are {served}, not {config.dtype}", fix="set --dtype at the engine")
