"""What the HTTP surface asks of an engine. Two stand behind it: transformers in this process (transformers_engine.py,
scheduler.py), and vLLM as a server of its own on loopback (vllm/).

    hold(mode)                 no token is sampled from here on; "keep" freezes what runs, "wait" lets it finish
    release(policy_version)    go on; with a version: under new weights, what was cached from the old is dropped

Everything is asynchronous: the surface serves thousands of requests at once from one thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from treadle.engines.model_folder import ADAPTER_CONFIG
from treadle.engines.sampling import SamplingParams
from treadle.errors import RequestError
from treadle.sync.layout import Layout
from treadle.wire.bridge import Adopt, JoinGroup, Received, ReceiveWeights
from treadle.wire.generate import Wave

if TYPE_CHECKING:
    from treadle.engines.tokenizer import Text  # transformers takes seconds to load, and few who look here need it

HoldMode = Literal["keep", "wait", "abort"]
LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]


@dataclass(frozen=True)
class Request:
    """What is to be generated, checked and tokenized."""

    prompt_ids: list[int]
    n: int
    max_tokens: int
    sampling: SamplingParams
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()  # besides the model's own ends
    ignore_eos: bool = False
    num_top: int = 0  # likeliest tokens whose logprobs are reported beside the sampled one's
    num_prompt_top: int | None = None  # the same for the prompt's tokens; None: their logprobs are not wanted
    wave: Wave | None = None
    adapter: str | None = None  # a LoRA adapter by name; None: the newest one that serves the policy, if any


@dataclass
class Sampled:
    """One completion. `logprobs` are those of the distribution it was sampled from, or raw ones (LogprobsMode)."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)  # per token, when num_top was asked for
    finish_reason: str | None = None  # "stop", "length" or "abort"; None: it still grows
    text: str = ""  # without the stop string that ended it, and without special tokens
    policy_versions: list[int] = field(default_factory=list)  # each version that tokens came from, oldest first


@dataclass
class Generation:
    """The answer to a request: its `n` completions."""

    completions: list[Sampled]
    prompt_tops: list[dict[int, float]] | None = None  # per prompt token; of the first one, nothing ({}) is known
    seconds: float = 0.0


@dataclass(frozen=True)
class Delta:
    """What one more moment of a streamed generation brought for completion `index`."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    tops: list[dict[int, float]]
    text: str  # only what is new
    finish_reason: str | None
    policy_version: int


@dataclass(frozen=True)
class EngineFacts:
    """What does not change while an engine serves."""

    kind: Literal["transformers", "vllm"]
    version: str  # of the library that generates
    folder: Path  # of the model, with its tokenizer
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    logprobs_mode: LogprobsMode
    max_num_seqs: int
    has_lora: bool
    max_lora_rank: int | None
    quantization: str = "none"


@dataclass(frozen=True)
class EngineState:
    """How it is doing. `failure` is set once generation cannot go on: health must tell."""

    policy_version: int
    is_held: bool
    num_running: int
    num_waiting: int
    generated_tokens: int
    generating_s: float
    num_moves: int  # grows while requests get on: with each token, or with each request where no more is known
    failure: str | None = None


ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors")  # as PEFT saves an adapter


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that can be asked for by name."""

    name: str
    path: Path
    rank: int
    policy_version: int | None  # of the policy it is; None: loaded by hand


def find_loaded(adapters: Iterable[Adapter], name: str, path: Path, policy_version: int | None) -> Adapter | None:
    """The very adapter, if it is loaded: a call that is repeated, because its answer was lost, changes nothing."""
    known = next((adapter for adapter in adapters if adapter.name == name), None)
    if known is not None and (known.path, known.policy_version) != (path, policy_version):
        raise RequestError(f"the adapter '{name}' is loaded already, from {known.path}", fix="choose a new name")
    return known


class Engine(Protocol):
    """All methods raise EngineError (it cannot be done now) or RequestError (the request itself is wrong)."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def text(self) -> Text:
        """Of the model that is served."""

    @property
    def policy_version(self) -> int: ...

    async def state(self) -> EngineState: ...

    async def generate(self, request: Request) -> Generation: ...

    def stream(self, request: Request) -> AsyncIterator[Delta]: ...

    async def hold(self, mode: HoldMode, timeout_s: float) -> None: ...

    async def release(self, policy_version: int | None) -> float:
        """Seconds that no token was sampled."""

    async def adopt(self, order: Adopt) -> float:
        """Stand still until the trainer has written the weights, then go on under its version: seconds of that. When
        it does not finish, the engine stays held."""

    async def layout(self) -> Layout | None:
        """Where the weights lie that a trainer may write; None: this engine shares none."""

    async def fingerprints(self, policy_version: int, adapter: str | None = None) -> Mapping[str, str]:
        """By the name a trainer knows each weight by (sync/fingerprint.py), or each matrix of an adapter
        (wire/bridge.py, AskFingerprints). May be asked while held."""

    async def reload(self, folder: Path, policy_version: int | None) -> float:
        """Take the weights of a saved model (or only those in it that changed); what runs goes on under them. Without
        a version they are the next one. Seconds that no token was sampled."""

    async def join(self, request: JoinGroup) -> None:
        """Form a process group with a trainer; weights that are not this engine's are refused by name before."""

    async def receive(self, body: ReceiveWeights) -> Received:
        """Take what the trainer broadcasts in that group now, while held. One that breaks off leaves the engine held:
        `release` is refused until another has come whole, or a restart."""

    async def restart(self, folder: Path, adapter: Path | None, policy_version: int) -> None:
        """Begin anew from a saved model; requests wait meanwhile."""

    async def load_adapter(self, name: str, path: Path, policy_version: int | None) -> Adapter: ...

    async def unload_adapter(self, name: str) -> None: ...

    def adapters(self) -> list[Adapter]: ...

    @property
    def serving_adapter(self) -> Adapter | None:
        """What requests that name none are served by; None: the model itself."""

    async def close(self) -> None: ...
