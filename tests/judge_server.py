"""A small HTTP server that speaks the OpenAI protocol and answers as a test says."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """`content` is the judge's text; `raw` replaces the whole body."""

    content: str | None = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    tokens: int | None = 100  # None: without usage
    raw: bytes | None = None
    after_s: float = 0.0
    finish_reason: str = "stop"

    @property
    def body(self) -> bytes:
        if self.raw is not None:
            return self.raw
        message = {"role": "assistant", "content": self.content}
        values: dict[str, Any] = {"choices": [{"index": 0, "message": message, "finish_reason": self.finish_reason}]}
        if self.tokens is not None:
            values["usage"] = {"total_tokens": self.tokens}
        return json.dumps(values).encode()


@dataclass
class JudgeServer:
    """`script` gets the question (the last user message that has texts) and the number of the request, from 0."""

    script: Callable[[str, int], Reply | str]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._at_once = 0
        self.is_over = threading.Event()

    def answer(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Reply:
        if path != "/v1/chat/completions":
            return Reply(status=404, raw=b'{"error": {"message": "no such route"}}')
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.headers.append(headers)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            said = self.script(body["messages"][1]["content"], number)
            reply = Reply(said) if isinstance(said, str) else said
            self.is_over.wait(reply.after_s)
            return reply
        finally:
            with self._lock:
                self._at_once -= 1


@contextlib.contextmanager
def judging(script: Callable[[str, int], Reply | str]) -> Iterator[JudgeServer]:
    judge = JudgeServer(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = judge.answer(self.path, dict(self.headers), body)
            with contextlib.suppress(OSError):  # a caller that no longer waits
                self.send_response(reply.status)
                for name, value in {**reply.headers, "Content-Length": str(len(reply.body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # with fewer, connections that come together wait a second
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    judge.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield judge
    finally:
        judge.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def text_of(question: str, name: str = "ANSWER") -> str:
    """What stands between BEGIN and END of a text of the question."""
    _, _, rest = question.partition(f"BEGIN {name} ")
    marker, _, rest = rest.partition("\n")
    return rest.partition(f"\nEND {name} {marker}")[0]
