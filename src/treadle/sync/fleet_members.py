"""Keep what the trainer knows of each engine of a fleet, and exchange it with the hub's table of engines."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from treadle.background import in_background
from treadle.log import get_logger
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE, bearer_headers
from treadle.net.client import OK, BlockingHttpClient, NoAnswer
from treadle.sync.protocol import EngineLink, Verified
from treadle.sync.verify import ExpectedState, PublishVerifier
from treadle.sync.version_files import HandedOver
from treadle.wire.bridge import BridgeInfo
from treadle.wire.engines import Engines, EngineVerdict, EngineVerdicts

_HUB_TIMEOUT_S = 5.0
_ROUTE = "/v1/engines"
log = get_logger("sync")


@dataclass(frozen=True, eq=False)
class PublishedVersion:
    """A version, and what an engine must have and answer when it has adopted it."""

    version: int
    folder: Path | None  # on disk; None: engines get it from the trainer's memory
    expected: ExpectedState


State = Literal["joining", "serving", "out"]


@dataclass(eq=False)
class FleetMember:
    """One start of one engine. Changed under the fleet's lock."""

    engine_id: str
    link: EngineLink
    verifier: PublishVerifier
    seen_s: float  # when the hub listed it, or it answered, last
    state: State = "joining"
    reason: str = ""
    proved_since: int | None = None
    proved_version: int | None = None
    proved_at: float | None = None
    pending: PublishedVersion | None = None  # what it receives and proves now, or next
    receiving: PublishedVersion | None = None  # what its thread brings now; None: no thread runs
    has_proved: bool = False  # any version of this trainer since it joined, or was taken out last
    num_failures: int = 0
    retry_at_s: float = 0.0
    handed: HandedOver | None = None
    verified: Verified | None = None

    @property
    def url(self) -> str:
        return self.link.url

    @property
    def is_busy(self) -> bool:
        return self.receiving is not None

    def verdict(self) -> EngineVerdict:
        return EngineVerdict(
            engine_id=self.engine_id,
            url=self.url,
            state=self.state,
            proved_since=self.proved_since,
            proved_version=self.proved_version,
            proved_at=self.proved_at,
            reason=self.reason,
        )


class HubTable:
    """The table of engines at the hub: read it, and post verdicts."""

    def __init__(self, hub_url: str) -> None:
        headers = {"Content-Type": "application/json", **bearer_headers(os.environ.get(HUB_TOKEN_VARIABLE))}
        self._client = BlockingHttpClient(hub_url, headers=headers, timeout_s=_HUB_TIMEOUT_S)
        self._refused_with = OK

    def exchange(self, verdicts: EngineVerdicts | None) -> Engines | None:
        """Post verdicts, if there are any, and return the table; None while the hub does not answer."""
        try:
            if verdicts is None:
                answer = self._client.request("GET", _ROUTE)
            else:
                answer = self._client.request("POST", f"{_ROUTE}/verdicts", body=msgspec.json.encode(verdicts))
            if answer.status == OK:
                return msgspec.json.decode(answer.content, type=Engines)
        except (NoAnswer, msgspec.MsgspecError):
            return None
        if answer.status != self._refused_with:
            self._refused_with = answer.status
            log.warning("no_table_of_engines", status=answer.status, hub_says=answer.message)
        return None


class NamedEngines:
    """The engines of --engine-url, of which some may not report to the hub."""

    def __init__(self, urls: Iterable[str], timeout_s: float) -> None:
        self.urls = tuple(url.rstrip("/").removesuffix("/v1") for url in urls)
        self._timeout_s = timeout_s
        self._polls: dict[str, Future[BridgeInfo]] = {}

    def poll(self, apart_from: Collection[str]) -> dict[str, str]:
        """{engine_id: URL} of those that answer; each is asked in a thread, and may be slow."""
        answers = {}
        for url in self.urls:
            if url in apart_from:
                continue
            poll = self._polls.get(url)
            if poll is not None and poll.done():
                if poll.exception() is None:
                    answers[poll.result().engine_id] = url
                poll = None
            if poll is None:
                link = EngineLink(url, self._timeout_s)
                self._polls[url] = in_background("ask-engine", partial(link.get, "/bridge/info", BridgeInfo))
        return answers


def worst_of(verified: Iterable[Verified]) -> Verified:
    """The largest values among the engines."""
    found = list(verified)
    return Verified(
        seconds=max((one.seconds for one in found), default=0.0),
        canary_mean=max((one.canary_mean for one in found if one.canary_mean is not None), default=None),
        canary_max=max((one.canary_max for one in found if one.canary_max is not None), default=None),
    )
