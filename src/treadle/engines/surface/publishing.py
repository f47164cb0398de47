"""Let the trainer of one run change the weights of an engine.

Versions are numbers of a run. Two runs that publish to one engine would give one number to two sets of weights, and
environments of both would sample from them. So an engine belongs to the run that published to it first, until it is
restarted:

    a trainer of another run                                   is refused
    a second trainer of the same run, the first still runs     is refused
    the same, the first has ended, or cannot be seen           takes over; whatever the first still asks is refused
    a request without a name (curl, Atropos' trainers)         works while no trainer has published
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from starlette.requests import Request as HttpRequest

from treadle.errors import RequestError
from treadle.sync.process_identity import PUBLISHER_HEADER, Publisher, read_publisher

_FIX = "let one trainer publish to one engine; for another run, start the engine again or POST /bridge/restart by hand"


class Publishing:
    """All of it belongs to the event loop."""

    def __init__(self) -> None:
        self._publisher: Publisher | None = None
        self._replaced: list[Publisher] = []

    @contextmanager
    def by(self, http: HttpRequest, *, also_by_hand: bool = False) -> Iterator[None]:
        """Around what changes the weights, or the version that they are. `also_by_hand`: a request without a name may
        do it too, although a trainer publishes."""
        asking, before = _publisher_of(http), self._publisher
        if asking is None:
            if before is not None and not also_by_hand:
                raise RequestError(f"the trainer of {before.run} publishes to this engine", fix=_FIX)
            yield
            return
        self._refuse_other(asking)
        self._publisher = asking
        if before is not None and not before.is_same_process(asking):
            self._replaced.append(before)
        try:
            yield
        except RequestError:  # nothing was changed
            if before is None:
                self._publisher = None
            raise

    def begin_again(self, http: HttpRequest) -> None:
        """After a restart: asked for by hand, the engine is anybody's."""
        if _publisher_of(http) is None:
            self._publisher, self._replaced = None, []

    def _refuse_other(self, asking: Publisher) -> None:
        if any(asking.is_same_process(former) for former in self._replaced):
            raise RequestError(f"another trainer of {asking.run} publishes to this engine now", fix=_FIX)
        known = self._publisher
        if known is None or known.is_same_process(asking):
            return
        if known.run != asking.run:
            raise RequestError(f"this engine serves versions of {known.run}, not of {asking.run}", fix=_FIX)
        if not known.may_be_gone:
            raise RequestError(
                f"another trainer of {asking.run} publishes to this engine (process {known.process.pid})", fix=_FIX
            )


def _publisher_of(http: HttpRequest) -> Publisher | None:
    header = http.headers.get(PUBLISHER_HEADER)
    if header is None:
        return None
    try:
        return read_publisher(header)
    except msgspec.DecodeError as error:
        raise RequestError(f"the header {PUBLISHER_HEADER} cannot be read: {error}") from None
