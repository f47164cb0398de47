"""What one agent said to the policy in one rollout, kept token by token, and the score that it ended with."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from treadle.envs.base import Item, Score
from treadle.envs.chat import Model
from treadle.envs.engine_client import Completion
from treadle.envs.foreign.lines import ChatLine, Draft, Line, TextLine, Turn
from treadle.envs.foreign.requests import Ask
from treadle.errors import EngineError, RequestError

MAX_REPLIES = 10_000
MAX_TOKENS = 2**22  # a group of more is larger than the hub takes
MAX_CHARS = 2**26  # of the conversations, which are kept to recognise the next call


class Over(RequestError):
    """The session takes no more calls."""


class Full(RequestError):
    """The session keeps as much as it may."""


class GivenUp(Exception):
    """The agent ended its session without a score."""


class Session:
    """`await session.answer(ask)`, again and again; `finish(score)` or `fail(error)` ends it."""

    def __init__(self, model: Model, item: Item) -> None:
        self.key = secrets.token_urlsafe(16)  # whoever knows it may speak as this agent
        self.score_key = secrets.token_urlsafe(16)  # and who knows this one, say what that was worth
        self.model = model
        self.item = item
        self.created_at = time.time()
        self.taken = asyncio.Event()  # an agent has come for it
        self.score: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._lines: list[Line] = []
        self._kept: list[tuple[Line, Completion | None]] = []  # every reply that was given, in that order
        self._speaking: set[asyncio.Future[tuple[Draft, Completion | None]]] = set()

    async def answer(self, ask: Ask) -> list[Turn]:
        """The replies to one call, `ask.n` of them: the first goes on in the chat that is known, the others beside it.

        A conversation that is not known, or in which an earlier turn was changed, begins a chat of its own.
        """
        if self.score.done():
            raise _ended()
        known = [line for line in self._lines if line.goes_on_in(ask)]
        line = max(known, key=lambda one: one.length) if known else None
        self._refuse_too_much(ask, line)
        lines: list[Line]
        if line is not None:
            line.hear(ask)
            lines = [line]
        else:
            lines = [(TextLine if ask.prompt else ChatLine).begin(self.model, ask)]
        lines += (lines[0].branch() for _ in range(ask.n - 1))
        begun = [one for one in lines if one is not line]
        self._lines += begun
        try:
            return await self._speak(lines, ask)
        except BaseException:  # also where the agent left: calls that fail again and again must leave nothing
            self._lines = [one for one in self._lines if one not in begun]
            dropped = [one.chat for one in begun]
            self.model.chats[:] = [chat for chat in self.model.chats if chat not in dropped]
            raise

    def _refuse_too_much(self, ask: Ask, line: Line | None) -> None:
        """`line` is the one that the call continues: its text is part of the call."""
        tokens = sum(one.length for one in self._lines)
        chars = ask.n * ask.num_chars + sum(one.num_chars for one in self._lines if one is not line)
        kept = (
            (len(self._kept) + len(self._speaking) + ask.n, MAX_REPLIES, "replies"),
            (tokens, MAX_TOKENS, "tokens"),
            (chars, MAX_CHARS, "characters of messages"),
        )
        for num, limit, what in kept:
            if num > limit:
                raise Full(f"a session keeps at most {limit} {what}", fix="post its score, and begin another session")

    async def _speak(self, lines: Sequence[Line], ask: Ask) -> list[Turn]:
        """Side by side. When one fails, or the agent leaves, all are given up, and nothing is kept of any."""
        for line in lines:
            line.is_busy = True  # before anything is awaited: the next call may already be here
        tasks = [asyncio.ensure_future(self._draft(line, ask)) for line in lines]
        self._speaking.update(tasks)
        try:
            drafts = await asyncio.gather(*tasks)
            if self.score.done():
                raise _ended()
            self._kept += [(line, completion) for line, (_, completion) in zip(lines, drafts, strict=True)]
            return [line.keep(draft) for line, (draft, _) in zip(lines, drafts, strict=True)]
        except asyncio.CancelledError:
            if self.score.done():
                raise _ended() from None
            raise
        except EngineError as error:
            if not isinstance(error, RequestError):  # the engine is gone: not the agent's fault, and not one rollout's
                self.fail(error)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._speaking.difference_update(tasks)
            self._tell_last()
            for line in lines:
                line.is_busy = False

    async def _draft(self, line: Line, ask: Ask) -> tuple[Draft, Completion | None]:
        draft = await line.speak(ask)
        return draft, self.model.last_completion  # its own: nothing was awaited since it was sampled

    def _tell_last(self) -> None:
        """What was given up, or is left out, is not what the policy said last."""
        self.model.last_completion = self._kept[-1][1] if self._kept else None

    def finish(self, score: Score) -> None:
        """The same score twice is fine: the answer to the first call may have been lost."""
        if not self.score.done():
            self.score.set_result(score)
            self._hush()
        elif self.score.cancelled() or self.score.exception() is not None or self.score.result() != score:
            raise Over("this session has ended, with another score or with none")

    def fail(self, error: Exception) -> None:
        if not self.score.done():
            self.score.set_exception(error)
            self.score.exception()  # seen: asyncio need not complain that nobody looked
            self._hush()

    def _hush(self) -> None:
        """What is still being sampled is no part of what was judged."""
        for task in self._speaking:
            task.cancel()

    def forget(self, speakers: Collection[str]) -> None:
        """What these said is not trained on."""
        dropped = [line.chat for line in self._lines if line.speaker in speakers]
        self.model.chats[:] = [chat for chat in self.model.chats if chat not in dropped]
        self._kept = [(line, completion) for line, completion in self._kept if line.speaker not in speakers]
        self._tell_last()


def _ended() -> Over:
    return Over("this session has ended", fix="ask for a new one")


class Sessions:
    """All sessions of one environment process, by their keys."""

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}
        self._by_score_key: dict[str, Session] = {}
        self._by_speaker: dict[str, Session] = {}
        self._offered: dict[str, Session] = {}  # in the order in which they were
        self._news = asyncio.Event()

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_key.values()))

    def get(self, key: str) -> Session | None:
        return self._by_key.get(key)

    def to_be_scored_at(self, score_key: str) -> Session | None:
        return self._by_score_key.get(score_key)

    @contextmanager
    def open(self, model: Model, item: Item) -> Iterator[Session]:
        """A session for as long as the rollout takes; calls that come later find none."""
        session = Session(model, item)
        self._by_key[session.key] = self._by_score_key[session.score_key] = session
        try:
            yield session
        finally:
            session.fail(GivenUp("the rollout has ended"))
            del self._by_key[session.key], self._by_score_key[session.score_key]
            self._offered.pop(session.key, None)
            self._by_speaker = {name: one for name, one in self._by_speaker.items() if one is not session}

    def join(self, speaker: str, session: Session) -> None:
        """Calls that name this speaker belong to the session, whatever their address."""
        self._by_speaker[speaker] = session

    def of_speaker(self, speaker: str) -> Session | None:
        return self._by_speaker.get(speaker)

    def offer(self, session: Session) -> None:
        """For the next agent that comes by itself."""
        self._offered[session.key] = session
        self._news.set()

    async def take(self) -> Session:
        """The session that was offered first."""
        while not self._offered:
            self._news.clear()
            await self._news.wait()
        session = self._offered.pop(next(iter(self._offered)))
        session.taken.set()
        return session
