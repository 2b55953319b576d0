"""A tokenizer of single characters, for jobs so small that they train from nothing.

It has the part of a ``transformers`` tokenizer's interface that this package uses; any of those
serves in its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from lightning_nereus.errors import ConfigurationError

_UNKNOWN = "\ufffd"


class Tokenizer(Protocol):
    """What this package asks of a tokenizer."""

    @property
    def pad_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class CharTokenizer:
    """One token a character, in the alphabet's order, after padding (0) and end (1).

    Args:
        alphabet: the characters, each once.
    """

    pad_token_id = 0
    eos_token_id = 1
    pad_token = "<pad>"
    eos_token = "<eos>"

    def __init__(self, alphabet: str) -> None:
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise ConfigurationError(
                "alphabet", f"{alphabet!r} is empty or repeats a character", "Give each character once"
            )
        self.alphabet = alphabet
        self._ids = {character: i for i, character in enumerate(alphabet, start=2)}
        self._specials = (self.pad_token, self.eos_token)

    @property
    def vocab_size(self) -> int:
        return len(self.alphabet) + 2

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; with ``add_special_tokens`` the end follows it.

        Raises:
            ConfigurationError: a character outside the alphabet.
        """
        for position, character in enumerate(text):
            if character not in self._ids:
                raise ConfigurationError(
                    "text", f"{character!r} at {position} of {text!r:.60} is not in the alphabet", "Add it there"
                )
        return [self._ids[c] for c in text] + ([self.eos_token_id] if add_special_tokens else [])

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids (list or 1-dimensional tensor).

        An id beyond the alphabet, which a model with a padded vocabulary may sample, shows as U+FFFD.
        """
        text = []
        for token in map(int, token_ids):
            if token < 2:
                text.append("" if skip_special_tokens else self._specials[token])
            else:
                text.append(self.alphabet[token - 2] if token < self.vocab_size else _UNKNOWN)
        return "".join(text)
