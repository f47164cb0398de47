"""Record the conversations of one agent in one rollout, token by token, and its score."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from treadle.envs.base import Item, Score
from treadle.envs.chat import Model
from treadle.envs.engine_client import Completion
from treadle.envs.foreign.conversations import ChatConversation, Conversation, PendingReply, TextConversation
from treadle.envs.foreign.openai_api import AgentRequest, Turn
from treadle.errors import EngineError, RequestError

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


class Sessions:
    """All sessions of one environment process."""

    def __init__(self) -> None:
        self.by_key: dict[str, Session] = {}
        self.by_score_key: dict[str, Session] = {}
        self.by_client: dict[str, Session] = {}  # for calls with a client id, whatever their URL
        self._offered: dict[str, Session] = {}  # in order
        self._offers_changed = asyncio.Event()

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
