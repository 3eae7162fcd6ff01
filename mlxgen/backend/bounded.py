"""Running something that cannot be trusted to end: in a copy of this process, within limits.

A forked copy starts in milliseconds and sees everything its parent does. It can be stopped inside
any call, also one that the interpreter does not come back from, and what it allocates is its own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable

_PIECE_BYTES = 1 << 16


class LimitError(Exception):
    """A call took more time, memory or room for its answer than it was given."""


class CallError(Exception):
    """A call raised; the message is that of what it raised, or its type where it had none."""


def call_bounded(
    function: Callable[[], str], *, seconds: float, memory_bytes: int, answer_bytes: int
) -> str:
    """Call a function of pure Python in a copy of this process and return the text it returned.

    memory_bytes: what it may allocate beyond what this process holds, where the system can limit
    that. answer_bytes: the longest answer, as UTF-8. Nothing that the function changes is seen
    here, and it must not use MLX, whose threads are not copied. Raises `LimitError` or `CallError`.
    """
    reading, writing = os.pipe()
    child = _fork()
    if child == 0:
        _answer(function, writing, memory_bytes)
    os.close(writing)
    try:
        answer = _read(reading, time.monotonic() + seconds, seconds, answer_bytes)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    text = answer[1:].decode("utf-8", "surrogatepass")
    if answer[:1] == b"=":
        return text
    if answer[:1] == b"!":
        raise CallError(text)
    raise LimitError(f"it takes more than {memory_bytes >> 20} MB of memory")


def _fork() -> int:
    """As `os.fork`; in the copy, garbage is not collected any more.

    A collection might free an array of MLX, and wait for a lock that one of MLX's threads held when
    the copy was made and that nobody will ever release there.
    """
    collects = gc.isenabled()
    gc.disable()
    with warnings.catch_warnings():
        # Python warns of the threads; the copy only ever runs this one.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child and collects:
        gc.enable()
    return child


def _read(reading: int, deadline_s: float, seconds: float, answer_bytes: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([reading], [], [], left_s)[0]:
            raise LimitError(f"it takes more than {seconds:g} seconds")
        piece = os.read(reading, _PIECE_BYTES)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        size += len(piece)
        if size > answer_bytes + 1:
            raise LimitError(f"it writes more than {answer_bytes} bytes")


def _answer(function: Callable[[], str], writing: int, memory_bytes: int) -> None:
    """The copy's whole life. It leaves without flushing streams or running exit handlers, which
    are its parent's, and without an answer where it runs out of memory."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        _limit_memory(memory_bytes)
        try:
            answer = b"=" + function().encode("utf-8", "surrogatepass")
        except MemoryError:
            os._exit(1)
        except BaseException as error:
            answer = b"!" + (str(error) or type(error).__name__).encode("utf-8", "surrogatepass")
        while answer:
            answer = answer[os.write(writing, answer) :]
    finally:
        os._exit(0)


def _limit_memory(more_bytes: int) -> None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            held_bytes = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return  # not Linux: time is the limit
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = held_bytes + more_bytes
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
