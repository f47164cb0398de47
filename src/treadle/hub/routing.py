"""Routes that answer errors in one way and that take exactly the method they name."""

from __future__ import annotations

from starlette.routing import Route

from treadle.hub.answers import Handler, answering


def get(path: str, handler: Handler) -> Route:
    """GET only. HEAD, which comes with GET elsewhere, would take a batch and throw it away."""
    route = Route(path, answering(handler), methods=["GET"])
    route.methods = {"GET"}
    return route


def post(path: str, handler: Handler) -> Route:
    return Route(path, answering(handler), methods=["POST"])
