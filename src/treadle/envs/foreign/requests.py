"""What an agent may ask for, checked: bodies of /chat/completions and /completions -> one `Ask`. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from treadle.envs.base import Message
from treadle.envs.foreign.messages import Key, key_of, num_chars, plain, short_name
from treadle.errors import RequestError
from treadle.wire.generate import MAX_STOP_CHARS, MAX_STOP_STRINGS
from treadle.wire.openai import ChatRequest, CompletionRequest, Sampling

MAX_BRANCHES = 64
MAX_MESSAGES = 2**14
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 2.0  # below, one token has all the probability, and training divides by it


class AgentChat(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """POST .../v1/chat/completions. A temperature that is not given is the run's."""

    temperature: float | None = None
    # Taken, and without effect on what is sampled.
    parallel_tool_calls: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None


class AgentCompletion(CompletionRequest, kw_only=True, forbid_unknown_fields=True):
    """POST .../v1/completions."""

    temperature: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Ask:
    """One call of an agent: go on from these messages, or from this text (or these token ids), in `n` ways."""

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None  # None: the run's
    stop: tuple[str, ...] = ()
    speaker: str = ""  # who asked, where several share a session

    @cached_property
    def keys(self) -> list[Key]:
        """Of the messages. Computed once: every conversation of the session is compared with them."""
        return [key_of(message) for message in self.messages]

    @cached_property
    def tools_key(self) -> str:
        return json.dumps(self.tools, sort_keys=True)

    @cached_property
    def num_chars(self) -> int:
        """How much of this call a session keeps, in characters."""
        text = len(self.prompt) + sum(map(num_chars, self.keys))
        return text + (len(self.tools_key) if self.tools else 0)


def chat_ask(body: AgentChat, run_temperature: float, speaker: str = "") -> Ask:
    if not body.messages:
        raise RequestError("there are no messages", fix="send at least one")
    if len(body.messages) > MAX_MESSAGES:
        raise RequestError(f"a conversation has at most {MAX_MESSAGES} messages, not {len(body.messages)}")
    if (body.response_format or {"type": "text"}).get("type") != "text":
        raise RequestError("response_format other than text is not offered", fix="leave it out")
    if body.tool_choice not in (None, "auto", "none"):
        raise RequestError("a tool cannot be forced", fix='leave tool_choice out, or set it to "auto" or "none"')
    if body.top_logprobs:
        raise RequestError("top_logprobs are not offered: only the sampled tokens' own", fix="leave it out")
    if body.chat_template_kwargs or not body.add_generation_prompt:
        raise RequestError("the chat template is used as it is", fix="leave its settings out")
    return Ask(
        messages=tuple(plain(message) for message in body.messages),
        tools=() if body.tool_choice == "none" else tuple(body.tools or ()),
        n=_branches(body),
        max_tokens=_max_tokens(body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens),
        temperature=_temperature(body, run_temperature),
        stop=_stop(body),
        speaker=short_name(speaker, "X-Session-ID"),
    )


def completion_ask(body: AgentCompletion, run_temperature: float, speaker: str = "") -> Ask:
    if body.echo or body.suffix or body.best_of not in (None, body.n or 1):
        raise RequestError("echo, suffix and best_of are not offered", fix="leave them out")
    prompt = body.prompt
    if not isinstance(prompt, str) and not all(type(part) is int for part in prompt):
        raise RequestError("prompt must be one text, or the token ids of one", fix="send one call for each prompt")
    if not prompt:
        raise RequestError("the prompt is empty", fix="send at least one token")
    return Ask(
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        n=_branches(body),
        max_tokens=_max_tokens(body.max_tokens),
        temperature=_temperature(body, run_temperature),
        stop=_stop(body),
        speaker=short_name(speaker, "X-Session-ID"),
    )


def _branches(body: Sampling) -> int:
    """The number of choices; refuses what would change the distribution in ways that training does not follow."""
    truncates = body.top_p not in (None, 1.0) or body.top_k > 0 or body.min_p > 0
    if truncates or body.frequency_penalty or body.presence_penalty or body.logit_bias:
        raise RequestError(
            "top_p, top_k, min_p, penalties and logit_bias would sample from another distribution than the one trained",
            fix="leave them out; temperature is offered",
        )
    if body.stop_token_ids or body.ignore_eos:
        raise RequestError("stop_token_ids and ignore_eos are not offered", fix="use stop")
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_BRANCHES:
        raise RequestError(f"n must be 1 to {MAX_BRANCHES}")
    return n


def _max_tokens(wanted: int | None) -> int | None:
    if wanted is not None and wanted < 1:
        raise RequestError("max_tokens must be at least 1")
    return wanted


def _temperature(body: Sampling, of_the_run: float) -> float | None:
    """The agent's own wish, where it is another than the run's."""
    wanted = body.temperature
    if wanted is None or wanted == of_the_run:
        return None
    if not MIN_TEMPERATURE <= wanted <= MAX_TEMPERATURE:
        raise RequestError(
            f"temperature must be {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, not {wanted:g}: "
            "near 0 the model always says the same, and there is nothing to learn from it",
            fix=f"leave it out, and the run's own ({of_the_run:g}, --env.temperature) is used",
        )
    return wanted


def _stop(body: Sampling) -> tuple[str, ...]:
    words: Sequence[str] = (body.stop,) if isinstance(body.stop, str) else body.stop or ()
    if len(words) > MAX_STOP_STRINGS or not all(0 < len(word) <= MAX_STOP_CHARS for word in words):
        raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, each of 1 to {MAX_STOP_CHARS} characters")
    return tuple(words)
