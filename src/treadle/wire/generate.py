"""Completion requests and answers of an engine: POST /generate in Atropos' shape, and OpenAI's API.

Our additions to OpenAI's fields: `min_p`, `top_k`, `ignore_eos`, `stop_token_ids`, `return_token_ids`,
`chat_template_kwargs`, and `policy_version(s)`, `token_ids`, `prompt_token_ids` in answers. A field
that is not listed is refused by name. `RoutedFields` are those that the router smg adds to a body.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

MIN_TEMPERATURE = 0.01  # an engine takes the likeliest token below: logits divided by less leave the range of float32
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000
MAX_NAME_CHARS = 255
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
FilePath = Annotated[str, msgspec.Meta(max_length=4096)]  # PATH_MAX of Linux; also the name of a model

Prompt = str | dict[str, Any]  # text, or {"prompt_token_ids": [...]}


class Wave(msgspec.Struct, kw_only=True):
    """Requests that are to be generated side by side, whatever order they arrive in.

    The engine holds the requests of a wave until all `size` of them are there. The same wave then always makes the
    same batches, so the same seed gives the same tokens to the last bit.
    """

    id: Name
    size: int
    index: int


UNKNOWN_MODEL = "unknown"  # what smg writes into a body of /generate that names no model


class RoutedFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields that smg adds to every body of POST /generate."""

    model: FilePath | None = None  # also an adapter, as in OpenAI's API
    # Taken, and without effect on the answer.
    log_metrics: bool = True
    no_logs: bool = False
    # Taken only with the value that changes nothing.
    return_text_in_logprobs: bool = False
    background: bool = False
    return_bytes: bool = False
    return_entropy: bool = False


class GenerateRequest(RoutedFields, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Unknown sampling fields are refused by name, never ignored."""

    prompt: Prompt | list[Prompt] | None = None
    input_ids: list[int] | None = None  # in place of `prompt`: routers choose an engine by its first tokens
    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0  # below MIN_TEMPERATURE: as 0, the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None  # number of most likely tokens to report beside the sampled one
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    stream: bool = False
    wave: Wave | None = None
    adapter: Name | None = None  # a LoRA adapter by name; None: the newest one of the policy, if there is any


class GenerateAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer to one prompt; a list of prompts is answered by a list of these.

    `logprobs[i][t]` is a one-element list holding {token id: logprob}, as Atropos' clients read it: the sampled
    token first, then the likeliest others. `prompt_logprobs[t]` is such a dict for a token of the prompt, null for the
    first.

    Logprobs are those of the distribution that was sampled from (temperature and truncation included); a prompt's are
    the model's own.
    """

    text: list[str]
    prompt: str
    finish_reasons: list[str]  # "stop", "length" or "abort"
    token_ids: list[list[int]]
    prompt_token_ids: list[int]
    policy_version: int  # the oldest that a token was sampled under
    policy_versions: list[list[int]] = []  # per completion: each version that tokens came from, oldest first
    logprobs: list[list[list[dict[str, float]]]] | None = None
    prompt_logprobs: list[dict[str, float] | None] | None = None
    num_tokens: int = 0
    seconds: float = 0.0
    engine_id: str = ""  # of the engine that sampled it; another one after every start


class GenerateChunk(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of a streamed answer: what is new for completion `index`. The last line is a whole GenerateAnswer."""

    index: int
    text: str
    token_ids: list[int]
    policy_version: int
    logprobs: list[list[dict[str, float]]] | None = None
    finish_reason: str | None = None


class EngineHealth(msgspec.Struct, kw_only=True):
    status: str  # "ok", "paused" or "failed: ..."
    model: str
    policy_version: int
    num_running: int = 0
    num_waiting: int = 0
    generated_tokens: int = 0
    generating_s: float = 0.0
    kv_cache_usage: float = 0.0  # share of the KV cache that running sequences use; 0 if unknown
    max_num_seqs: int = 0  # sequences that it generates concurrently at most; 0: unknown


# ---- OpenAI: /v1/completions, /v1/chat/completions, /v1/models


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool = False


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of completions take."""

    model: FilePath | None = None
    n: int | None = 1
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    # Taken, and without effect on what is sampled.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    # Taken only with the value that changes nothing.
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None


class CompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[Any]  # text, texts, token ids, or lists of token ids
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # vLLM's field: number of likeliest tokens beside each token of the prompt
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None


class ChatRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TokenLogprob, kw_only=True):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatLogprob]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, kw_only=True):
    logprob: float


class Choice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Of a completion: `text`. Of a chat: `message`, or `delta` in a stream.

    `prompt_logprobs[t]` has the model's own logprobs at a token of the prompt, by token id; null for the first.
    """

    index: int
    finish_reason: str | None
    policy_versions: list[int]
    text: str | None = None
    message: dict[str, str] | None = None
    delta: dict[str, str] | None = None
    logprobs: ChatLogprobs | CompletionLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A whole answer, or one chunk of a streamed one."""

    id: str
    object: Literal["text_completion", "chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[Choice]
    policy_version: int | None = None  # the oldest that a token was sampled under
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    created: int
    root: str
    parent: str | None
    max_model_len: int
    object: str = "model"
    owned_by: str = "treadle"


class ModelList(msgspec.Struct, kw_only=True):
    data: list[ModelCard]
    object: str = "list"
