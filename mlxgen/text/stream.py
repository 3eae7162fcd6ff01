"""Turning emitted ids into text as they come, so that the pieces add up to the whole.

The joined pieces equal the tokenizer's decoding of all ids, special tokens kept. What a later
token can still change is held back, or until the end: the last character while it is incomplete,
and a run of byte tokens (`<0xE2>`), which a tokenizer decodes as a whole: one byte too many turns
every character of the run into replacement characters.
"""

from __future__ import annotations

import re
from typing import Any

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_LARGEST_WINDOW_TOKENS = 64
_LONGEST_CHARACTER_BYTES = 4


class TextStream:
    """Decodes one sequence. tokenizer: needs `decode` and `convert_ids_to_tokens` as transformers
    has them.

    A token's text depends on what stands before it (a leading space, say), so each piece is the
    difference between two decodings of a window that starts at the same earlier token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window_start = 0
        self._shown_characters = 0
        """Characters of the window's text that have been returned."""
        self._clean_end = 0
        """Number of tokens up to which nothing was held back."""

    def add(self, token: int) -> str:
        """The text that this token makes final; often empty while a character is incomplete."""
        self._ids.append(token)
        if not self._ends_byte_run(token):
            return ""
        text = self._decode(self._window_start)
        held = text.endswith(_REPLACEMENT)
        piece = self._up_to(len(text) - held, text)
        self._move_window(is_clean=not held)
        return piece

    def finish(self) -> str:
        """What is still held back, as it stands."""
        text = self._decode(self._window_start)
        return self._up_to(len(text), text)

    def _ends_byte_run(self, token: int) -> bool:
        string = self._tokenizer.convert_ids_to_tokens(token)
        if string is None:
            return False  # an id without a token has no text, so it ends nothing
        if not isinstance(string, str) or not _BYTE_TOKEN.fullmatch(string):
            return True
        spelled_out: bool = self._tokenizer.decode([token]) == string
        return spelled_out

    def _decode(self, start: int) -> str:
        text: str = self._tokenizer.decode(
            self._ids[start:], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _up_to(self, end: int, text: str) -> str:
        piece = text[self._shown_characters : end]
        self._shown_characters = max(self._shown_characters, end)
        return piece

    def _move_window(self, *, is_clean: bool) -> None:
        """Let the window begin at the last place where nothing was held back, or, among bytes that
        are no characters at all, a little before the end."""
        end = len(self._ids)
        if is_clean:
            self._window_start, self._clean_end = self._clean_end, end
            self._shown_characters = len(self._decode(self._window_start))
        elif end - self._window_start > _LARGEST_WINDOW_TOKENS:
            start = end - _LARGEST_WINDOW_TOKENS // 2
            text = self._decode(start)
            # A character that is incomplete now has begun inside the new window.
            if len(text) > _LONGEST_CHARACTER_BYTES and text.endswith(_REPLACEMENT):
                self._window_start = self._clean_end = start
                self._shown_characters = len(text) - 1
