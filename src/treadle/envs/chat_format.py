"""Convert between chat messages and the model's text: chat template and tokenizer, and tool calls in replies.

Prompts are encoded without transformers. A tool call in a reply is

    <tool_call>{"name": "search", "arguments": {"query": "O'Hara"}}</tool_call>

Its JSON is parsed from the opening tag to the end of its value, so quotes, braces and even tags inside its strings are
kept. Invalid calls are not repaired but returned as broken, with the reason, so that the model can be informed.
"""

from __future__ import annotations

import atexit
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from treadle.chat_template import TemplateWorker
from treadle.envs.rewards.parsing import refuse_constant
from treadle.errors import ModelError, RequestError
from treadle.log import get_logger
from treadle.tokenizer_file import encode, load_tokenizer

log = get_logger("env")

_NUM_RECENT = 256
_END_OF_TURN = f"(the last words of a turn, {secrets.token_hex(8)})"  # a unique marker
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_WHITE_SPACE = " \t\r\n"


class ChatTokenizer:
    """`ChatTokenizer.load(folder).encode_chat([{"role": "user", "content": "Hi"}])` -> token ids."""

    def __init__(self, tokenizer: Tokenizer, template: str | None, special_tokens: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = dict(special_tokens)
        self._recent: dict[str, list[int]] = {}

    @classmethod
    def load(cls, folder: Path) -> Self:
        tokenizer = load_tokenizer(folder / "tokenizer.json", fix="check --openai.model")
        settings = {
            **_read_json(folder / "special_tokens_map.json"),
            **_read_json(folder / "tokenizer_config.json"),
        }
        file, source = folder / "chat_template.jinja", settings.get("chat_template")
        if file.is_file():
            source = file.read_text(encoding="utf-8")
        elif isinstance(source, list):  # several named templates
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not isinstance(source, str):
            source = None
            log.warning("no_chat_template", folder=str(folder), prompts="contents of the messages, joined by newlines")
        else:
            try:
                _worker().check(source)
            except RequestError as error:
                raise ModelError(f"{folder}: {error.message}", fix=error.fix) from None
        # A token is a string, or an object with the field "content".
        texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in settings.items()}
        tokens = {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}
        return cls(tokenizer, source, tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt as text. Without a template: the contents, joined by newlines."""
        if self._template is None:
            return "\n".join(str(message["content"]) for message in messages)
        values = {
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
        }
        try:
            return _worker().render(self._template, values)
        except RequestError as error:
            raise ModelError(error.message, fix=error.fix) from None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Token ids of the prompt. Special tokens come from the template, or without one from the tokenizer."""
        key = repr((messages, tools, add_generation_prompt))
        if key not in self._recent:
            text = self.render(messages, add_generation_prompt, tools=tools)
            self._remember(key, encode(self._tokenizer, text, add_special_tokens=self._template is None))
        return list(self._recent[key])

    def encode_next_turn(
        self, messages: Sequence[Mapping[str, Any]], *, after: int | None, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids from the end of the model's turn, whose last sampled token is `after`, to the start of its next.

        The template renders a short conversation instead of the real one: it may rewrite earlier turns (drop the
        thinking), but their sampled tokens must not change.
        """
        key = repr(("next turn", messages, tools))
        if key not in self._recent:
            if self._template is None:
                text = "".join(f"\n{message['content']}" for message in messages) + "\n"
            else:
                before = ({"role": "user", "content": "."}, {"role": "assistant", "content": _END_OF_TURN})
                _, found, text = self.render([*before, *messages], tools=tools).rpartition(_END_OF_TURN)
                if not found:
                    raise ModelError(
                        "the model's chat template drops what an assistant said before",
                        fix="give it a template that keeps earlier turns (chat_template.jinja in the model's folder)",
                    )
            self._remember(key, self.encode_text(text, is_beginning=False))
        ids = self._recent[key]
        # The model has sampled the end of its turn, unless it was truncated or stopped by a stop string.
        return list(ids[1:] if ids[:1] == [after] else ids)

    def encode_turn(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of the last message, an assistant's, as a model samples it: its text, and the end of its turn."""
        *before, turn = messages
        text = turn.get("content")
        if self._template is not None:
            start = self.render(before, tools=tools)
            whole = self.render(messages, add_generation_prompt=False, tools=tools)
            if whole.startswith(start):  # else the template writes no header of a turn, or another one
                text = whole.removeprefix(start).removesuffix(self._turn_ending)
            elif turn.get("tool_calls"):
                text = None
        if not isinstance(text, str):
            raise ModelError(
                "the model's chat template cannot write this assistant's turn",
                fix="write tool calls and reasoning into its content, or give the model another template",
            )
        return [*self.encode_text(text, is_beginning=False), self.end_of_turn]

    @cached_property
    def end_of_turn(self) -> int:
        """The token that ends an assistant's turn: the special token that the template writes there, else the
        tokenizer's eos_token."""
        ids = self.encode_text(self._turn_ending, is_beginning=False)
        special = {token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        if ids and ids[0] in special:
            return ids[0]
        token = self._tokenizer.token_to_id(self._special_tokens.get("eos_token", ""))
        if token is None:
            raise ModelError(
                "the model's tokenizer has no eos_token, and its chat template writes no token at the end of a turn",
                fix="name the token as eos_token in tokenizer_config.json",
            )
        return int(token)

    @cached_property
    def _turn_ending(self) -> str:
        """What the template writes behind an assistant's text: "<|im_end|>\\n"."""
        if self._template is None:
            return ""
        turns = ({"role": "user", "content": "."}, {"role": "assistant", "content": _END_OF_TURN})
        return self.render(turns, add_generation_prompt=False).rpartition(_END_OF_TURN)[2]

    def _remember(self, key: str, ids: Sequence[int]) -> None:
        """Cache prompts: the rollouts of a group share them."""
        while len(self._recent) >= _NUM_RECENT:
            del self._recent[next(iter(self._recent))]  # the oldest
        self._recent[key] = list(ids)

    def encode_text(self, text: str, *, is_beginning: bool = True) -> list[int]:
        """Token ids of plain text; the tokenizer's own special tokens only at the beginning of a sequence."""
        return encode(self._tokenizer, text, add_special_tokens=is_beginning)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


def resolve_tokenizer_folder(name: str, engine_model: str) -> Path:
    """The tokenizer's folder: `name` itself, else the folder that the engine loaded, else a download of `name`.

    `engine_model` is the model in the engine's /health.
    """
    for candidate in (Path(name), Path(engine_model)):
        if (candidate / "tokenizer.json").is_file():
            return candidate
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=list(_TOKENIZER_FILES)))
    except Exception as error:  # no library, no network, no such model: one remedy for all
        raise ModelError(
            f"no tokenizer for '{name}': it is no folder here, the engine's '{engine_model}' cannot be read "
            f"from this host, and the download failed ({type(error).__name__}: {str(error)[:200]})",
            fix="copy the model's tokenizer files to this host and pass --openai.model FOLDER",
        ) from None


@cache
def _worker() -> TemplateWorker:
    """One worker for all tokenizers of this process."""
    worker = TemplateWorker()
    atexit.register(worker.close)
    return worker


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}", fix="fetch the file again") from None


# ---- tool calls (pure)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BrokenCall:
    text: str  # between the tags
    problem: str


def find_tool_calls(text: str) -> list[ToolCall | BrokenCall]:
    """All calls, in order.

    >>> find_tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1})]
    """
    calls: list[ToolCall | BrokenCall] = []
    place = text.find(_OPEN)
    while place >= 0:
        begin = place + len(_OPEN)
        try:
            value, end = _read_value(text, begin)
            calls.append(_as_call(value, text[begin:end]))
        except (ValueError, RecursionError) as error:
            ends = [tag_at for tag in (_CLOSE, _OPEN) if (tag_at := text.find(tag, begin)) >= 0]
            end = min(ends, default=len(text))
            calls.append(BrokenCall(text[begin:end].strip(), f"not JSON: {error or type(error).__name__}"))
        place = text.find(_OPEN, end)
    return calls


def without_tool_calls(text: str) -> str:
    """The text before the first call."""
    return text.partition(_OPEN)[0]


def _read_value(text: str, begin: int) -> tuple[Any, int]:
    """The JSON value at `begin`, and its end; ValueError if there is none, or something follows it."""
    while text[begin : begin + 1] and text[begin] in _WHITE_SPACE:
        begin += 1
    value, end = _DECODER.raw_decode(text, begin)
    rest = text[end:].lstrip(_WHITE_SPACE)
    if rest and not rest.startswith((_CLOSE, _OPEN)):  # at the end of a text the closing tag may be missing
        raise ValueError(f"there is more behind the value: {rest.partition(_CLOSE)[0]!r:.40}")
    return value, end


def _as_call(value: Any, text: str) -> ToolCall | BrokenCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return BrokenCall(text.strip(), 'a call is {"name": "...", "arguments": {...}}')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some models write the object as text
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return BrokenCall(text.strip(), '"arguments" is no object')
    return ToolCall(value["name"], arguments)


_DECODER = json.JSONDecoder(strict=False, parse_constant=refuse_constant)  # allows line breaks within strings
