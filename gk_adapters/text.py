"""Text to token ids and back, by a checkpoint's own tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gk_core.errors import CheckpointError, MissingDependencyError

__all__ = ["Tokenizer"]


class Tokenizer:
    """A checkpoint's tokenizer.

    Raises:
        CheckpointError: no tokenizer.json, or one that the tokenizers library refuses.
        MissingDependencyError: tokenizers is not installed.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path.name} is missing in {directory}; give token ids instead of text")
        try:
            library: Any = import_module("tokenizers")
        except ModuleNotFoundError as error:
            raise MissingDependencyError("tokenizers is not installed: pip install 'gk-decode[cpu]'") from error
        try:
            self._tokenizer = library.Tokenizer.from_file(str(path))
        except Exception as error:
            raise CheckpointError(f"{path} is not a tokenizer: {error}") from error

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, without special tokens of the tokenizer's own accord."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text
