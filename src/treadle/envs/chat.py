"""Talking to the policy without losing a token: what was sampled is kept as it was, nothing is tokenized again.

prompt (not trained) | reply (sampled, trained) | end of turn, tool results, next prompt (not trained) | reply | ...

The text between two replies is what the model's chat template puts there. It is tokenized by itself and appended, so
ids, masks and logprobs of everything before stay as they are, whatever the template would make of earlier turns now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.envs.base import Message
from treadle.envs.engine_client import Completion, Sampler
from treadle.envs.tokens import ChatTokenizer
from treadle.errors import RequestError
from treadle.wire.groups import IGNORED, NO_LOGPROB

LONG_TEXT = 100_000  # characters


@dataclass(frozen=True)
class Sampling:
    """How the turns of a rollout are sampled, and how long a sequence may get."""

    max_tokens: int  # of one reply
    temperature: float
    seed: int | None = None
    longest_sequence: int = 0  # prompt and all turns; 0: no limit


@dataclass(frozen=True)
class Reply:
    """What the model said in one turn."""

    text: str
    finish_reason: str  # "stop"; "length": it was cut off, by its own limit or by that of the sequence
    num_tokens: int

    @property
    def message(self) -> Message:
        return {"role": "assistant", "content": self.text}


@dataclass
class Transcript:
    """One sequence: as a person reads it, and as it is trained on; `masks` and `logprobs` are aligned with `tokens`."""

    messages: list[Message] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: set[int] = field(default_factory=set)
    num_sampled: int = 0
    finish_reason: str = "stop"  # of the last completion
    temperature: float | None = None  # that its tokens were sampled at, where it was not the run's

    def read(self, token_ids: Sequence[int]) -> None:
        """Tokens that the model was given."""
        self.tokens += token_ids
        self.masks += [IGNORED] * len(token_ids)
        self.logprobs += [NO_LOGPROB] * len(token_ids)

    def wrote(self, completion: Completion) -> None:
        """Tokens that the model sampled."""
        self.tokens += completion.token_ids
        self.masks += completion.token_ids
        self.logprobs += completion.logprobs
        self.policy_versions.add(completion.policy_version)
        self.num_sampled += len(completion.token_ids)
        self.finish_reason = completion.finish_reason


class Chat:
    """One conversation: `reply = await chat.ask()`, `chat.add({"role": "tool", "content": "4"})`, and again."""

    def __init__(
        self,
        model: Model,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        temperature: float | None = None,
    ) -> None:
        self._model = model
        self._tools = tuple(tools)
        self.transcript = Transcript(messages=[dict(message) for message in messages], temperature=temperature)
        self._last_sampled: int | None = None  # the last token of the last reply; None: it had none
        self._unread = len(messages)  # of the last messages, those that the model has not seen yet

    @property
    def messages(self) -> list[Message]:
        return self.transcript.messages

    def add(self, *messages: Message) -> None:
        """What the model hears before its next turn: tool results, a user's words. Not trained on."""
        self.messages.extend(dict(message) for message in messages)
        self._unread += len(messages)

    def branch(self) -> Chat:
        """Another conversation that goes on from here. What was sampled so far is trained on once: in this one."""
        other = self._model.chat(self.messages, tools=self._tools, temperature=self.transcript.temperature)
        other.transcript.read(self.transcript.tokens)
        other._unread, other._last_sampled = self._unread, self._last_sampled
        return other

    @property
    def num_tokens_left(self) -> int | None:
        """How long the next reply may get; None: as long as one reply may be."""
        return self._room_behind(self._next_prompt())

    def _room_behind(self, read: Sequence[int]) -> int | None:
        limit = self._model.sampling.longest_sequence
        return None if limit <= 0 else max(0, limit - len(self.transcript.tokens) - len(read))

    async def ask(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Reply:
        """The model's next turn. Without room for a token, an empty reply that says "length"."""
        unread_chars = sum(len(str(message.get("content"))) for message in self.messages[-self._unread :])
        # To tokenize megabytes takes seconds, in which no other rollout would go on.
        read = self._next_prompt() if unread_chars < LONG_TEXT else await asyncio.to_thread(self._next_prompt)
        wanted = max_tokens if max_tokens is not None else self._model.sampling.max_tokens
        left = self._room_behind(read)
        room = wanted if left is None else min(wanted, left)
        if room < 1:
            self.transcript.finish_reason = "length"
            return Reply(text="", finish_reason="length", num_tokens=0)
        completion = await self._model.sample(
            [*self.transcript.tokens, *read], max_tokens=room, stop=stop, temperature=self.transcript.temperature
        )
        self.transcript.read(read)
        self.transcript.wrote(completion)
        self._last_sampled = completion.token_ids[-1] if completion.token_ids else None
        self._unread = 0
        reply = Reply(completion.text, completion.finish_reason, len(completion.token_ids))
        self.messages.append(reply.message)
        return reply

    def _next_prompt(self) -> list[int]:
        """The tokens between what was last sampled and the next reply."""
        if not self.transcript.tokens:
            return self._model.tokenizer.encode_chat(self.messages, tools=self._tools)
        if not self._unread:
            raise RequestError("the model has just spoken", fix="add a message before the next ask")
        unread = self.messages[-self._unread :]
        return self._model.tokenizer.encode_next_turn(unread, after=self._last_sampled, tools=self._tools)


class Model:
    """The policy in one rollout. Every chat in which something was sampled becomes a sequence that is trained on."""

    def __init__(self, engine: Sampler, tokenizer: ChatTokenizer, sampling: Sampling) -> None:
        self._engine = engine
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.chats: list[Chat] = []
        self.seconds = 0.0  # the engine's own time
        self.last_completion: Completion | None = None  # in whichever chat
        self._num_calls = 0

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        temperature: float | None = None,
    ) -> Chat:
        """A new conversation. `tools` are described to the model as its chat template does it."""
        chat = Chat(self, messages, tools, temperature)
        self.chats.append(chat)
        return chat

    async def sample(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        temperature: float | None = None,
    ) -> Completion:
        """One completion; `temperature` None is the run's."""
        seed = self.sampling.seed
        number, self._num_calls = self._num_calls, self._num_calls + 1
        generation = await self._engine.generate(
            prompt,
            max_tokens=max_tokens,
            temperature=self.sampling.temperature if temperature is None else temperature,
            seed=None if seed is None else seed + number,  # or every turn would draw the same numbers
            stop=stop,
        )
        self.seconds += generation.seconds
        (self.last_completion,) = generation.completions
        return self.last_completion

    @property
    def transcripts(self) -> list[Transcript]:
        """What is trained on: the chats in which something was sampled, in the order they were begun."""
        return [chat.transcript for chat in self.chats if chat.transcript.num_sampled]
