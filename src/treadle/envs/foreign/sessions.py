"""Record the conversations of one agent in one rollout, token by token, and its score.

Agents send the whole history with every call. A conversation detects whether a call continues it; then only the new
messages are tokenized, and the sampled tokens are kept.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Self

from treadle.envs.base import Item, Score
from treadle.envs.chat import Chat, Model
from treadle.envs.engine_client import Completion
from treadle.envs.foreign.openai_api import AgentRequest, NoRoom, Turn, message_key, normalize_message, parse_reply
from treadle.errors import EngineError, RequestError


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


MAX_REPLIES = 10_000
MAX_TOKENS = 2**22  # a larger group is refused by the hub
MAX_CHARS = 2**26  # of the conversations, which are stored to recognise the next call


class SessionClosed(RequestError):
    """The session accepts no more calls."""


class SessionFull(RequestError):
    """The session has reached one of its limits."""


class SessionAbandoned(Exception):
    """The agent ended its session without a score."""


class Session:
    """`await session.answer(request)` for each call; `finish(score)` or `fail(error)` ends it."""

    def __init__(self, model: Model, item: Item) -> None:
        self.key = secrets.token_urlsafe(16)  # grants calls as this agent
        self.score_key = secrets.token_urlsafe(16)  # grants posting its score
        self.model = model
        self.item = item
        self.created_at = time.time()
        self.taken = asyncio.Event()  # an agent was assigned to it
        self.score: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._conversations: list[Conversation] = []
        self._replies: list[tuple[Conversation, Completion | None]] = []  # all committed replies, in order
        self._sampling: set[asyncio.Future[PendingReply]] = set()

    async def answer(self, request: AgentRequest) -> list[Turn]:
        """The `request.n` replies to one call: the first continues the known conversation, the others are branches.

        An unknown conversation, or one with a changed earlier turn, starts a new chat.
        """
        if self.score.done():
            raise _session_closed()
        known = [conversation for conversation in self._conversations if conversation.is_continued_by(request)]
        conversation = max(known, key=lambda one: one.length) if known else None
        self._refuse_too_much(request, conversation)
        conversations: list[Conversation]
        if conversation is not None:
            conversation.add_request(request)
            conversations = [conversation]
        else:
            conversations = [(TextConversation if request.prompt else ChatConversation)(self.model, request)]
        conversations += (conversations[0].branch() for _ in range(request.n - 1))
        begun = [one for one in conversations if one is not conversation]
        self._conversations += begun
        try:
            return await self._sample_all(conversations, request)
        except BaseException:  # also if the client disconnects: failed calls must leave nothing behind
            self._conversations = [one for one in self._conversations if one not in begun]
            dropped = [one.chat for one in begun]
            self.model.chats[:] = [chat for chat in self.model.chats if chat not in dropped]
            raise

    def _refuse_too_much(self, request: AgentRequest, conversation: Conversation | None) -> None:
        """Check the limits; `conversation` is the one that the call continues: its text is part of the call."""
        tokens = sum(one.length for one in self._conversations)
        chars = request.n * request.num_chars + sum(
            one.num_chars for one in self._conversations if one is not conversation
        )
        kept = (
            (len(self._replies) + len(self._sampling) + request.n, MAX_REPLIES, "replies"),
            (tokens, MAX_TOKENS, "tokens"),
            (chars, MAX_CHARS, "characters of messages"),
        )
        for num, limit, what in kept:
            if num > limit:
                raise SessionFull(
                    f"a session keeps at most {limit} {what}", fix="post its score, and begin another session"
                )

    async def _sample_all(self, conversations: Sequence[Conversation], request: AgentRequest) -> list[Turn]:
        """Sample concurrently. If one fails, or the client disconnects, all are cancelled and none is committed."""
        for conversation in conversations:
            conversation.is_busy = True  # before the first await: the next call may already be here
        tasks = [asyncio.ensure_future(conversation.sample(request)) for conversation in conversations]
        self._sampling.update(tasks)
        try:
            replies = list(zip(conversations, await asyncio.gather(*tasks), strict=True))
            if self.score.done():
                raise _session_closed()
            self._replies += [(conversation, pending.completion) for conversation, pending in replies]
            return [conversation.commit(pending) for conversation, pending in replies]
        except asyncio.CancelledError:
            if self.score.done():
                raise _session_closed() from None
            raise
        except EngineError as error:
            if not isinstance(error, RequestError):  # the engine is gone: this concerns all rollouts
                self.fail(error)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._sampling.difference_update(tasks)
            self._update_last_completion()
            for conversation in conversations:
                conversation.is_busy = False

    def _update_last_completion(self) -> None:
        """Cancelled and discarded replies do not count as the last completion."""
        self.model.last_completion = self._replies[-1][1] if self._replies else None

    def finish(self, score: Score) -> None:
        """Set the score. Repeating the same score is allowed: the response to the first call may have been lost."""
        if not self.score.done():
            self.score.set_result(score)
            self._cancel_sampling()
        elif self.score.cancelled() or self.score.exception() is not None or self.score.result() != score:
            raise SessionClosed("this session has ended, with another score or with none")

    def fail(self, error: Exception) -> None:
        if not self.score.done():
            self.score.set_exception(error)
            self.score.exception()  # marks it as retrieved, so that asyncio logs no warning
            self._cancel_sampling()

    def _cancel_sampling(self) -> None:
        """Cancel running samples: they are not part of what was scored."""
        for task in self._sampling:
            task.cancel()

    def discard(self, client_ids: Collection[str]) -> None:
        """Exclude the conversations of these clients from training."""
        dropped = [conversation.chat for conversation in self._conversations if conversation.client_id in client_ids]
        self.model.chats[:] = [chat for chat in self.model.chats if chat not in dropped]
        self._replies = [
            (conversation, completion)
            for conversation, completion in self._replies
            if conversation.client_id not in client_ids
        ]
        self._update_last_completion()


def _session_closed() -> SessionClosed:
    return SessionClosed("this session has ended", fix="ask for a new one")


@dataclass
class Sessions:
    """All sessions of one environment process."""

    by_key: dict[str, Session] = field(default_factory=dict)
    by_score_key: dict[str, Session] = field(default_factory=dict)
    by_client: dict[str, Session] = field(default_factory=dict)  # for calls with a client id, whatever their URL
    _offered: dict[str, Session] = field(default_factory=dict)  # in order
    _offers_changed: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def open(self, model: Model, item: Item) -> Iterator[Session]:
        """A session for the duration of the rollout; later calls get an error."""
        session = Session(model, item)
        self.by_key[session.key] = self.by_score_key[session.score_key] = session
        try:
            yield session
        finally:
            session.fail(SessionAbandoned("the rollout has ended"))
            del self.by_key[session.key], self.by_score_key[session.score_key]
            self._offered.pop(session.key, None)
            self.by_client = {name: one for name, one in self.by_client.items() if one is not session}

    def offer(self, session: Session) -> None:
        """Offer the session to the next external agent."""
        self._offered[session.key] = session
        self._offers_changed.set()

    async def take(self) -> Session:
        """The session that was offered first."""
        while not self._offered:
            self._offers_changed.clear()
            await self._offers_changed.wait()
        session = self._offered.pop(next(iter(self._offered)))
        session.taken.set()
        return session
