"""What trainer and engine say to each other about weights: /bridge/*, /reload_weights and /lora/* of the engine.

Paths and answers that Atropos' server had keep their names; what is ours is added beside them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

TOKEN_VARIABLE = "TREADLE_ENGINE_TOKEN"  # noqa: S105 - a variable's name


class Pause(msgspec.Struct, kw_only=True):
    """POST /bridge/pause. "keep" freezes running requests between two tokens, "wait" lets them finish first."""

    mode: Literal["keep", "wait", "abort"] = "keep"


class Resume(msgspec.Struct, kw_only=True):
    """POST /bridge/resume. With a version: the weights were changed, and are this version now."""

    policy_version: int | None = None


class BridgeState(msgspec.Struct, kw_only=True):
    """The answer to both."""

    status: str  # "paused" or "resumed"
    policy_version: int


class BridgeInfo(msgspec.Struct, kw_only=True):
    """GET /bridge/info."""

    enabled: bool
    shared_weights: bool
    update_count: int  # the policy version
    last_update_time: float | None  # seconds since 1970
    model_name: str
    device: str
    engine: str  # "transformers" or "vllm"
    engine_version: str
    dtype: str
    is_paused: bool
    has_lora: bool
    max_lora_rank: int | None


class AskFingerprints(msgspec.Struct, kw_only=True):
    """POST /bridge/fingerprints: of which version; with every version another part of each weight is read
    (sync/fingerprint.py)."""

    policy_version: int


class Fingerprints(msgspec.Struct, kw_only=True):
    policy_version: int
    fingerprints: dict[str, str]


class ReloadWeights(msgspec.Struct, kw_only=True):
    """POST /reload_weights: a folder on the engine's machine with safetensors of all weights, or the changed ones."""

    path: str
    policy_version: int | None = None  # None: one more than now


class RestartEngine(msgspec.Struct, kw_only=True):
    """POST /bridge/restart: begin anew from a saved model, with an adapter on top of it or without."""

    model_path: str
    adapter_path: str | None = None
    policy_version: int


class Updated(msgspec.Struct, kw_only=True):
    """The answer to both: which version is served now, and how long it took."""

    status: str  # "ok"
    policy_version: int
    seconds: float


class LoadAdapter(msgspec.Struct, kw_only=True):
    """POST /lora/load. With a version: requests that name no adapter are served by it from here on."""

    adapter_path: str
    adapter_name: str | None = None  # None: the folder's name
    policy_version: int | None = None


class LoadedAdapter(msgspec.Struct, kw_only=True):
    status: str  # "ok"
    adapter_path: str
    adapter_name: str
    adapter_id: int
    load_count: int
    adapter_config: dict[str, object]  # r, lora_alpha, target_modules, base_model
    policy_version: int
    seconds: float


class UnloadAdapter(msgspec.Struct, kw_only=True):
    """POST /lora/unload. None: the one that serves now."""

    adapter_name: str | None = None
