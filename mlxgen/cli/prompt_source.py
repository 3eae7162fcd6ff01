"""Where the prompt comes from: an option, a file, or standard input. Bytes are kept as they are."""

from __future__ import annotations

import sys
from pathlib import Path

from mlxgen.errors import InputError, OptionError


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt's text. Raises `InputError` when it is empty or not UTF-8."""
    if prompt is not None and file is not None:
        raise OptionError("-p and -f both give a prompt; pass one")
    if file is not None:
        text = _read_file(file)
    elif prompt is None or prompt == "-":
        text = _read_stdin(is_asked_for=prompt == "-")
    else:
        text = prompt
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError("the prompt of -p is not UTF-8 text") from error
    if not text:
        raise InputError("the prompt is empty: pass -p TEXT, -f FILE, or pipe it in")
    return text


def _read_file(file: str) -> str:
    try:
        return _decode(Path(file).expanduser().read_bytes(), f"-f {file}")
    except OSError as error:
        raise InputError(f"-f {file}: {error.strerror or error}") from error
    except RuntimeError as error:  # a home that is not known
        raise InputError(f"-f {file}: {error}") from error


def _read_stdin(*, is_asked_for: bool) -> str:
    stdin = sys.stdin
    if stdin is None or stdin.closed:
        raise InputError("no prompt, and standard input is closed: pass -p TEXT or -f FILE")
    if stdin.isatty() and not is_asked_for:
        raise InputError(
            "no prompt: interactive chat is not there yet; pass -p TEXT, -f FILE, or pipe one in"
        )
    return _decode(stdin.buffer.read(), "standard input")


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 text (byte {error.start})") from error
