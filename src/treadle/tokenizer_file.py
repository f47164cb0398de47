"""Load a model's tokenizer.json, and encode text with it, so that what is wrong with the file is a sentence.

A tokenizer comes with a downloaded model and may hold regular expressions. The library gives up one that backtracks too
often by a panic, which is no `Exception` in Python: it would pass every handler of a request or a thread.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from treadle.errors import ModelError

_PANIC = "PanicException"  # pyo3_runtime's; it cannot be imported


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
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise ModelError(f"the model's tokenizer fails on this text: {error}", fix="use another model") from None
