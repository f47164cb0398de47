"""Talk to a model with an engine that is started for the conversation (`treadle chat`)."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from treadle.engines.model_folder import is_adapter
from treadle.envs.chat_format import ChatTokenizer
from treadle.errors import EngineError, ModelError, require
from treadle.launch.folder import is_run, result_of
from treadle.launch.machine import ANY_FREE, held_ports, port_of, read_machine_facts
from treadle.launch.placement import LocalPlacement
from treadle.launch.preflight import ending_on_sigterm, prepare_model
from treadle.launch.process_spec import ProcessSpec, child_environment
from treadle.launch.supervisor import Stopped, StopRequest, Supervisor
from treadle.net.client import OK, BlockingHttpClient, NoAnswer
from treadle.report.summary import find_result

Message = dict[str, str]
_RUNS = Path("runs")
ANSWER_S = 600.0


def find_model(model: str | None, runs: Path) -> Path:
    """The folder to load: the result of a run, a folder with a model or an adapter, or the prepared model of an id."""
    if model is None:
        found = [result for folder in runs.glob("*/checkpoints") if (result := find_result(folder)) is not None]
        if not found:
            fix = "name a run, a model folder or an id: treadle chat MODEL"
            raise ModelError(f"there is no finished run in {runs}/", fix=fix)
        return max(found, key=lambda result: result.stat().st_mtime_ns).resolve()
    folder = Path(model).expanduser()
    if not folder.exists() and folder.parent.name == runs.name:
        raise ModelError(f"there is no run {model}", fix="name the folder that `treadle run` printed when it began")
    if is_run(folder):
        return result_of(folder)
    if is_adapter(folder):
        return folder.resolve()
    return Path(prepare_model(model, "chat"))


def talk(model: str | None, *, message: str | None, temperature: float, max_tokens: int) -> int:
    require("train", "torch", "transformers")
    folder = find_model(model, _RUNS)
    tokenizer = ChatTokenizer.load(folder)
    try:
        with ending_on_sigterm(), running_engine(folder) as url:
            chat = ChatSession(url, tokenizer, temperature, max_tokens)
            if message is not None:
                print(chat.answer([{"role": "user", "content": message}]))
            else:
                print(f"talking to {folder}\n/new forgets the conversation, Ctrl-D ends it", flush=True)
                _converse(chat)
    except Stopped:
        return 130
    return 0


@contextlib.contextmanager
def running_engine(model_folder: Path) -> Iterator[str]:
    """The URL of an engine that serves `model_folder` until the block ends."""
    with contextlib.ExitStack() as opened:
        listeners = opened.enter_context(held_ports({"engine": ("127.0.0.1", ANY_FREE)}))
        facts = read_machine_facts({name: port_of(listener) for name, listener in listeners.items()})
        port = facts.ports["engine"]
        url = f"http://127.0.0.1:{port}"
        handle, log_name = tempfile.mkstemp(prefix="treadle-chat-", suffix=".log")
        os.close(handle)
        log_path = Path(log_name)
        argv = (facts.python, "-m", "treadle", "engine", "--model", str(model_folder), "--port", str(port))
        environment = child_environment(facts, threads=facts.num_cores, is_offline=True)
        stop = StopRequest()
        supervisor = opened.enter_context(Supervisor(stop, placement=LocalPlacement(listeners)))
        sys.stderr.write("starting the engine...\n")
        with stop.listening():
            supervisor.start([ProcessSpec("engine", argv, environment, log_path, f"{url}/health", 900.0)])
        yield url
        log_path.unlink(missing_ok=True)  # kept after an error, because the message names it


class ChatSession:
    """Sends conversations to the engine, from any thread."""

    def __init__(self, url: str, tokenizer: ChatTokenizer, temperature: float, max_tokens: int) -> None:
        self._engine = BlockingHttpClient(url, timeout_s=ANSWER_S)
        self._tokenizer = tokenizer
        self._sampling = {"temperature": temperature, "max_tokens": max_tokens, "logprobs": 0}

    def answer(self, messages: list[Message]) -> str:
        prompt = {"prompt_token_ids": self._tokenizer.encode_chat(messages)}
        try:
            answer = self._engine.request(
                "POST", "/generate", body=msgspec.json.encode({"prompt": prompt, **self._sampling})
            )
        except NoAnswer as error:
            raise EngineError(f"the engine did not answer: {error}") from None
        if answer.status != OK:
            raise EngineError(f"the engine refused (status {answer.status}): {answer.message[:300]}")
        return str(answer.values["text"][0]).strip()


def _converse(chat: ChatSession) -> None:
    messages: list[Message] = []
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/new":
            messages = []
        elif text:
            asked = [*messages, {"role": "user", "content": text}]
            try:
                answer = chat.answer(asked)
            except EngineError as error:
                print(f"({error}; /new starts afresh)")
            except KeyboardInterrupt:
                print("(interrupted)")
            else:
                print(answer)
                messages = [*asked, {"role": "assistant", "content": answer}]
