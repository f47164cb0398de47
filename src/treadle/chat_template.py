"""Render a model's chat template in a process of its own, with limits on time, memory and length.

A template comes with a downloaded model. Jinja's sandbox keeps it from files and processes, not from a loop over
10^12 numbers or a text of 5 GB: in the server's own process one of those stops every route and every signal.

    worker = TemplateWorker()
    text = await worker.render(source, {"messages": [...], "add_generation_prompt": True})

One process renders one conversation after the other; it is started by the first, and again after one that hit a limit.
The processor time of a rendering is limited by the kernel (it ends the process), so no limit depends on who else is
busy. `python -m treadle.chat_template` is that process: a socket is its standard input, on which questions and answers
are JSON behind their length.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treadle.errors import EngineError, RequestError

MAX_CPU_S = 1.0  # templates of known models take less than a millisecond
MAX_MEMORY_BYTES = 1 << 30
MAX_CHARS = 16 << 20  # of a rendered text; as many as the body of a request may have bytes
MAX_WALL_S = 60.0  # for a worker that gets no processor time at all, or was stopped
_LENGTH_BYTES = 4
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
_FIX = "send a shorter conversation, or give the model another chat template (chat_template.jinja in its folder)"


class TemplateWorker:
    """The process that renders, seen from the server. One event loop may use it."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def render(self, source: str, values: Mapping[str, Any]) -> str:
        """The text that `source` makes of `values`; RequestError where the template refuses them, or hit a limit."""
        question = msgspec.json.encode({"source": source, "values": values})
        async with self._turn:
            answer = await self._ask(question)
        if "error" in answer:
            raise RequestError(answer["error"], fix=answer.get("fix", ""))
        return answer["text"]

    def close(self) -> None:
        """End the process, whatever it does; the next `render` starts another."""
        process, streams, self._process, self._streams = self._process, self._streams, None, None
        if streams is not None:
            streams[1].transport.abort()
        if process is not None:
            process.kill()
            process.wait()

    async def _ask(self, question: bytes) -> dict[str, str]:
        try:
            async with asyncio.timeout(MAX_WALL_S):
                reader, writer = self._streams or await self._start()
                writer.write(len(question).to_bytes(_LENGTH_BYTES) + question)
                await writer.drain()
                length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
                return msgspec.json.decode(await reader.readexactly(length), type=dict[str, str])
        except (EOFError, ConnectionError):
            raise self._why_ended() from None
        except TimeoutError:
            self.close()
            raise EngineError(
                f"the chat template was not rendered within {MAX_WALL_S:.0f} s", fix="try again"
            ) from None
        except BaseException:  # cancelled: an answer may still come, and is nobody's
            self.close()
            raise

    async def _start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _start_process(theirs.fileno())
        self._streams = await asyncio.open_connection(sock=ours)
        return self._streams

    def _why_ended(self) -> EngineError:
        """After the process has closed its socket."""
        process = self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process is not None:
                process.wait(1.0)
        self.close()
        code = None if process is None else process.returncode
        if code == -signal.SIGPROF:
            return RequestError(
                f"the chat template takes more than {MAX_CPU_S:g} s of processor time for these messages", fix=_FIX
            )
        return EngineError(f"the process that renders the chat template has ended ({code})", fix="try again")


def _start_process(link: int) -> subprocess.Popen[bytes]:
    """Of this process' variables it gets a few: tokens are among the others."""
    command = [sys.executable, "-P", "-m", "treadle.chat_template"]
    variables = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return subprocess.Popen(command, stdin=link, stdout=subprocess.DEVNULL, env=variables)


def compile_template(source: str) -> Template:
    """Set up as transformers does it; raises jinja2.TemplateError for a template that cannot be parsed."""
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, LoopControlExtension]
    )
    jinja.filters["tojson"] = _to_json
    jinja.globals["raise_exception"] = _refuse
    jinja.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return jinja.from_string(source)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote; a prompt takes its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


# In the worker's process


_compiled = lru_cache(8)(compile_template)


def _answer(question: bytes) -> bytes:
    try:
        asked = msgspec.json.decode(question)
        text, num_chars = [], 0
        for piece in _compiled(asked["source"]).generate(asked["values"]):
            num_chars += len(piece)
            if num_chars > MAX_CHARS:
                return _encode(f"the chat template makes more than {MAX_CHARS:,} characters of these messages", _FIX)
            text.append(piece)
        return msgspec.json.encode({"text": "".join(text)})
    except MemoryError:
        return _encode(f"the chat template needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory", _FIX)
    except Exception as error:  # templates raise what they like; all mean: these messages cannot be written
        return _encode(f"the chat template refuses these messages: {str(error)[:1000]}")


def _encode(error: str, fix: str = "") -> bytes:
    return msgspec.json.encode({"error": error.encode(errors="replace").decode(), "fix": fix})


def _work() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it has nothing to write but its socket
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a server that ignores it would pass that on
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C goes to the whole group; the server ends this process
    with socket.socket(fileno=sys.stdin.fileno()) as link, link.makefile("rb") as questions:
        while length := int.from_bytes(questions.read(_LENGTH_BYTES)):
            question = questions.read(length)
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # at its end the kernel ends the process
            answer = _answer(question)
            signal.setitimer(signal.ITIMER_PROF, 0)
            link.sendall(len(answer).to_bytes(_LENGTH_BYTES) + answer)


if __name__ == "__main__":
    _work()
