"""Turning emitted ids into text as they come, so that the pieces add up to the whole.

The joined pieces equal the tokenizer's decoding of all ids, special tokens kept. A multi-byte
character that is spread over tokens is held back until it is complete, or until the end.
"""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\ufffd"
_LONGEST_HELD_TOKENS = 8
_LONGEST_CHARACTER_TOKENS = 4


class TextStream:
    """Decodes one sequence. tokenizer: needs `decode(ids, ...)` as transformers has it.

    A token's text depends on what stands before it (a leading space, say), so each piece is the
    difference between two decodings that start at the same earlier token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._emitted = 0

    def _decode(self, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._ids[self._context : end],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return text

    def add(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._ids.append(token)
        end = len(self._ids)
        text = self._decode(end)
        if text.endswith(_REPLACEMENT):
            if end - self._emitted <= _LONGEST_HELD_TOKENS:
                return ""
            # Bytes that are no character at all: only the newest tokens can still become one.
            end -= _LONGEST_CHARACTER_TOKENS - 1
            text = self._decode(end)
        return self._advance(end, text)

    def finish(self) -> str:
        """What is still held back, as it stands."""
        return self._advance(len(self._ids), self._decode(len(self._ids)))

    def _advance(self, end: int, text: str) -> str:
        piece = text[len(self._decode(self._emitted)) :]
        self._context, self._emitted = self._emitted, end
        return piece
