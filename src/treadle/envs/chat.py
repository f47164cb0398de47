"""Chat with the policy and keep the sampled tokens: nothing that was sampled is tokenized again.

prompt (not trained) | reply (sampled, trained) | end of turn, tool results, next prompt (not trained) | reply | ...

The text between two replies comes from the model's chat template. It is tokenized separately and appended, so ids,
masks and logprobs of everything before do not change, even if the template would render earlier turns differently now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from treadle.envs.base import Message
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import Completion
from treadle.envs.engine_pool import InferenceClient
from treadle.errors import RequestError
from treadle.wire.groups import IGNORED, NO_LOGPROB

LONG_TEXT = 100_000  # characters


@dataclass(frozen=True)
class RolloutSampling:
    """Sampling parameters of the turns of a rollout, and the maximum length of a sequence."""

    max_tokens: int  # of one reply
    temperature: float
    seed: int | None = None
    longest_sequence: int = 0  # prompt and all turns; 0: no limit


@dataclass(frozen=True)
class Reply:
    """The model's reply in one turn."""

    text: str
    finish_reason: str  # "stop"; "length": truncated, by the limit of the reply or of the sequence
    num_tokens: int

    @property
    def message(self) -> Message:
        return {"role": "assistant", "content": self.text}


@dataclass
class Transcript:
    """One sequence, as messages and as training data; `masks` and `logprobs` are aligned with `tokens`."""

    messages: list[Message] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: set[int] = field(default_factory=set)
    num_sampled: int = 0
    finish_reason: str = "stop"  # of the last completion
    temperature: float | None = None  # of sampling, if it is not the run's

    def read(self, token_ids: Sequence[int]) -> None:
        """Append tokens that were given to the model."""
        self.tokens += token_ids
        self.masks += [IGNORED] * len(token_ids)
        self.logprobs += [NO_LOGPROB] * len(token_ids)

    def wrote(self, completion: Completion) -> None:
        """Append tokens that the model sampled."""
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
        self.model = model
        self._tools = tuple(tools)
        self.transcript = Transcript(messages=[dict(message) for message in messages], temperature=temperature)
        self._last_sampled: int | None = None  # the last token of the last reply, if it has any
        self._unread = len(messages)  # number of last messages that the model has not seen yet

    @property
    def messages(self) -> list[Message]:
        return self.transcript.messages

    def add(self, *messages: Message) -> None:
        """Add messages before the model's next turn: tool results, user messages. Not trained on."""
        self.messages.extend(dict(message) for message in messages)
        self._unread += len(messages)

    def branch(self) -> Chat:
        """A separate chat that continues from here. Tokens sampled so far are trained on only in this one."""
        other = self.model.chat(self.messages, tools=self._tools, temperature=self.transcript.temperature)
        other.transcript.read(self.transcript.tokens)
        other._unread, other._last_sampled = self._unread, self._last_sampled
        return other

    @property
    def num_tokens_left(self) -> int | None:
        """The room for the next reply in the sequence; None: only the limit of one reply applies."""
        return self._room_behind(self._next_prompt())

    def _room_behind(self, read: Sequence[int]) -> int | None:
        limit = self.model.sampling.longest_sequence
        return None if limit <= 0 else max(0, limit - len(self.transcript.tokens) - len(read))

    async def ask(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Reply:
        """The model's next turn. Without room for a token: an empty reply with finish_reason "length"."""
        unread_chars = sum(len(str(message.get("content"))) for message in self.messages[-self._unread :])
        # Tokenizing megabytes takes seconds, and would block all other rollouts.
        read = self._next_prompt() if unread_chars < LONG_TEXT else await asyncio.to_thread(self._next_prompt)
        wanted = max_tokens if max_tokens is not None else self.model.sampling.max_tokens
        left = self._room_behind(read)
        room = wanted if left is None else min(wanted, left)
        if room < 1:
            self.transcript.finish_reason = "length"
            return Reply(text="", finish_reason="length", num_tokens=0)
        completion = await self.model.sample(
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
        """The tokens between the last sampled token and the next reply."""
        if not self.transcript.tokens:
            return self.model.tokenizer.encode_chat(self.messages, tools=self._tools)
        if not self._unread:
            raise RequestError("the model has just spoken", fix="add a message before the next ask")
        unread = self.messages[-self._unread :]
        return self.model.tokenizer.encode_next_turn(unread, after=self._last_sampled, tools=self._tools)


@dataclass(eq=False)
class Model:
    """The policy in one rollout. Every chat with sampled tokens becomes a training sequence."""

    engine: InferenceClient
    tokenizer: ChatTokenizer
    sampling: RolloutSampling
    chats: list[Chat] = field(default_factory=list)
    seconds: float = 0.0  # generation time of the engine
    last_completion: Completion | None = None  # of any chat
    _num_calls: int = 0
    _id: str = field(default_factory=lambda: uuid4().hex)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        temperature: float | None = None,
    ) -> Chat:
        """Start a chat. `tools` are passed to the chat template."""
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
        """Sample one completion; `temperature` None: the run's."""
        seed = self.sampling.seed
        number, self._num_calls = self._num_calls, self._num_calls + 1
        generation = await self.engine.generate(
            prompt,
            max_tokens=max_tokens,
            temperature=self.sampling.temperature if temperature is None else temperature,
            seed=None if seed is None else seed + number,  # otherwise every turn would draw the same numbers
            stop=stop,
            conversation=self._id,
        )
        self.seconds += generation.seconds
        (self.last_completion,) = generation.completions
        return self.last_completion

    @property
    def transcripts(self) -> list[Transcript]:
        """The training sequences: chats with sampled tokens, in the order of their start."""
        return [chat.transcript for chat in self.chats if chat.transcript.num_sampled]
