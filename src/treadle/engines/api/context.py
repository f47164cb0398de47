"""What all HTTP routes share: the engine, request statistics, error responses, roles, and the check of publishers.

Versions are numbers of a run. Two runs that publish to one engine would give one number to two sets of weights, and
environments of both would sample from them. So an engine belongs to the run that published to it first, until it is
restarted (`PublisherCheck`):

    a trainer of another run                                     is refused
    a second trainer of the same run, the first still running    is refused
    the same, the first has ended or cannot be checked           takes over; later requests of the first are refused
    a request without a publisher header (curl, Atropos)         is accepted while no trainer has published
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from treadle.chat_template import TemplateWorker
from treadle.engines.api.received_files import ReceivedFiles
from treadle.engines.interface import InferenceEngine
from treadle.engines.model_folder import ADAPTER_FILES
from treadle.errors import EngineError, RequestError, TreadleError, UserError
from treadle.log import get_logger
from treadle.net.access import EVERYBODY, why_refused
from treadle.net.access_tokens import Role
from treadle.net.prometheus_text import Histogram
from treadle.net.server import json_answer, read_json
from treadle.sync.gate import PUBLISHER_HEADER, Publisher
from treadle.sync.layout import Layout
from treadle.sync.model_folders import cache_folder
from treadle.sync.shared_memory import remove_bridge_file, write_bridge_file

_FIX = "let one trainer publish to one engine; for another run, start the engine again or POST /bridge/restart by hand"
log = get_logger("engine")
MIN_CHARS_ENCODED = 1 << 18  # shorter prompts are always encoded: an unknown word may become a single token
LATENCY_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class PublisherCheck:
    """Decides which trainer may change the weights. Used only on the event loop."""

    def __init__(self) -> None:
        self._publisher: Publisher | None = None
        self._replaced: list[Publisher] = []

    @contextmanager
    def authorize(self, http: HttpRequest, *, allow_anonymous: bool = False) -> Iterator[None]:
        """Wrap every change of weights or of their version; raises RequestError for other publishers.

        `allow_anonymous`: also accept a request without a publisher header although a trainer publishes.
        """
        asking, before = _publisher_of(http), self._publisher
        if asking is None:
            if before is not None and not allow_anonymous:
                raise RequestError(f"the trainer of {before.run} publishes to this engine", fix=_FIX)
            yield
            return
        if any(asking.is_same_process(former) for former in self._replaced):
            raise RequestError(f"another trainer of {asking.run} publishes to this engine now", fix=_FIX)
        if before is not None and not before.is_same_process(asking):
            if before.run != asking.run:
                raise RequestError(f"this engine serves versions of {before.run}, not of {asking.run}", fix=_FIX)
            if not before.may_be_gone:
                raise RequestError(
                    f"another trainer of {asking.run} publishes to this engine (process {before.process.pid})", fix=_FIX
                )
            self._replaced.append(before)
        self._publisher = asking
        try:
            yield
        except RequestError:  # nothing has changed
            if before is None:
                self._publisher = None
            raise

    def reset(self, http: HttpRequest) -> None:
        """After a restart that was requested by hand, any run may publish."""
        if _publisher_of(http) is None:
            self._publisher, self._replaced = None, []


def _publisher_of(http: HttpRequest) -> Publisher | None:
    header = http.headers.get(PUBLISHER_HEADER)
    if header is None:
        return None
    try:
        return msgspec.json.decode(header, type=Publisher)
    except msgspec.DecodeError as error:
        raise RequestError(f"the header {PUBLISHER_HEADER} cannot be read: {error}") from None


@dataclass
class RequestStats:
    """Counters of the HTTP API. Used only on the event loop."""

    started: float = field(default_factory=time.time)
    last_update_time: float | None = None  # Unix time of the last weight update
    adapter_ids: dict[str, int] = field(default_factory=dict)
    num_adapter_loads: int = 0
    requests: dict[tuple[str, int], int] = field(default_factory=dict)  # by route and status
    seconds: dict[str, Histogram] = field(default_factory=dict)  # by route
    bridge_layout: Layout | None = None  # contents of the bridge file

    def count(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] = self.requests.get((route, status), 0) + 1
        self.seconds.setdefault(route, Histogram(LATENCY_BOUNDS_S)).observe(seconds)

    def weights_changed(self) -> None:
        self.last_update_time = time.time()

    def adapter_loaded(self, name: str) -> int:
        """The adapter's id; a repeated load keeps it."""
        if name not in self.adapter_ids:
            self.num_adapter_loads += 1
            self.adapter_ids[name] = self.num_adapter_loads
        return self.adapter_ids[name]


@dataclass(frozen=True)
class ApiContext:
    """The engine, and what all routes share."""

    engine: InferenceEngine
    model_name: str  # as given at start
    adapter_root: Path  # adapters and weights are loaded only from this folder (resolved)
    model_folder: Path  # that the engine was started with; it may always be loaded again
    bridge_file: Path | None = None  # tells trainers where the shared weights are
    stats: RequestStats = field(default_factory=RequestStats)
    templates: TemplateWorker = field(default_factory=TemplateWorker)
    publishers: PublisherCheck = field(default_factory=PublisherCheck)
    engine_id: str = ""  # of this start of the process
    received: ReceivedFiles = field(default_factory=lambda: ReceivedFiles(cache_folder() / "received"))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any] | None,
    ) -> list[int]:
        """Token ids of a conversation, rendered with the model's chat template."""
        tokenizer = self.engine.tokenizer
        if not tokenizer.is_chat_loaded:
            await asyncio.to_thread(tokenizer.load_chat)
        source, values = tokenizer.chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, options=options
        )
        rendered = await self.templates.render_async(source, values)
        self._check_length(rendered)
        return tokenizer.encode(rendered, add_special_tokens=False)

    def adapter_named(self, model: str | None) -> str | None:
        """The adapter that the `model` of a request names; None: the base model."""
        folder = self.engine.facts.folder
        if model is None or model in (self.model_name, str(folder), folder.name):
            return None
        if any(adapter.name == model for adapter in self.engine.adapters()):
            return model
        raise NotFound(f"there is no model '{model}' here", fix="GET /v1/models lists what there is")

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt; refuses one that cannot fit."""
        self._check_length(prompt)
        return self.engine.tokenizer.encode(prompt)

    def _check_length(self, prompt: str) -> None:
        """Encoding megabytes of text takes seconds, and blocks all other requests."""
        max_tokens = self.engine.facts.max_model_len
        if len(prompt) > MIN_CHARS_ENCODED and len(prompt) > max_tokens * self.engine.tokenizer.longest_token:
            raise RequestError(f"a prompt of {len(prompt):,} characters is longer than --max-model-len {max_tokens}")

    async def write_bridge_file(self) -> None:
        if self.bridge_file is None:
            return
        try:
            layout = await self.engine.layout()
        except EngineError as error:  # GET /bridge/state_dict_info reports the same error
            log.error("bridge_file_not_written", reason=str(error))
            return
        if layout is not None:
            write_bridge_file(self.bridge_file, layout)
            self.stats.bridge_layout = layout

    def remove_bridge_file(self) -> None:
        if self.bridge_file is not None and self.stats.bridge_layout is not None:
            remove_bridge_file(self.bridge_file, self.stats.bridge_layout)


MAX_BODY_BYTES = 16 << 20
OPENAI_PREFIX = "/v1/"
FORBIDDEN = 403
# Roles by route: everyone may read, environments and trainers may sample, only trainers change weights and adapters.
SAMPLING = ("/generate", "/health_generate", "/v1/completions", "/v1/chat/completions")
SAMPLERS: frozenset[Role] = frozenset({"environment", "trainer"})
PUBLISHERS: frozenset[Role] = frozenset({"trainer"})
CLIENT_LEFT = 499

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class NotFound(RequestError):
    """A path, a model or an adapter does not exist."""


class FolderNotUsable(RequestError):
    """This engine may not load from the folder, or there is none: a trainer sends its files instead. The answer says
    so, as `takes_files`."""


class FolderNotFound(NotFound, FolderNotUsable):
    pass


def route(path: str, handler: Handler, stats: RequestStats, *, method: str = "GET") -> Route:
    """A route that checks the caller's role, maps errors to responses, and counts requests."""
    roles = SAMPLERS if path in SAMPLING else EVERYBODY if method == "GET" else PUBLISHERS

    async def guarded(http: Request) -> Response:
        started = time.monotonic()
        why = why_refused(http.scope, roles)
        try:
            response = await handler(http) if why is None else error_response(path, FORBIDDEN, why)
        except TreadleError as error:
            response = error_response(path, http_status(error), str(error), isinstance(error, FolderNotUsable))
        except ClientDisconnect:
            response = Response(status_code=CLIENT_LEFT)  # before its whole body had arrived
        stats.count(path, response.status_code, time.monotonic() - started)
        return response

    return Route(path, guarded, methods=[method])


def http_status(error: TreadleError) -> int:
    """400 or 404 for an invalid request, 503 for what cannot be done now."""
    if isinstance(error, NotFound):
        return 404
    return 400 if isinstance(error, RequestError | UserError) else 503


def error_response(path: str, status: int, message: str, takes_files: bool = False) -> Response:
    if path.startswith(OPENAI_PREFIX):
        return json_answer(error_body(message, status), status)
    return json_answer({"error": message, **({"takes_files": True} if takes_files else {})}, status)


def error_body(message: str, status: int) -> dict[str, object]:
    """An error in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def decode(http: Request, kind: type[T]) -> T:
    content_type = http.headers.get("content-type", "application/json")
    if not content_type.startswith("application/json"):
        raise RequestError(f"the body must be application/json, not {content_type[:60]}")
    return await read_json(http, kind, max_bytes=MAX_BODY_BYTES)


def resolve_weights_folder(path: str, root: Path, model_folder: Path) -> Path:
    """The weights folder that a request names: the engine's own model, or a folder inside `root`."""
    folder = _resolved(path, root)
    if folder == model_folder:  # its files may be links, as in the Hugging Face cache
        return folder
    _check_inside(path, root, [folder])
    try:
        files = [folder / name for name in os.listdir(folder)]
    except OSError:
        raise _no_folder(path) from None
    _check_inside(path, root, files)
    return folder


def resolve_adapter_folder(path: str, root: Path) -> Path:
    """The adapter folder that a request names, inside `root`; relative paths are relative to it.

    Links may not lead out of `root`. Whether a path exists is disclosed only for paths inside.
    """
    folder = _resolved(path, root)
    _check_inside(path, root, [folder, *(folder / name for name in ADAPTER_FILES)])
    if not os.path.isdir(folder):
        raise _no_folder(path)
    return folder


def _check_inside(path: str, root: Path, targets: Iterable[Path]) -> None:
    for target in targets:
        if not Path(os.path.realpath(target)).is_relative_to(root):
            raise FolderNotUsable(
                f"{_cut(path)} is not in {root}, the folder from which this engine loads adapters and weights",
                fix="save it there, or start the engine with another --adapter-root",
            )


def _resolved(path: str, base: Path) -> Path:
    """os.path instead of Path, because it does not raise for a path that is too long or not permitted."""
    try:
        return Path(os.path.realpath(base / os.path.expanduser(path)))
    except ValueError:  # a NUL
        raise _no_folder(path) from None


def _no_folder(path: str) -> FolderNotFound:
    return FolderNotFound(
        f"there is no folder {_cut(path)} on the engine's machine", fix="give a path that both sides see"
    )


def _cut(path: str) -> str:
    return path if len(path) <= 300 else path[:300] + "..."
