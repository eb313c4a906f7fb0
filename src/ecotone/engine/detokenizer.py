"""Token ids back to text, token by token: whole characters only, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# What a decoder puts where bytes are not (yet) a character.
REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...


class IncrementalDetokenizer:
    """The text of one request as it grows.

    ``text`` only ever grows, by what can no longer change: a character whose bytes are spread over several
    tokens appears when it is whole, and what may still become a stop string is held back. Special tokens have
    no text, so a stop string is looked for in what a reader sees.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """``stop`` is not looked for in the text of fewer than ``min_tokens`` tokens; a stop string that is
        complete before is text like any other."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        # A token's text may depend on the token before it (a leading space): ids from _prefix on are decoded with
        # and without the tokens that came after _read, and the difference is the new text.
        self._prefix = 0
        self._read = 0
        self._held = ""
        self._text: list[str] = []
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """Everything that was given out."""
        return "".join(self._text)

    def append(self, token_id: int) -> str:
        """Take one more token; the text that became certain by it, maybe ``""``.

        When a stop string is complete, ``stopped_by`` names it, and nothing from it on is ever given out.
        """
        self._ids.append(token_id)
        before = self._decode(self._ids[self._prefix : self._read])
        now = self._decode(self._ids[self._prefix :])
        if len(now) <= len(before) or now.endswith(REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return self._give(now[len(before) :])

    def finish(self) -> str:
        """No token follows: the text that was held back, characters that stayed incomplete included."""
        before = self._decode(self._ids[self._prefix : self._read])
        now = self._decode(self._ids[self._prefix :])
        self._prefix = self._read = len(self._ids)
        piece = self._give(now[len(before) :])
        rest = "" if self.stopped_by is not None else self._held
        self._held = ""
        self._text.append(rest)
        return piece + rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _give(self, piece: str) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + piece
        early = len(self._ids) < self._min_tokens
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0 and not early]
        if found:
            at, self.stopped_by = min(found)
            certain = at
        else:
            certain = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[certain:]
        self._text.append(text[:certain])
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, and not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
