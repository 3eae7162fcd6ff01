"""Interrupts that are not lost.

Python raises KeyboardInterrupt wherever it happens to be, and in the middle of an extension's
conversion of arguments (`mx.array` of a NumPy array, for one) the extension takes it for its own
failure and goes on. So the handler also remembers what it raised, and a command asks between steps.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn

_raised: type[KeyboardInterrupt] | None = None


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: handled like Ctrl-C, except that a chat ends with it."""


def install() -> None:
    """Make Ctrl-C, SIGTERM and SIGHUP interrupts, but those that the caller ignores."""
    forget()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _raise)


def _raise(number: int, _frame: FrameType | None) -> NoReturn:
    global _raised
    _raised = KeyboardInterrupt if number == signal.SIGINT else Terminated
    raise _raised


def raise_lost() -> None:
    """Raise again what was raised and has not been handled."""
    if _raised is not None:
        raise _raised


def forget() -> None:
    """It has been handled."""
    global _raised
    _raised = None
