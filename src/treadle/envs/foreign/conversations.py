"""Match the calls of an agent to conversations, so that sampled tokens are kept.

Agents send the whole history with every call. A conversation detects whether a call continues it; then only the new
messages are tokenized.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

from treadle.envs.chat import Chat, Model
from treadle.envs.engine_client import Completion
from treadle.envs.foreign.openai_api import AgentRequest, NoRoom, Turn, message_key, normalize_message, parse_reply


@dataclass(frozen=True)
class PendingReply:
    """A reply that is not committed yet, and the chat that includes it."""

    turn: Turn
    chat: Chat
    completion: Completion | None


class Conversation(ABC):
    """If `is_continued_by(request)`: `add_request(request)`, perhaps `branch()`, `commit(await sample(request))`."""

    def __init__(self, chat: Chat, client_id: str) -> None:
        self.chat = chat
        self.client_id = client_id
        self.is_busy = False  # a call is being answered
        self._has_replied = False  # since the last request

    @property
    def length(self) -> int:
        return len(self.chat.transcript.tokens)

    @property
    @abstractmethod
    def num_chars(self) -> int:
        """Size of the stored text, in addition to the tokens."""

    def is_continued_by(self, request: AgentRequest) -> bool:
        same = (self.client_id, self.chat.transcript.temperature) == (request.client_id, request.temperature)
        return same and not self.is_busy and self._extends(request)

    @abstractmethod
    def _extends(self, request: AgentRequest) -> bool: ...

    @abstractmethod
    def add_request(self, request: AgentRequest) -> None:
        """Add the new part of a call; a call that was cancelled and repeated has none."""

    def branch(self) -> Self:
        """A separate conversation that continues from here."""
        other = copy(self)
        other.chat = self.chat.branch()
        return other

    async def sample(self, request: AgentRequest) -> PendingReply:
        """Sample a reply without changing the conversation: a call for several replies gets all or none."""
        chat = copy(self.chat)
        chat.transcript = copy(chat.transcript)
        vars(chat.transcript).update({name: copy(value) for name, value in vars(chat.transcript).items()})
        reply = await chat.ask(max_tokens=request.max_tokens, stop=request.stop)
        completion = chat.model.last_completion  # of this reply: nothing was awaited since it was sampled
        tokens, logprobs = chat.transcript.tokens, chat.transcript.logprobs
        if not reply.num_tokens:
            self.chat.transcript.finish_reason = reply.finish_reason
            raise NoRoom(
                f"this conversation is at its maximum context length: after {len(tokens)} tokens there is no room",
                fix="end it here, or raise --train.seq-len",
            )
        turn = Turn(
            reply=parse_reply(reply.text, has_tools=bool(request.tools)),
            finish_reason=reply.finish_reason,
            token_ids=tokens[-reply.num_tokens :],
            logprobs=logprobs[-reply.num_tokens :],
            prompt_token_ids=tokens[: -reply.num_tokens],
        )
        return PendingReply(turn, chat, completion)

    def commit(self, pending: PendingReply) -> Turn:
        """Make the reply part of the chat, and of the training data."""
        vars(self.chat).update(vars(pending.chat))
        self._has_replied = True
        self._record(pending.turn)
        return pending.turn

    @abstractmethod
    def _record(self, turn: Turn) -> None:
        """Record the reply as the agent sees it."""


class ChatConversation(Conversation):
    """Conversation of /chat/completions: messages, which the agent sends back with every call."""

    def __init__(self, model: Model, request: AgentRequest) -> None:
        chat = model.chat(request.messages, tools=request.tools, temperature=request.temperature)
        super().__init__(chat, request.client_id)
        self._request = request
        self._known = request.keys

    @property
    def num_chars(self) -> int:
        return self._request.num_chars

    def _extends(self, request: AgentRequest) -> bool:
        keys, known = request.keys, self._known
        is_longer = len(keys) > len(known) or (len(keys) == len(known) and not self._has_replied)
        return is_longer and keys[: len(known)] == known and self._request.tools_key == request.tools_key

    def add_request(self, request: AgentRequest) -> None:
        self.chat.add(*request.messages[len(self._known) :])
        self._request, self._known = request, request.keys
        self._has_replied = False

    def _record(self, turn: Turn) -> None:
        self._known = [*self._known, message_key(normalize_message(turn.reply.message))]


class TextConversation(Conversation):
    """Conversation of /completions: text (or token ids) that is continued, without a chat template."""

    chat: PlainTextChat

    def __init__(self, model: Model, request: AgentRequest) -> None:
        super().__init__(PlainTextChat(model, (), temperature=request.temperature), request.client_id)
        self._is_all_in_the_text = True  # False after an end token or stop word, which the agent does not see
        model.chats.append(self.chat)
        self.add_request(request)

    @property
    def num_chars(self) -> int:
        return len(self.chat.text)

    def _extends(self, request: AgentRequest) -> bool:
        if isinstance(request.prompt, str):
            text = self.chat.text
            # After an end token that the agent does not know of, the prompt would differ from the one that was sent.
            is_longer = request.prompt != text or not self._has_replied
            return is_longer and self._is_all_in_the_text and request.prompt.startswith(text)
        known = self.chat.ids
        is_longer = len(request.prompt) > len(known) or (len(request.prompt) == len(known) and not self._has_replied)
        return is_longer and list(request.prompt[: len(known)]) == known

    def add_request(self, request: AgentRequest) -> None:
        tokenizer = self.chat.model.tokenizer
        if isinstance(request.prompt, str):
            if text := request.prompt[len(self.chat.text) :]:
                self.chat.add_text(text, tokenizer.encode_text(text, is_beginning=not self.chat.ids))
        elif token_ids := request.prompt[len(self.chat.ids) :]:
            self.chat.add_text(tokenizer.decode(token_ids), list(token_ids))
        self._has_replied = False

    def _record(self, turn: Turn) -> None:
        self.chat.text += turn.reply.text
        self.chat.unread_ids = []
        sampled = self.chat.model.tokenizer.decode(turn.token_ids, skip_special_tokens=False)
        self._is_all_in_the_text = self._is_all_in_the_text and sampled == turn.reply.text


class PlainTextChat(Chat):
    """A chat without turns: new text is appended as it is."""

    text: str = ""  # all of it, as the agent sees it
    unread_ids: Sequence[int] = ()

    @property
    def ids(self) -> list[int]:
        return [*self.transcript.tokens, *self.unread_ids]

    def add_text(self, text: str, token_ids: Sequence[int]) -> None:
        self.text += text
        self.unread_ids = [*self.unread_ids, *token_ids]
        self.add({"role": "user", "content": text})

    def branch(self) -> PlainTextChat:
        other = PlainTextChat(self.model, self.messages, temperature=self.transcript.temperature)
        other.transcript.read(self.transcript.tokens)
        other.text, other.unread_ids = self.text, self.unread_ids
        self.model.chats.append(other)
        return other

    def _next_prompt(self) -> list[int]:
        return list(self.unread_ids)
