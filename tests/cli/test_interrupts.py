"""An interrupt that an extension swallows is raised again at the next step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from mlxgen.cli import interrupts
from mlxgen.cli.interrupts import Terminated
from mlxgen.generation import GenerationStream
from tests.fixtures.command import mlxgen_here
from tests.fixtures.runs import ModelStore


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    interrupts.forget()


def swallow(number: int) -> None:
    """What nanobind does with an exception in the middle of a conversion."""
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, Terminated),
        (signal.SIGHUP, Terminated),
    ],
)
def test_a_swallowed_interrupt_is_raised_again_until_it_is_handled(
    handlers: None, number: int, kind: type[KeyboardInterrupt]
) -> None:
    signal.signal(number, signal.SIG_DFL)
    interrupts.install()
    interrupts.raise_lost()
    swallow(number)
    for _ in range(2):
        with pytest.raises(kind):
            interrupts.raise_lost()
    interrupts.forget()
    interrupts.raise_lost()


def test_what_the_caller_ignores_stays_ignored(handlers: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupts.install()
    signal.raise_signal(signal.SIGHUP)
    interrupts.raise_lost()


@pytest.mark.parametrize("asks_again", [True, False])
def test_a_run_ends_at_the_next_token(
    handlers: None, models: ModelStore, monkeypatch: pytest.MonkeyPatch, asks_again: bool
) -> None:
    """The wrong program, which does not ask, runs to its end."""
    pieces: Any = GenerationStream.__iter__

    def interrupted(stream: GenerationStream) -> Iterator[Any]:
        for count, piece in enumerate(pieces(stream)):
            if count == 2:
                swallow(signal.SIGINT)
            yield piece

    monkeypatch.setattr(GenerationStream, "__iter__", interrupted)
    if not asks_again:
        monkeypatch.setattr("mlxgen.cli.interrupts.raise_lost", lambda: None)
    run = mlxgen_here(
        "generate", "-m", models.llama_directory(1), "-p", "abc", "-n", 30, "--ignore-eos", "--json"
    )
    assert run.code == (130 if asks_again else 0)
    assert (len(run.ids) < 10) is asks_again
