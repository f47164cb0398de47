"""Answers in OpenAI's two shapes, whole and in chunks: a completion has texts, a chat has messages."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from treadle.engines.port import Delta, Generation, Request, Sampled
from treadle.engines.surface.generate import oldest_version
from treadle.engines.surface.openai_logprobs import chat_logprobs, completion_logprobs
from treadle.engines.surface.served import Served
from treadle.wire.openai import Answer, ChatLogprobs, ChatRequest, Choice, CompletionLogprobs, CompletionRequest, Usage

Kind = Literal["text_completion", "chat.completion", "chat.completion.chunk"]


class Reply(ABC):
    """How one call is answered: `whole`, or `opening`, chunks and `closing`."""

    prefix: str  # of the answer's id
    kind: Kind
    chunk_kind: Kind

    def __init__(self, served: Served, body: CompletionRequest | ChatRequest, requests: list[Request]) -> None:
        self.served = served
        self.requests = requests
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = body.model or served.model_name
        self._wants_ids = body.return_token_ids
        self._wants_usage = body.stream_options is not None and body.stream_options.include_usage

    def whole(self, generations: Sequence[Generation]) -> Answer:
        completions = [sampled for generation in generations for sampled in generation.completions]
        answer = self._answer(self.kind, [self._whole_choice(i, sampled) for i, sampled in enumerate(completions)])
        answer.policy_version = oldest_version(completions)
        answer.usage = self._usage(sum(len(sampled.token_ids) for sampled in completions))
        return answer

    def opening(self) -> list[Answer]:
        """What a stream begins with."""
        return []

    def chunk(self, place: int, delta: Delta, num_chars: int) -> Answer:
        """One delta of request `place`; of its completion's text `num_chars` were sent before."""
        index = place * self.requests[0].n + delta.index
        choice = self._choice(index, delta, [delta.policy_version], num_chars)
        self._put_delta(choice, delta.text)
        answer = self._answer(self.chunk_kind, [choice])
        answer.policy_version = delta.policy_version
        return answer

    def closing(self, num_tokens: int) -> list[Answer]:
        """What a stream ends with, when the client wants to know what it cost."""
        if not self._wants_usage:
            return []
        last = self._answer(self.chunk_kind, [])
        last.usage = self._usage(num_tokens)
        return [last]

    @abstractmethod
    def _put_whole(self, choice: Choice, text: str) -> None: ...

    @abstractmethod
    def _put_delta(self, choice: Choice, text: str) -> None: ...

    @abstractmethod
    def _logprobs(self, sampled: Sampled | Delta, num_chars: int) -> ChatLogprobs | CompletionLogprobs | None: ...

    def _whole_choice(self, index: int, sampled: Sampled) -> Choice:
        choice = self._choice(index, sampled, sampled.policy_versions, 0)
        self._put_whole(choice, sampled.text)
        return choice

    def _choice(self, index: int, sampled: Sampled | Delta, policy_versions: list[int], num_chars: int) -> Choice:
        return Choice(
            index=index,
            finish_reason=sampled.finish_reason,
            policy_versions=policy_versions,
            logprobs=self._logprobs(sampled, num_chars),
            token_ids=sampled.token_ids if self._wants_ids else None,
        )

    def _answer(self, kind: Kind, choices: list[Choice]) -> Answer:
        return Answer(id=self._id, object=kind, created=self._created, model=self._model, choices=choices)

    def _usage(self, num_tokens: int) -> Usage:
        num_prompt = sum(len(request.prompt_ids) for request in self.requests)
        return Usage(prompt_tokens=num_prompt, completion_tokens=num_tokens, total_tokens=num_prompt + num_tokens)


class CompletionReply(Reply):
    """Of several prompts, each with `n` choices."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, served: Served, body: CompletionRequest, requests: list[Request]) -> None:
        super().__init__(served, body, requests)
        self._wants_logprobs = body.logprobs is not None

    def _put_whole(self, choice: Choice, text: str) -> None:
        choice.text = text
        if self._wants_ids:
            choice.prompt_token_ids = self.requests[choice.index // self.requests[0].n].prompt_ids

    def _put_delta(self, choice: Choice, text: str) -> None:
        choice.text = text

    def _logprobs(self, sampled: Sampled | Delta, num_chars: int) -> CompletionLogprobs | None:
        return completion_logprobs(sampled, self.served.text, num_chars) if self._wants_logprobs else None


class ChatReply(Reply):
    """Of one conversation, with `n` choices."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, served: Served, body: ChatRequest, request: Request) -> None:
        super().__init__(served, body, [request])
        self._wants_logprobs = bool(body.logprobs)

    def opening(self) -> list[Answer]:
        """Who speaks."""
        begin = {"role": "assistant", "content": ""}
        choices = (
            Choice(index=index, finish_reason=None, policy_versions=[], delta=begin)
            for index in range(self.requests[0].n)
        )
        return [self._answer(self.chunk_kind, [choice]) for choice in choices]

    def _put_whole(self, choice: Choice, text: str) -> None:
        choice.message = {"role": "assistant", "content": text}

    def _put_delta(self, choice: Choice, text: str) -> None:
        choice.delta = {"content": text}

    def _logprobs(self, sampled: Sampled | Delta, num_chars: int) -> ChatLogprobs | None:
        return chat_logprobs(sampled, self.served.text) if self._wants_logprobs else None

    def _answer(self, kind: Kind, choices: list[Choice]) -> Answer:
        answer = super()._answer(kind, choices)
        if self._wants_ids:
            answer.prompt_token_ids = self.requests[0].prompt_ids
        return answer
