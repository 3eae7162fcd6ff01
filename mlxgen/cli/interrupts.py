"""Interrupts that are not lost.

Python raises KeyboardInterrupt wherever it happens to be, and in the middle of an extension's
conversion of arguments (`mx.array` of a NumPy array, for one) the extension takes it for its own
failure and goes on. So the handler also remembers what it raised, and a command asks between steps.

A token that is counted must be shown as well. While one is on its way, an interrupt waits.
"""

from __future__ import annotations

import signal
from types import FrameType

_raised: type[KeyboardInterrupt] | None = None
_waits = False


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: handled like Ctrl-C, except that a chat ends with it."""


def install() -> None:
    """Make Ctrl-C, SIGTERM and SIGHUP interrupts, but those that the caller ignores."""
    forget()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)


def _handle(number: int, _frame: FrameType | None) -> None:
    global _raised, _waits
    waits_for_delay = _waits and _raised is None
    if number != signal.SIGINT:
        _raised = Terminated
    elif _raised is None:
        _raised = KeyboardInterrupt
    # Whoever asks twice may be waiting for a reader that does not read.
    if not waits_for_delay:
        _waits = False
        raise _raised


class Delay:
    """A context at whose end an interrupt is raised that came within it; a second one does not
    wait. What was raised before and got lost is raised there as well."""

    def __enter__(self) -> None:
        global _waits
        _waits = True

    def __exit__(self, *_: object) -> None:
        global _waits
        _waits = False
        raise_lost()


def raise_lost() -> None:
    """Raise what came and has not been handled."""
    if _raised is not None:
        raise _raised


def forget() -> None:
    """It has been handled."""
    global _raised
    _raised = None
