"""A model's text: its tokenizer and chat template, and completions as text while they grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from treadle.engines.model_folder import REFETCH_FIX
from treadle.errors import ModelError, RequestError
from treadle.tokenizer_file import encode, load_tokenizer, prepare_tokenizer

NUMS_BEFORE = 4, 16  # tokens that a tokenizer may look back at; more where so few begin in the middle of a character
# Names in chat_template_kwargs that are no variables of a template, or that have a field of their own in a request.
_RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "chat_template", "continue_final_message", "tokenize"}
)
UNFINISHED = "\ufffd"  # what a decoder shows for a character whose last bytes are still to come


def has_tokenizer(folder: Path) -> bool:
    """Not where a trainer saved weights alone."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


class Text:
    """`Text.load(folder).encode("Say 7")` -> token ids."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        self._tokenizer = tokenizer
        self._folder = folder

    @classmethod
    def load(cls, folder: Path) -> Text:
        file = folder / "tokenizer.json"
        if not file.is_file():
            return cls(prepare_tokenizer(_pretrained(folder).backend_tokenizer, folder), folder)
        return cls(load_tokenizer(file, fix=REFETCH_FIX), folder)

    def encode(self, text: str) -> list[int]:
        return encode(self._tokenizer, text)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def decode_after(self, before: Sequence[int], token_ids: Sequence[int]) -> str:
        """As it reads after those tokens."""
        context, read = self.context(before)
        whole = self.decode([*context, *token_ids])
        return whole[len(read) :] if whole.startswith(read) else self.decode(token_ids)

    def context(self, before: Sequence[int]) -> tuple[list[int], str]:
        """The last of the tokens that went before, and their text: some tokenizers write the space in front of a word
        only if another word went before it. None, where they end in the middle of a character."""
        for number in NUMS_BEFORE:
            last = list(before[-number:])
            read = self.decode(last)
            if not read.endswith(UNFINISHED):
                return last, read
        return [], ""

    def token(self, token_id: int) -> str:
        """One token by itself, special ones too: for answers that list tokens as text."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """The model's own chat template, and the values with which it writes a conversation (chat_template.py)."""
        templates, special_tokens = self._chat
        source = templates.get("tool_use") if tools else None
        source = source or templates.get("default")
        if source is None:
            raise RequestError(f"{self._folder.name} has no chat template", fix="send text to /v1/completions")
        if tools and "tools" not in source:
            raise RequestError(
                f"the chat template of {self._folder.name} knows no tools", fix="write them into a message"
            )
        if not messages:
            raise RequestError("messages holds none", fix="send at least one message")
        reserved = sorted(set(options or ()) & _RESERVED)
        if reserved:
            raise RequestError(f"chat_template_kwargs may not set {', '.join(reserved)}", fix="leave it out")
        own = {"messages": messages, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        return source, {**special_tokens, "documents": None, **(options or {}), **own}

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what a chat template wrote, its special tokens included."""
        return encode(self._tokenizer, text, add_special_tokens=False)

    @property
    def is_chat_loaded(self) -> bool:
        return "_chat" in self.__dict__

    def load_chat(self) -> None:
        """What `chat_template` needs: it takes a second, once."""
        _ = self._chat

    @cached_property
    def _chat(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Templates by name, and special tokens by name, as transformers reads them; loaded for the first
        conversation."""
        tokenizer = _pretrained(self._folder)
        found = tokenizer.chat_template
        templates = found if isinstance(found, dict) else {} if found is None else {"default": str(found)}
        return templates, dict(tokenizer.special_tokens_map)


def _pretrained(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of many kinds, and all of them mean: these files are no tokenizer
        raise ModelError(f"cannot load the tokenizer in {folder}: {error}", fix=REFETCH_FIX) from None


class Written:
    """The text of one completion while it grows, cut where a stop string begins.

    `add(token)` says whether a stop string was found. `news()` is the text that is new since the last call; the end of
    it is kept back as long as it may still become a stop string.
    """

    def __init__(self, text: Text, stop: Sequence[str], before: Sequence[int] = ()) -> None:
        """`before`: the tokens that it follows."""
        self.text = ""
        self._tokenizer = text
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        # Few tokens: what the last ones read as depends on those just before them.
        self._recent, self._read = text.context(before)
        self._num_read = len(self._recent)  # of the recent ones: in `text` already, or before it
        self._num_told = 0

    def add(self, token_id: int) -> bool:
        self._recent.append(token_id)
        now = self._tokenizer.decode(self._recent)
        return False if now.endswith(UNFINISHED) else self._take(now)

    def finish(self) -> None:
        """No token comes any more: a character that was never completed is shown as the decoder shows it."""
        if self._num_read < len(self._recent):
            self._take(self._tokenizer.decode(self._recent))

    def news(self, *, is_finished: bool) -> str:
        end = len(self.text) - (0 if is_finished else self._num_doubtful())
        new = self.text[self._num_told : end]
        self._num_told = max(end, self._num_told)
        return new

    def _take(self, now: str) -> bool:
        start = max(0, len(self.text) - self._longest + 1)
        new = self._recent[self._num_read :]
        alone = self._tokenizer.decode(new)
        self.text += now[len(self._read) :] if now.startswith(self._read) else alone
        self._read = alone
        if self._read:
            self._recent = new
        else:  # special tokens only: what comes next follows the text before them
            self._read = now
        self._num_read = len(self._recent)
        cuts = [at for word in self._stop if (at := self.text.find(word, start)) >= 0]
        if cuts:
            self.text = self.text[: min(cuts)]
        return bool(cuts)

    def _num_doubtful(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            end = self.text[-length:]
            if any(word.startswith(end) for word in self._stop):
                return length
        return 0
