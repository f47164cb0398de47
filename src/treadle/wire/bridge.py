"""What trainer and engine say to each other about weights: /bridge/*, /reload_weights and /lora/* of the engine.

Paths and answers that Atropos' server had keep their names; what is ours is added beside them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from treadle.wire.generate import FilePath, Name

TOKEN_VARIABLE = "TREADLE_ENGINE_TOKEN"  # noqa: S105 - a variable's name
Version = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # of the policy


class Pause(msgspec.Struct, kw_only=True):
    """POST /bridge/pause. "keep" freezes running requests between two tokens, "wait" lets them finish first."""

    mode: Literal["keep", "wait", "abort"] = "keep"
    at_most_s: Annotated[float, msgspec.Meta(gt=0)] | None = None  # then it resumes by itself; None: never


class Resume(msgspec.Struct, kw_only=True):
    """POST /bridge/resume. With a version: the weights were changed, and are this version now."""

    policy_version: Version | None = None


class Adopt(msgspec.Struct, kw_only=True):
    """POST /bridge/adopt: stand still between two tokens until the trainer has written the weights, and go on under
    the new version. That it stands still, and that they are written, is said at the gate (sync/gate.py)."""

    policy_version: Version
    number: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]  # of this publish, at the gate
    gate: int  # the inode of the gate's file, as the trainer has it: an engine that was restarted has another
    after_version: int | None = None  # refused when another one is served; None: whichever it is
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 180.0  # for the trainer's write; then the engine stays held


class BridgeState(msgspec.Struct, kw_only=True):
    """The answer to the three."""

    status: str  # "paused", "resumed" or "adopted"
    policy_version: int
    held_s: float = 0.0  # resumed, adopted: for how long no token was sampled


class BridgeInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
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
    quantization: str  # of the weights: "none" or "nf4"
    max_model_len: int
    max_num_seqs: int
    adapter_root: str  # the folder from which adapters and weights are loaded
    num_workers: int = 1  # processes that have a part of the weights each (tensor parallel)
    engine_id: str = ""  # another one after every start of the engine


class WeightPart(msgspec.Struct, frozen=True, array_like=True):
    """`length` rows (dim 0) or columns (dim 1) of a weight, from `start`; [0, 0, rows] is all of it."""

    dim: int
    start: int
    length: int


class Shards(msgspec.Struct, kw_only=True):
    """GET /bridge/shards: for each worker, by rank, its part of each weight; empty if one process has all weights."""

    workers: list[dict[str, WeightPart]]


class AskFingerprints(msgspec.Struct, kw_only=True):
    """POST /bridge/fingerprints: of which version; with every version another part of each weight is read
    (sync/fingerprint.py). With an adapter: of its matrices (`MODULE.lora_A`, `MODULE.lora_B`), in the engine's number
    format, B times the adapter's scale. Of an engine with several workers: of each worker's part of each weight, named
    `WEIGHT on worker 0 of 2`."""

    policy_version: Version
    adapter: Name | None = None


class Fingerprints(msgspec.Struct, kw_only=True):
    policy_version: int
    fingerprints: dict[str, str]


class SentFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was sent to POST /bridge/files/FOLDER/NAME, for an engine that does not see the trainer's folder."""

    name: Name
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class ReceivedPart(msgspec.Struct, kw_only=True):
    """The answer to POST /bridge/files/FOLDER/NAME?offset=N&size=N, whose body is a part of the file."""

    num_bytes: int  # of the file, so far


SentFiles = Annotated[list[SentFile], msgspec.Meta(max_length=4096)]


class ReloadWeights(msgspec.Struct, kw_only=True, omit_defaults=True):
    """POST /reload_weights: a folder on the engine's machine with safetensors of all weights, or the changed ones.
    With `files`: the folder of that name that was sent to the engine."""

    path: FilePath | None = None  # None: the folder of the engine's model, where rl-max saves its weights
    policy_version: Version | None = None  # None: one more than now
    files: SentFiles = []


class RestartEngine(msgspec.Struct, kw_only=True):
    """POST /bridge/restart: start again from a saved model, with an adapter on top of it or without."""

    model_path: FilePath
    adapter_path: FilePath | None = None
    policy_version: Version


class Updated(msgspec.Struct, kw_only=True):
    """The answer to both: which version is served now, and how long it took."""

    status: str  # "ok"
    policy_version: int
    seconds: float
    held_s: float = 0.0  # of a reload: for how long no token was sampled


TimeoutS = Annotated[float, msgspec.Meta(gt=0, le=86400)]


Shape = Annotated[tuple[int, ...], msgspec.Meta(max_length=16)]


class JoinGroup(msgspec.Struct, kw_only=True, omit_defaults=True):
    """POST /bridge/join: form a process group with a trainer, for broadcasts of these weights; it takes the place of an
    earlier one. Answered when the group is formed; weights that are not the engine's are refused by name before. The
    trainer has rank 0, the engine's workers the ranks from `first_rank` on."""

    group: Name  # chosen by the trainer; no two are the same
    host: Name  # where the trainer's store listens, for the two to learn of each other
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    backend: Literal["nccl", "gloo"]
    dtype: Name
    # Names and shapes, in the order in which they are sent.
    weights: Annotated[list[tuple[FilePath, Shape]], msgspec.Meta(max_length=2**20)]
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1 << 10, le=1 << 34)]  # that are sent at a time
    timeout_s: TimeoutS  # for forming it, and for each broadcast
    num_ranks: Annotated[int, msgspec.Meta(ge=2, le=4096)] = 2  # processes in the group
    first_rank: Annotated[int, msgspec.Meta(ge=1, le=4095)] = 1


class Joined(msgspec.Struct, kw_only=True):
    status: str  # "joined"


class ReceiveWeights(msgspec.Struct, kw_only=True):
    """POST /bridge/receive: take all weights that the trainer broadcasts in this group now. Only while held; one that
    fails leaves the engine held until another succeeds, or a restart."""

    group: Name
    timeout_s: TimeoutS


class Received(msgspec.Struct, kw_only=True):
    status: str  # "received"
    num_bytes: int
    seconds: float


class LoadAdapter(msgspec.Struct, kw_only=True, omit_defaults=True):
    """POST /lora/load: requests that name no adapter are served by it from here on. `files`: see ReloadWeights."""

    adapter_path: FilePath
    adapter_name: Name | None = None  # None: the folder's name
    policy_version: Version | None = None  # None: the next one
    files: SentFiles = []


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

    adapter_name: Name | None = None
