"""Tokenize prompts and chats with a model's own tokenizer and template, and detokenize completions as they grow."""

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

CONTEXT_SIZES = 4, 16  # preceding tokens to decode with; the larger one if the smaller starts inside a character
# Names not allowed in chat_template_kwargs: they are no template variables, or have a request field of their own.
_RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "chat_template", "continue_final_message", "tokenize"}
)
INCOMPLETE_CHAR = "\ufffd"  # how a decoder renders a character whose last bytes are missing


def has_tokenizer(folder: Path) -> bool:
    """False for a folder to which a trainer saved only weights."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


class ModelTokenizer:
    """`ModelTokenizer.load(folder).encode("Say 7")` -> token ids."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        self._tokenizer = tokenizer
        self._folder = folder

    @classmethod
    def load(cls, folder: Path) -> ModelTokenizer:
        file = folder / "tokenizer.json"
        if not file.is_file():
            return cls(prepare_tokenizer(_pretrained(folder).backend_tokenizer, folder), folder)
        return cls(load_tokenizer(file, fix=REFETCH_FIX), folder)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Without special tokens for a rendered chat template, which contains them already."""
        return encode(self._tokenizer, text, add_special_tokens=add_special_tokens)

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def decode_after(self, before: Sequence[int], token_ids: Sequence[int]) -> str:
        """The text of `token_ids` when they follow `before`."""
        context, prefix = self.context(before)
        text = self.decode([*context, *token_ids])
        return text[len(prefix) :] if text.startswith(prefix) else self.decode(token_ids)

    def context(self, before: Sequence[int]) -> tuple[list[int], str]:
        """The last tokens of `before`, and their text; empty if they end inside a character.

        Some tokenizers write the space before a word only if another word precedes it.
        """
        for size in CONTEXT_SIZES:
            last = list(before[-size:])
            text = self.decode(last)
            if not text.endswith(INCOMPLETE_CHAR):
                return last, text
        return [], ""

    def token(self, token_id: int) -> str:
        """The text of one token by itself, special tokens included."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """The model's chat template, and the variables to render it with (chat_template.py)."""
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

    @property
    def is_chat_loaded(self) -> bool:
        return "_chat" in self.__dict__

    def load_chat(self) -> None:
        """Load what `chat_template` needs; takes a second the first time."""
        _ = self._chat

    @cached_property
    def _chat(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Templates and special tokens, each by name, as transformers reads them."""
        tokenizer = _pretrained(self._folder)
        found = tokenizer.chat_template
        templates = found if isinstance(found, dict) else {} if found is None else {"default": str(found)}
        return templates, dict(tokenizer.special_tokens_map)


def _pretrained(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of many types; all mean that the files are no valid tokenizer
        raise ModelError(f"cannot load the tokenizer in {folder}: {error}", fix=REFETCH_FIX) from None


class IncrementalDetokenizer:
    """The text of a growing completion, cut at the first stop string.

    `add(token)` returns whether a stop string was found. `take_new_text()` returns the text since the last call; an end
    that may still become a stop string is held back.
    """

    def __init__(self, tokenizer: ModelTokenizer, stop: Sequence[str], before: Sequence[int] = ()) -> None:
        """`before`: the tokens of the prompt."""
        self.text = ""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        # Recent tokens only: the text of a token depends on the few before it.
        self._recent, self._recent_text = tokenizer.context(before)
        self._num_decoded = len(self._recent)  # of the recent ones: part of `text` already, or of the prompt
        self._num_sent = 0

    def add(self, token_id: int) -> bool:
        self._recent.append(token_id)
        now = self._tokenizer.decode(self._recent)
        return False if now.endswith(INCOMPLETE_CHAR) else self._append(now)

    def finish(self) -> None:
        """Flush after the last token; an incomplete character is rendered as INCOMPLETE_CHAR."""
        if self._num_decoded < len(self._recent):
            self._append(self._tokenizer.decode(self._recent))

    def take_new_text(self, *, is_finished: bool) -> str:
        end = len(self.text) - (0 if is_finished else self._num_held_back())
        new = self.text[self._num_sent : end]
        self._num_sent = max(end, self._num_sent)
        return new

    def _append(self, now: str) -> bool:
        start = max(0, len(self.text) - self._longest + 1)
        new = self._recent[self._num_decoded :]
        alone = self._tokenizer.decode(new)
        self.text += now[len(self._recent_text) :] if now.startswith(self._recent_text) else alone
        self._recent_text = alone
        if self._recent_text:
            self._recent = new
        else:  # special tokens only: the next token follows the text before them
            self._recent_text = now
        self._num_decoded = len(self._recent)
        cuts = [at for word in self._stop if (at := self.text.find(word, start)) >= 0]
        if cuts:
            self.text = self.text[: min(cuts)]
        return bool(cuts)

    def _num_held_back(self) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            end = self.text[-length:]
            if any(word.startswith(end) for word in self._stop):
                return length
        return 0
