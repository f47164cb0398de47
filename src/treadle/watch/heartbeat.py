"""The report of a process, on its way to the hub. A hub that is away is not an error here: who needs it says so."""

from __future__ import annotations

import os
from http.client import HTTPException
from urllib.parse import urlsplit

import msgspec

from treadle.log import get_logger
from treadle.net.tokens import HUB_TOKEN_VARIABLE, bearer_headers
from treadle.net.urls import connection_to
from treadle.wire.hub import ProcessReport, ReportTaken

log = get_logger("watchdog")

TIMEOUT_S = 2.0
OK = 200
ROUTE = "/v1/reports"


class Heartbeat:
    """`Heartbeat("http://127.0.0.1:8000").send(report)`.

    The hub's token comes from the environment; the URL may carry one too, as /t/TOKEN at its end.
    """

    def __init__(self, hub_url: str) -> None:
        self._connection = connection_to(hub_url, TIMEOUT_S)
        self._path = urlsplit(hub_url).path.rstrip("/") + ROUTE
        self._headers = {"Content-Type": "application/json", **bearer_headers(os.environ.get(HUB_TOKEN_VARIABLE))}
        self._refused_with = OK

    def send(self, report: ProcessReport) -> ReportTaken | None:
        """What the hub answers; None where it did not."""
        try:
            self._connection.request("POST", self._path, msgspec.json.encode(report), self._headers)
            answer = self._connection.getresponse()
            body = answer.read()
            if answer.status != OK:
                self._tell_refusal(answer.status, body)
                return None
            return msgspec.json.decode(body, type=ReportTaken)
        except (OSError, HTTPException, msgspec.MsgspecError):
            self._connection.close()  # the next one begins anew
            return None

    def _tell_refusal(self, status: int, body: bytes) -> None:
        if status != self._refused_with:
            self._refused_with = status
            log.warning("report_refused", status=status, hub_says=body[:200].decode(errors="replace"))
