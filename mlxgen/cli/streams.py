"""What goes to stdout and what to stderr.

| | default | --quiet | --json |
|---|---|---|---|
| generated text | stdout | stdout | in the document |
| statistics lines | stdout | stderr | in the document, and stderr |
| notes | stderr | nowhere | stderr |
| warnings, errors | stderr | stderr | stderr |
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from enum import Enum
from typing import Any, TextIO, cast

_DRAFT_COLOUR, _PLAIN_COLOUR = "\x1b[36m", "\x1b[0m"
_CONTROLS = {
    code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)] if code not in (9, 10)
}


def printable(text: str) -> str:
    """The text with control characters as visible escapes; tab and newline stay."""
    return text.translate(_CONTROLS)


def _line(message: str) -> str:
    """A message as one line: it may quote the name of a file, which can hold anything."""
    return printable(message.replace("\n", " "))


class Mode(Enum):
    """How a run is printed."""

    DEFAULT = "default"
    QUIET = "quiet"
    JSON = "json"


class Streams:
    """Writes to the two streams under one of the modes.

    Model text is written as it is, byte for byte, except on a terminal, where control characters
    are shown as escapes so that a model cannot drive it. Characters that the stream's encoding
    lacks are replaced, never an error.
    """

    def __init__(self, mode: Mode, *, show_draft: bool = False) -> None:
        self._mode = mode
        self._out = _lenient(sys.stdout)
        self._err = _lenient(sys.stderr)
        self._is_terminal = self._out.isatty()
        self.can_colour = self._is_terminal and not os.environ.get("NO_COLOR")
        self._colours_draft = show_draft and self.can_colour

    def note(self, message: str) -> None:
        """Tell what is going on."""
        if self._mode is not Mode.QUIET:
            print(_line(message), file=self._err, flush=True)

    def warn(self, message: str) -> None:
        """Tell what the user should know even when quiet."""
        print(f"warning: {_line(message)}", file=self._err, flush=True)

    def text(self, piece: str, from_draft: bool) -> None:
        """Write a piece of the model's text as soon as it is final."""
        if self._mode is Mode.JSON:
            return
        if self._is_terminal:
            piece = printable(piece)
        if from_draft and self._colours_draft:
            piece = f"{_DRAFT_COLOUR}{piece}{_PLAIN_COLOUR}"
        self._out.write(piece)
        self._out.flush()

    def end_text(self) -> None:
        """One newline after the text, whatever it ends with."""
        if self._mode is not Mode.JSON:
            self._out.write("\n")
            self._out.flush()

    def statistics(self, lines: list[str]) -> None:
        """Write the lines that follow the text."""
        stream = self._out if self._mode is Mode.DEFAULT else self._err
        for line in lines:
            print(printable(line) if stream.isatty() else line, file=stream)
        stream.flush()

    def checks(self, rows: list[tuple[str, bool, str]]) -> None:
        """Checks as (name, passed, detail): a table on a terminal, plain lines elsewhere."""
        if self._mode is Mode.JSON:
            return
        if not self._is_terminal:
            width = max(len(name) for name, _, _ in rows)
            for name, passed, detail in rows:
                print(f"{'ok  ' if passed else 'FAIL'}  {name:<{width}}  {detail}", file=self._out)
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table("Check", "", "What was seen", box=box.SIMPLE_HEAD)
        for name, passed, detail in rows:
            mark = Text("ok", "green") if passed else Text("FAIL", "bold red")
            table.add_row(Text(name), mark, Text(detail))
        Console(file=self._out).print(table)

    def document(self, document: dict[str, Any]) -> None:
        """Write the JSON document as one line."""
        if self._mode is Mode.JSON:
            text = json.dumps(document, ensure_ascii=not _is_unicode(self._out), allow_nan=False)
            print(text, file=self._out, flush=True)


class _Dispensable:
    """A stream whose failures are dropped: what it tells is not what was asked for."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_dispensable_stderr() -> None:
    """From here on nothing fails because stderr cannot be written: a full disk, a reader gone."""
    if not isinstance(sys.stderr, _Dispensable):
        sys.stderr = cast(TextIO, _Dispensable(sys.stderr))


def _lenient(stream: TextIO) -> TextIO:
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    return stream


def _is_unicode(stream: TextIO) -> bool:
    return (stream.encoding or "").lower().replace("-", "").startswith("utf")
