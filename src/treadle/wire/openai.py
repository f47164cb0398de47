"""OpenAI's wire, as its client sends and reads it: /v1/completions, /v1/chat/completions, /v1/models.

What is ours beside it: `min_p`, `top_k`, `ignore_eos`, `stop_token_ids`, `return_token_ids`, `chat_template_kwargs`,
and `policy_version(s)`, `token_ids`, `prompt_token_ids` in answers. A field that is not here is refused by name.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from treadle.wire.generate import FilePath


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


class Choice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Of a completion: `text`. Of a chat: `message`, or `delta` in a stream."""

    index: int
    finish_reason: str | None
    policy_versions: list[int]
    text: str | None = None
    message: dict[str, str] | None = None
    delta: dict[str, str] | None = None
    logprobs: ChatLogprobs | CompletionLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


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
