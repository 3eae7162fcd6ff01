"""Where the prompt comes from: an option, a file, or standard input. Bytes are kept as they are."""

from __future__ import annotations

import sys

from mlxgen.errors import InputError, OptionError
from mlxgen.models.source import expand_home


def asks_for_chat(prompt: str | None, file: str | None) -> bool:
    """Whether no prompt was given and somebody is there to type one."""
    stdin = sys.stdin
    is_open = stdin is not None and not stdin.closed
    return prompt is None and file is None and is_open and stdin.isatty()


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt's text. Raises `InputError` when it is empty or not UTF-8."""
    if prompt is not None and file is not None:
        raise OptionError("-p and -f both give a prompt; pass one")
    if file is not None:
        text = _read_file(file)
    elif prompt is None or prompt == "-":
        text = _read_stdin()
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
        return _decode(expand_home(file).read_bytes(), f"-f {file}")
    except OSError as error:
        raise InputError(f"-f {file}: {error.strerror or error}") from error


def _read_stdin() -> str:
    stdin = sys.stdin
    if stdin is None or stdin.closed:
        raise InputError("no prompt, and standard input is closed: pass -p TEXT or -f FILE")
    return _decode(stdin.buffer.read(), "standard input")


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 text (byte {error.start})") from error
