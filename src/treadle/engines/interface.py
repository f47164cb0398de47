"""Define the interface between the HTTP API and an engine, and the types that cross it.

Two engines implement it: transformers in this process (transformers_engine.py, scheduler.py), and vLLM as a child
process on loopback (vllm/).

    hold(mode)                 stop sampling; running requests freeze ("keep"), finish ("wait") or end ("abort")
    release(policy_version)    resume; with a version, under new weights, and what was cached under the old is dropped

Everything is asynchronous: the API serves thousands of requests at once from one thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from treadle.engines.sampling import SamplingParams
from treadle.errors import EngineError, RequestError
from treadle.sync.layout import Layout
from treadle.wire.bridge import Adopt, JoinGroup, Received, ReceiveWeights, Shards
from treadle.wire.generate import Wave

if TYPE_CHECKING:
    from treadle.engines.tokenizer import ModelTokenizer  # imports transformers, which takes seconds

HoldMode = Literal["keep", "wait", "abort"]
HOLD_TIMEOUT_S = 120.0  # for running requests, when weights change


@dataclass(frozen=True)
class Request:
    """A generation request, validated and tokenized."""

    prompt_ids: list[int]
    n: int
    max_tokens: int
    sampling: SamplingParams
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()  # in addition to the model's EOS tokens
    ignore_eos: bool = False
    num_top: int = 0  # top-k tokens whose logprobs are reported for each sampled token
    num_prompt_top: int | None = None  # the same for prompt tokens; None: no prompt logprobs
    wave: Wave | None = None
    adapter: str | None = None  # a LoRA adapter by name; None: the one that serves the policy, if any


@dataclass
class SampledCompletion:
    """One completion. `logprobs` are of the distribution it was sampled from."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)  # per token, if num_top was requested
    finish_reason: str | None = None  # "stop", "length" or "abort"; None: still running
    text: str = ""  # without the stop string and special tokens
    policy_versions: list[int] = field(default_factory=list)  # versions that sampled tokens of it, oldest first


@dataclass
class GenerationResult:
    """The `n` completions of a request."""

    completions: list[SampledCompletion]
    prompt_tops: list[dict[int, float]] | None = None  # per prompt token; {} for the first, which has no logprob
    seconds: float = 0.0


@dataclass(frozen=True)
class CompletionDelta:
    """New tokens and text of completion `index` in a stream."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    tops: list[dict[int, float]]
    text: str  # new text only
    finish_reason: str | None
    policy_version: int


@dataclass(frozen=True)
class EngineFacts:
    """Properties of an engine that do not change while it serves."""

    kind: Literal["transformers", "vllm"]
    version: str  # of transformers or vLLM
    folder: Path  # of the model and its tokenizer
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    max_num_seqs: int
    has_lora: bool
    max_lora_rank: int | None
    quantization: str = "none"
    num_workers: int = 1  # processes that have a part of the weights each (tensor parallel)


@dataclass(frozen=True)
class ServingStatus:
    """Current status. `failure` is set when generation cannot continue; /health reports it."""

    policy_version: int
    is_held: bool
    num_running: int
    num_waiting: int
    generated_tokens: int
    generating_s: float
    progress_count: int  # progress counter: decode steps (transformers) or generated tokens (vLLM)
    kv_cache_usage: float = 0.0  # share in use; 0 if unknown
    failure: str | None = None


@dataclass(frozen=True)
class Adapter:
    """A loaded LoRA adapter, which requests can select by name."""

    name: str
    path: Path
    rank: int
    policy_version: int | None  # None: loaded by hand, it is no version of the policy


def check_takes_adapters(facts: EngineFacts) -> None:
    if not facts.has_lora:
        raise EngineError("this engine takes no adapters", fix="start it with --enable-lora")


def find_loaded_adapter(
    adapters: Iterable[Adapter], name: str, path: Path, policy_version: int | None
) -> Adapter | None:
    """The same adapter, if it is loaded already: a retried load request changes nothing."""
    known = next((adapter for adapter in adapters if adapter.name == name), None)
    if known is not None and (known.path, known.policy_version) != (path, policy_version):
        raise RequestError(f"the adapter '{name}' is loaded already, from {known.path}", fix="choose a new name")
    return known


class InferenceEngine(Protocol):
    """Methods raise EngineError (cannot be done now) or RequestError (the request is invalid)."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def tokenizer(self) -> ModelTokenizer:
        """Tokenizer of the served model."""

    @property
    def policy_version(self) -> int: ...

    async def status(self) -> ServingStatus: ...

    async def generate(self, request: Request) -> GenerationResult: ...

    def stream(self, request: Request) -> AsyncIterator[CompletionDelta]: ...

    async def hold(self, mode: HoldMode, timeout_s: float) -> None: ...

    async def release(self, policy_version: int | None) -> float:
        """Resume; returns the seconds that no token was sampled."""

    async def adopt(self, order: Adopt) -> float:
        """Hold until the trainer has written the shared weights, then resume under its version.

        Returns the seconds that no token was sampled. If the trainer does not finish, the engine stays held.
        """

    async def layout(self) -> Layout | None:
        """Addresses of the weights that a trainer may write; None: this engine shares none."""

    async def fingerprints(self, policy_version: int, adapter: str | None = None) -> Mapping[str, str]:
        """Fingerprints by the trainer's weight names (sync/fingerprint.py), or of an adapter's matrices.

        May be called while held. See AskFingerprints in wire/bridge.py.
        """

    async def shards(self) -> Shards:
        """Which part of each weight each worker has; empty if one process has all weights."""

    async def reload(self, folder: Path, policy_version: int | None) -> float:
        """Load the weights of a saved model, or a delta to it; running requests continue under them.

        Without a version they become the next one. Returns the seconds that no token was sampled.
        """

    async def join(self, request: JoinGroup) -> None:
        """Form a process group with a trainer, after checking that its weights match this engine's."""

    async def receive(self, body: ReceiveWeights) -> Received:
        """Receive the trainer's broadcast while held.

        After a broadcast that fails, `release` is refused until a complete one, or a restart.
        """

    async def restart(self, folder: Path, adapter: Path | None, policy_version: int) -> None:
        """Restart from a saved model; requests wait meanwhile."""

    async def load_adapter(self, name: str, path: Path, policy_version: int | None) -> Adapter: ...

    async def unload_adapter(self, name: str) -> None: ...

    def adapters(self) -> list[Adapter]: ...

    @property
    def serving_adapter(self) -> Adapter | None:
        """The adapter of requests that name none; None: the base model."""

    async def close(self) -> None: ...
