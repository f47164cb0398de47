"""Make the HTTP calls of Atropos' trainers and environments; raw bytes where they matter."""

from __future__ import annotations

import json
import socket
from functools import cache
from typing import Any, NamedTuple

import httpx

JSON = {"Content-Type": "application/json"}
TRAINER = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 8, "max_token_len": 128, "checkpoint_dir": "c",
    "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 10,
}  # fmt: skip
ENV = {"max_token_length": 512, "desired_name": "math", "weight": 1.0, "group_size": 2}


class RawAnswer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def group(size: int = 2, tag: int = 7, **fields: Any) -> dict[str, Any]:
    """`tag` tells groups apart: it is their first token."""
    return {"tokens": [[tag, 2]] * size, "masks": [[-100, 2]] * size, "scores": [1.0] * size, **fields}


class Atropos:
    """`calls = Atropos(httpx.Client(base_url=hub.url))`; a starlette TestClient does as well."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def get(self, path: str, **options: Any) -> Any:
        """The answer of a call that must succeed."""
        answer = self.client.get(path, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def send(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        """As Python's own JSON writer writes it: NaN and Infinity included."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(path, content=content, headers=JSON if headers is None else headers)

    def register(self, **fields: Any) -> Any:
        answer = self.send("/register", TRAINER | fields)
        assert answer.status_code == 200, answer.text
        return json.loads(answer.text)

    def start(self, **fields: Any) -> None:
        """A trainer registers and asks for its first batch: from now on environments may register."""
        self.register(**fields)
        assert self.get("/batch") == {"batch": None}

    def register_env(self, **fields: Any) -> Any:
        answer = self.send("/register-env", ENV | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, size: int = 2, tag: int = 7, **fields: Any) -> Any:
        answer = self.send("/scored_data", group(size, tag, **fields))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def batch(self) -> list[tuple[int, int]] | None:
        """(tag, size) of each group of the next batch."""
        groups = self.get("/batch")["batch"]
        return None if groups is None else [(each["tokens"][0][0], len(each["tokens"])) for each in groups]

    def tags(self) -> list[int] | None:
        batch = self.batch()
        return None if batch is None else [tag for tag, _ in batch]

    def env_status(self, env_id: int) -> httpx.Response:
        """As Atropos' environments ask: GET with a JSON body."""
        return self.client.request("GET", "/status-env", json={"env_id": env_id})

    def refusal(self, path: str, body: Any) -> tuple[int, str, list[str | int]]:
        """(status, type, place) of the first complaint."""
        answer = self.send(path, body)
        first = answer.json()["detail"][0]
        assert set(first) == {"type", "loc", "msg", "input"}
        assert first["loc"][0] == "body"
        return answer.status_code, first["type"], first["loc"][1:]


def raw_exchange(port: int, request: bytes, *, has_body: bool = True) -> RawAnswer:
    """One request as bytes on a socket of its own; the answer is taken apart by hand."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line, line.makefile("rb") as answer:
        line.sendall(request)
        status = int(answer.readline().split()[1])
        headers = {}
        while (header := answer.readline()) not in (b"\r\n", b""):
            name, _, value = header.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return RawAnswer(status, headers, answer.read(int(headers.get("content-length", 0))) if has_body else b"")


def request_bytes(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@cache
def sized(num_bytes: int) -> bytes:
    """One group of exactly this many bytes, most of them tokens."""
    num_tokens = num_bytes // 14
    row = b"[" + b",".join([b"12345"] * num_tokens) + b"]"
    body = b'{"tokens":[%s],"masks":[%s],"scores":[1.0],"images":"?"}' % (row, row)
    return body.replace(b"?", b"x" * (num_bytes - len(body) + 1))
