"""One conversation as an agent knows it, and the chat in which its tokens are kept.

Agents send everything with every call. A line knows whether a call goes on from where it is; only what is new is then
read by the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self, TypeVar

from treadle.envs.chat import Chat, Model, Reply
from treadle.envs.foreign.calls import Spoken, understand
from treadle.envs.foreign.messages import key_of, plain
from treadle.envs.foreign.requests import Ask
from treadle.errors import RequestError

C = TypeVar("C", bound=Chat)


class NoRoom(RequestError):
    """The sequence is as long as it may get."""


@dataclass(frozen=True)
class Turn:
    """One reply: as the agent reads it, and as it was sampled."""

    spoken: Spoken
    finish_reason: str
    token_ids: list[int]
    logprobs: list[float]
    prompt_token_ids: list[int]


@dataclass(frozen=True)
class Draft:
    """A reply that nobody has read yet, and the chat as it is with it."""

    turn: Turn
    chat: Chat


class Line(ABC):
    """`line.goes_on_in(ask)`? Then `line.hear(ask)`, perhaps `line.branch()`, `line.keep(await line.speak(ask))`."""

    def __init__(self, chat: Chat, speaker: str) -> None:
        self.chat = chat
        self.speaker = speaker
        self.is_busy = False  # a call is being answered
        self._has_spoken = False  # since it last heard something

    @property
    def length(self) -> int:
        return len(self.chat.transcript.tokens)

    @property
    @abstractmethod
    def num_chars(self) -> int:
        """How much text is kept, beside the tokens."""

    def goes_on_in(self, ask: Ask) -> bool:
        same = (self.speaker, self.chat.transcript.temperature) == (ask.speaker, ask.temperature)
        return same and not self.is_busy and self._is_continued_by(ask)

    @abstractmethod
    def _is_continued_by(self, ask: Ask) -> bool: ...

    @abstractmethod
    def hear(self, ask: Ask) -> None:
        """Take what is new in this call. A call that was given up and is made again has nothing new."""

    @abstractmethod
    def branch(self) -> Self:
        """A line of its own that goes on from here."""

    async def speak(self, ask: Ask) -> Draft:
        """Sample a reply. Until it is kept, the line is as it was: a call that wants several gets all, or none."""
        chat = _copy(self.chat)
        reply = await chat.ask(max_tokens=ask.max_tokens, stop=ask.stop)
        tokens, logprobs = chat.transcript.tokens, chat.transcript.logprobs
        if not reply.num_tokens:
            self.chat.transcript.finish_reason = reply.finish_reason
            raise NoRoom(
                f"this conversation is at its maximum context length: after {len(tokens)} tokens there is no room",
                fix="end it here, or raise --train.seq-len",
            )
        turn = Turn(
            spoken=understand(reply.text, has_tools=bool(ask.tools)),
            finish_reason=reply.finish_reason,
            token_ids=tokens[-reply.num_tokens :],
            logprobs=logprobs[-reply.num_tokens :],
            prompt_token_ids=tokens[: -reply.num_tokens],
        )
        return Draft(turn, chat)

    def keep(self, draft: Draft) -> Turn:
        """From here on the reply is part of the chat, and trained on."""
        vars(self.chat).update(vars(draft.chat))
        self._has_spoken = True
        self._note(draft.turn)
        return draft.turn

    @abstractmethod
    def _note(self, turn: Turn) -> None:
        """What the agent will know after this reply."""


class ChatLine(Line):
    """Of /chat/completions: messages, as the agent got them from us and sends them back."""

    def __init__(self, chat: Chat, ask: Ask) -> None:
        super().__init__(chat, ask.speaker)
        self._ask = ask
        self._known = list(ask.keys)

    @property
    def num_chars(self) -> int:
        return self._ask.num_chars

    @classmethod
    def begin(cls, model: Model, ask: Ask) -> Self:
        return cls(model.chat(ask.messages, tools=ask.tools, temperature=ask.temperature), ask)

    def _is_continued_by(self, ask: Ask) -> bool:
        keys, known = ask.keys, self._known
        is_longer = len(keys) > len(known) or (len(keys) == len(known) and not self._has_spoken)
        return is_longer and keys[: len(known)] == known and self._ask.tools_key == ask.tools_key

    def hear(self, ask: Ask) -> None:
        self.chat.add(*ask.messages[len(self._known) :])
        self._ask, self._known = ask, list(ask.keys)
        self._has_spoken = False

    def branch(self) -> Self:
        other = type(self)(self.chat.branch(), self._ask)
        other._known = list(self._known)
        return other

    def _note(self, turn: Turn) -> None:
        self._known.append(key_of(plain(turn.spoken.message)))


class TextLine(Line):
    """Of /completions: plain text (or token ids) that goes on, with no chat template between two calls."""

    def __init__(self, passage: Passage, speaker: str) -> None:
        super().__init__(passage, speaker)
        self._passage = passage
        self._is_all_in_the_text = True  # not so: the end token, or a stop word, which the agent does not get to see

    @property
    def num_chars(self) -> int:
        return len(self._passage.text)

    @classmethod
    def begin(cls, model: Model, ask: Ask) -> Self:
        passage = Passage(model, ask.temperature)
        model.chats.append(passage)
        line = cls(passage, ask.speaker)
        line.hear(ask)
        return line

    def _is_continued_by(self, ask: Ask) -> bool:
        if isinstance(ask.prompt, str):
            text = self._passage.text
            # Behind an end that the agent knows nothing of, the model would read another prompt than was sent.
            is_longer = ask.prompt != text or not self._has_spoken
            return is_longer and self._is_all_in_the_text and ask.prompt.startswith(text)
        known = self._passage.ids
        is_longer = len(ask.prompt) > len(known) or (len(ask.prompt) == len(known) and not self._has_spoken)
        return is_longer and list(ask.prompt[: len(known)]) == known

    def hear(self, ask: Ask) -> None:
        if isinstance(ask.prompt, str):
            self._passage.read_text(ask.prompt[len(self._passage.text) :])
        else:
            self._passage.read_ids(ask.prompt[len(self._passage.ids) :])
        self._has_spoken = False

    def branch(self) -> Self:
        other = type(self)(self._passage.branch(), self.speaker)
        other._is_all_in_the_text = self._is_all_in_the_text
        return other

    def _note(self, turn: Turn) -> None:
        self._passage.text += turn.spoken.whole
        sampled = self._passage.decode(turn.token_ids)
        self._is_all_in_the_text = self._is_all_in_the_text and sampled == turn.spoken.whole


class Passage(Chat):
    """A chat without turns: what is read is put behind what was written, as it is."""

    def __init__(self, model: Model, temperature: float | None) -> None:
        super().__init__(model, (), temperature=temperature)
        self.text = ""  # all of it, as the agent knows it
        self._unread_ids: list[int] = []

    @property
    def ids(self) -> list[int]:
        return [*self.transcript.tokens, *self._unread_ids]

    def read_text(self, text: str) -> None:
        if text:
            self._take(text, self._model.tokenizer.encode_text(text, is_beginning=not self.ids))

    def read_ids(self, token_ids: tuple[int, ...]) -> None:
        if token_ids:
            self._take(self._model.tokenizer.decode(token_ids), list(token_ids))

    def decode(self, token_ids: list[int]) -> str:
        return self._model.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _take(self, text: str, token_ids: list[int]) -> None:
        self.text += text
        self._unread_ids += token_ids
        self.add({"role": "user", "content": text})

    def branch(self) -> Passage:
        other = Passage(self._model, self.transcript.temperature)
        other.messages.extend(self.messages)
        other.transcript.read(self.transcript.tokens)
        other.text, other._unread_ids = self.text, list(self._unread_ids)
        self._model.chats.append(other)
        return other

    async def ask(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Reply:
        reply = await super().ask(max_tokens=max_tokens, stop=stop)
        if reply.num_tokens:
            self._unread_ids = []
        return reply

    def _next_prompt(self) -> list[int]:
        return list(self._unread_ids)


def _copy(chat: C) -> C:
    """One that can go on without the other noticing."""
    other = copy(chat)
    other.transcript = copy(chat.transcript)
    vars(other.transcript).update({name: copy(value) for name, value in vars(chat.transcript).items()})
    return other
