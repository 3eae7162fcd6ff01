"""An interrupt that an extension swallows is raised again at the next step, and one that comes
while a token is on its way waits until it is shown."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from mlxgen.cli import interrupts
from mlxgen.cli.interrupts import Terminated
from mlxgen.cli.streams import Streams
from mlxgen.decoding.plain import PlainGenerator
from mlxgen.decoding.tokens import Token
from mlxgen.text.stop import StopStrings
from mlxgen.text.stream import TextStream
from tests.fixtures.command import mlxgen_here
from tests.fixtures.model_directories import Vocabulary, iid_table
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
    tokens: Any = PlainGenerator.tokens

    def interrupted(generator: PlainGenerator, max_tokens: int) -> Iterator[Token]:
        for count, token in enumerate(tokens(generator, max_tokens)):
            if count == 2:
                swallow(signal.SIGINT)
            yield token

    monkeypatch.setattr(PlainGenerator, "tokens", interrupted)
    if not asks_again:
        monkeypatch.setattr("mlxgen.cli.interrupts.raise_lost", lambda: None)
    run = mlxgen_here(
        "generate", "-m", models.llama_directory(1), "-p", "abc", "-n", 30, "--ignore-eos", "--json"
    )
    assert run.code == (130 if asks_again else 0)
    assert (len(run.ids) < 10) is asks_again


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("place", ["TextStream.add", "StopStrings.feed", "Streams.text"])
@pytest.mark.parametrize("is_before", [True, False])
def test_a_token_that_is_counted_is_shown(
    handlers: None,
    models: ModelStore,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    is_before: bool,
    waits: bool,
) -> None:
    """An interrupt on the way of the fourth token's text, from its decoding to its printing, ends
    the run behind that token. The wrong program, where it does not wait, loses the text."""
    owner, name = {
        "TextStream.add": (TextStream, "add"),
        "StopStrings.feed": (StopStrings, "feed"),
        "Streams.text": (Streams, "text"),
    }[place]
    original: Any = getattr(owner, name)
    calls = 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4 and is_before:
            signal.raise_signal(signal.SIGINT)
        result = original(*arguments)
        if calls == 4 and not is_before:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, name, interrupted)
    if not waits:
        monkeypatch.setattr("mlxgen.cli.interrupts.Delay", nullcontext)
    table = models.table_directory(iid_table([0.0] * 26), vocabulary=Vocabulary.of_size(26))
    run = mlxgen_here("generate", "-m", table, "-p", "a", "-n", 30, "--temp", 1)
    text, interruption, generated = run.stdout.split("\n")[:3]
    assert run.code == 130 and interruption == "[Interrupted]"
    is_whole = len(text) == 4 and generated.startswith("[Generated 4 tokens in ")
    assert is_whole is (waits or (place == "Streams.text" and not is_before))


@pytest.mark.parametrize("is_inside", [True, False])
def test_no_token_is_counted_before_an_interrupt_has_to_wait(
    handlers: None, models: ModelStore, monkeypatch: pytest.MonkeyPatch, is_inside: bool
) -> None:
    """An interrupt at the beginning of the delay comes before the token, with the delay or not."""
    enter: Any = interrupts.Delay.__enter__
    calls = 0

    def interrupted(delay: interrupts.Delay) -> None:
        nonlocal calls
        calls += 1
        if not is_inside and calls == 4:
            signal.raise_signal(signal.SIGINT)
        enter(delay)
        if is_inside and calls == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(interrupts.Delay, "__enter__", interrupted)
    table = models.table_directory(iid_table([0.0] * 26), vocabulary=Vocabulary.of_size(26))
    run = mlxgen_here("generate", "-m", table, "-p", "a", "-n", 30, "--temp", 1)
    text, _, generated = run.stdout.split("\n")[:3]
    assert len(text) == 3 + is_inside
    assert generated.startswith(f"[Generated {len(text)} tokens in ")


@pytest.mark.parametrize("waits", [True, False])
def test_text_that_is_held_back_to_the_end_is_shown(
    handlers: None, models: ModelStore, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The beginning of a stop string comes out at the very end. The wrong program loses it."""
    original: Any = StopStrings.flush

    def interrupted(stops: StopStrings) -> Any:
        result = original(stops)
        monkeypatch.setattr(StopStrings, "flush", original)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(StopStrings, "flush", interrupted)
    if not waits:
        monkeypatch.setattr("mlxgen.cli.interrupts.Delay", nullcontext)
    table = models.table_directory(iid_table([0.0]), vocabulary=Vocabulary.of_size(1))
    run = mlxgen_here("generate", "-m", table, "-p", "a", "-n", 4, "--stop", "aaaaaaaa")
    assert run.code == 130
    text = run.stdout.split("\n")[0]
    assert (text == "aaaa") is waits


def test_a_second_interrupt_does_not_wait(handlers: None) -> None:
    interrupts.install()
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts.Delay():
        signal.raise_signal(signal.SIGINT)
        reached.append("behind the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("behind the second")
    assert reached == ["behind the first"]


@pytest.mark.parametrize("is_left_behind", [True, False])
def test_behind_a_delay_nothing_waits(handlers: None, is_left_behind: bool) -> None:
    """Also where a second interrupt comes as the delay begins to end, so that it never does."""
    interrupts.install()
    delay = interrupts.Delay()
    delay.__enter__()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        if is_left_behind:
            signal.raise_signal(signal.SIGINT)
        else:
            delay.__exit__()
    interrupts.forget()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGTERM, signal.SIGINT),
        (signal.SIGINT, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGINT),
    ],
)
def test_who_asks_for_the_end_gets_it_whatever_else_comes(
    handlers: None, numbers: tuple[int, int]
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupts.install()
    with pytest.raises(Terminated), interrupts.Delay():
        for number in numbers:
            signal.raise_signal(number)
