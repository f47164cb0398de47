"""Load a model's tokenizer.json, and encode text with it, so that what is wrong with the file is a sentence.

A tokenizer comes with a downloaded model and may hold regular expressions. The library gives up one that backtracks too
often by a panic, which is no `Exception` in Python: it would pass every handler of a request or a thread. One that
backtracks a little less, at every character, takes hours instead: a text is encoded in a thread with a deadline.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path

from tokenizers import Tokenizer

from treadle.background import in_background
from treadle.errors import ModelError

MAX_S = 20.0  # tokenizers of known models take less than a second for the longest prompts
_PANIC = "PanicException"  # pyo3_runtime's; it cannot be imported
_given_up: list[Future[list[int]]] = []  # past the deadline; their threads cannot be stopped

# The library's own threads would warn of every fork of this process, and one text does not need them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def load_tokenizer(file: Path, fix: str) -> Tokenizer:
    """`fix`: for a file that is missing or damaged."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for a missing and for a broken file
        raise ModelError(f"cannot load the tokenizer in {file}: {error}", fix=fix) from None
    return prepare_tokenizer(tokenizer, file)


def prepare_tokenizer(tokenizer: Tokenizer, source: Path) -> Tokenizer:
    """Without the padding and truncation of its training, which some were saved with. One whose decoder has a regular
    expression is refused: no model needs that, and text is decoded after every token that is sampled."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if tokenizer.decoder is not None and b'"Regex"' in tokenizer.decoder.__getstate__():  # its JSON
        raise ModelError(
            f"the decoder of the tokenizer in {source} has a regular expression",
            fix="use a model whose tokenizer decodes without one",
        )
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text. After one that took too long, texts are refused for as long as its thread computes."""
    if not all(encoding.done() for encoding in _given_up):
        raise _too_slow()
    # Unlike `encode`, it lets other threads of this process run.
    encoding = in_background(
        "tokenizer", lambda: list(tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)
    )
    try:
        return encoding.result(MAX_S)
    except TimeoutError:
        _given_up.append(encoding)
        raise _too_slow() from None
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise ModelError(f"the model's tokenizer fails on this text: {error}", fix="use another model") from None


def _too_slow() -> ModelError:
    return ModelError(
        f"the model's tokenizer takes more than {MAX_S:.0f} s for a text", fix="use another model, or shorter prompts"
    )
