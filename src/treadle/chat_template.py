"""Render a model's chat template in a process of its own, with limits on time, memory and length.

A template comes with a downloaded model. Jinja's sandbox keeps it from files and processes, not from a loop over
10^12 numbers or a text of 5 GB: in the process of an engine or an environment one of those stops everything else there,
signals too. Compiling one is no safer: Jinja computes constants such as `9**(9**9)` then.

    worker = TemplateWorker()
    text = worker.render(source, {"messages": [...], "add_generation_prompt": True})
    text = await worker.render_async(source, {...})

One process renders one conversation after the other; it is started by the first, and again after one that hit a limit.
The processor time of a rendering is limited by the kernel (it ends the process), so no limit depends on who else is
busy. `python -m treadle.chat_template` is that process: a socket is its standard input, on which questions and answers
are JSON in frames (net/workers.py).
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
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import msgspec
from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treadle.errors import EngineError, RequestError
from treadle.net.workers import frame, read_frame

MAX_CPU_S = 1.0  # templates of known models take less than a millisecond
MAX_MEMORY_BYTES = 1 << 30
MAX_CHARS = 16 << 20  # of a rendered text; as many as the body of a request may have bytes
MAX_ANSWER_BYTES = 12 * MAX_CHARS  # JSON writes a character in up to 12 bytes
MAX_WALL_S = 60.0  # for a worker that gets no processor time at all, or was stopped
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
_OTHER_TEMPLATE = "give the model another chat template (chat_template.jinja in its folder)"
_FIX = f"send a shorter conversation, or {_OTHER_TEMPLATE}"


class TemplateWorker:
    """The process that renders. Any thread may call; those after the first wait."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._waiting = ThreadPoolExecutor(1, "chat-template")  # its thread waits, instead of an event loop

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        """The text that `source` makes of `values`; RequestError where the template refuses them, or hit a limit."""
        return self._answer_to({"source": source, "values": values})

    async def render_async(self, source: str, values: Mapping[str, Any]) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._waiting, self.render, source, values)

    def check(self, source: str) -> None:
        """RequestError where the template cannot be parsed."""
        self._answer_to({"source": source, "values": None})

    def close(self) -> None:
        """End the process, whatever it does; the next `render` starts another."""
        process, link, self._process, self._link = self._process, self._link, None, None
        if process is not None:
            process.kill()
            process.wait()
        if link is not None:
            link.close()

    def _answer_to(self, question: Mapping[str, Any]) -> str:
        try:
            encoded = msgspec.json.encode(question)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"the messages cannot be written as JSON: {error}") from None
        with self._turn:
            answer = self._ask(encoded)
        if "error" in answer:
            raise RequestError(answer["error"], fix=answer.get("fix", ""))
        return answer["text"]

    def _ask(self, question: bytes) -> dict[str, str]:
        try:
            link = self._link or self._start()
            link.sendall(frame(question))
            return msgspec.json.decode(read_frame(link, MAX_ANSWER_BYTES), type=dict[str, str])
        except TimeoutError:
            self.close()
            raise EngineError(
                f"the chat template was not rendered within {MAX_WALL_S:.0f} s", fix="try again"
            ) from None
        except (EOFError, OSError):
            raise self._why_ended() from None
        except BaseException:  # interrupted: an answer may still come, and is nobody's
            self.close()
            raise

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.settimeout(MAX_WALL_S)
        with theirs:
            self._process = _start_process(theirs.fileno())
        self._link = ours
        return ours

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


def _answer(question: bytearray) -> bytes:
    try:
        asked = msgspec.json.decode(question)
        template = _compiled(asked["source"])
        if asked["values"] is None:
            return msgspec.json.encode({"text": ""})
        text, num_chars = [], 0
        for piece in template.generate(asked["values"]):
            num_chars += len(piece)
            if num_chars > MAX_CHARS:
                return _encode(f"the chat template makes more than {MAX_CHARS:,} characters of these messages", _FIX)
            text.append(piece)
        return msgspec.json.encode({"text": "".join(text)})
    except TemplateSyntaxError as error:
        return _encode(f"the chat template cannot be parsed: {str(error)[:1000]}", _OTHER_TEMPLATE)
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
    # EOFError: the server is gone
    with socket.socket(fileno=sys.stdin.fileno()) as link, contextlib.suppress(EOFError):
        while True:
            question = read_frame(link)
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # at its end the kernel ends the process
            answer = _answer(question)
            signal.setitimer(signal.ITIMER_PROF, 0)
            link.sendall(frame(answer))


if __name__ == "__main__":
    _work()
