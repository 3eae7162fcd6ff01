"""A call in a copy of this process: its answer comes back, and it cannot outgrow its limits."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import pytest

from mlxgen.backend.bounded import CallError, LimitError, call_bounded


def bounded(function: Callable[[], str], *, seconds: float = 20, memory_mb: int = 256) -> str:
    """A call with room for an answer of 100 kB."""
    return call_bounded(
        function, seconds=seconds, memory_bytes=memory_mb << 20, answer_bytes=100_000
    )


@pytest.mark.parametrize("text", ["", "a", "é\n\x00\ud800", "x" * 100_000])
def test_the_answer_comes_back_as_it_is(text: str) -> None:
    assert bounded(lambda: text) == text


def test_what_it_changes_stays_with_it() -> None:
    seen: list[int] = []

    def change() -> str:
        seen.append(1)
        sys.stdout.write("never flushed")
        return str(seen)

    assert bounded(change) == "[1]" and seen == []


@pytest.mark.parametrize(
    ("error", "message"),
    [(ValueError("no way"), "no way"), (KeyError(), "KeyError"), (SystemExit("out"), "out")],
)
def test_what_it_raises_is_told(error: BaseException, message: str) -> None:
    def fail() -> NoReturn:
        raise error

    with pytest.raises(CallError, match=message):
        bounded(fail)


def endless() -> str:
    """Python code that never ends."""
    while True:
        pass


def deaf() -> str:
    """One call that the interpreter does not come back from for hours."""
    return str(pow(7, 10**9))


@pytest.mark.parametrize("function", [endless, deaf])
def test_what_does_not_end_is_stopped_in_time(function: Callable[[], str]) -> None:
    started_s = time.monotonic()
    with pytest.raises(LimitError, match=r"more than 0\.3 seconds"):
        bounded(function, seconds=0.3)
    assert time.monotonic() - started_s < 5


def test_an_answer_that_is_too_long_is_cut_off() -> None:
    with pytest.raises(LimitError, match="writes more than 100000 bytes"):
        bounded(lambda: "x" * 100_001)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux alone")
def test_memory_is_limited() -> None:
    with pytest.raises(LimitError, match="more than 64 MB of memory"):
        # More than a large process may have lying about unused.
        bounded(lambda: str(len(bytearray(4 << 30))), memory_mb=64)
    assert bounded(lambda: str(len(bytearray(16 << 20))), memory_mb=64) == str(16 << 20)


def test_an_interrupt_while_waiting_leaves_no_process_behind() -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            bounded(endless)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_no_garbage_is_collected_in_the_copy() -> None:
    """It might free an array of MLX and wait for a lock for ever; here collecting goes on."""
    assert gc.isenabled()
    assert bounded(lambda: str(gc.isenabled())) == "False"
    assert gc.isenabled()
