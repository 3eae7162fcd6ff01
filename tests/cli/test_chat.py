"""The chat: what is printed where, what is kept, and every key that ends something."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mlxgen.cache.cached_model import CachedModel
from tests.fixtures.command import ACCEPTANCE, Outcome, command_line, mlxgen_here
from tests.fixtures.model_directories import iid_table
from tests.fixtures.runs import ModelStore
from tests.fixtures.terminal import CTRL_C, CTRL_D, Terminal
from tests.fixtures.tokenizers import byte_vocabulary

TEMPLATE = (
    "{% for m in messages %}{% if 'refuse' in m.content %}{{ raise_exception('no \\x1b[1m') }}"
    "{% endif %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
HINT = "Ctrl-D or /exit leaves"
SETTLED_S = 0.5
"""Python notices no signal between showing a key or a prompt and waiting for the next key."""
ENDLESS = ["--ignore-eos", "--temp", 1, "-n", 100_000]


def directory(models: ModelStore, seed: int = 1, window: int = 4096, **options: Any) -> Path:
    """A model of bytes with a template."""
    return models.llama_directory(
        seed,
        vocabulary=byte_vocabulary("<eos>", eos="<eos>", chat_template=TEMPLATE),
        head_scale=6.0,
        config={"max_position_embeddings": window},
        **options,
    )


@pytest.fixture(scope="module")
def target(models: ModelStore) -> Path:
    return directory(models)


@pytest.fixture(scope="module")
def draft(models: ModelStore) -> Path:
    return directory(models, disturbance=0.1)


def chat(target: Path, typed: str | bytes, *options: object, **how: Any) -> Outcome:
    """A chat in this process, on lines typed in advance."""
    data = typed.encode() if isinstance(typed, str) else typed
    words: list[object] = ["generate", "-m", target, "-n", 12, "--ignore-eos", *options]
    return mlxgen_here(*words, stdin=data, is_typed=True, **how)


def replies(run: Outcome) -> list[str]:
    """The texts of a chat in the default mode."""
    parts = re.split(r"\n\[Generated \d+ tokens in .*\n(?:\[Speculative .*\n)?", run.stdout)
    assert parts[-1] == "", run.stdout
    return parts[:-1]


def warnings_of(run: Outcome) -> list[str]:
    """The warnings, which stand behind prompts, since nobody's typing is echoed."""
    return [line.lstrip("> ") for line in run.stderr.splitlines() if "> warning: " in line]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("has_draft", [False, True])
def test_replies_are_those_of_single_runs_on_the_whole_conversation(
    target: Path, draft: Path, temperature: float, has_draft: bool
) -> None:
    options: list[object] = ["--temp", temperature, "--seed", 5, "--system", "be kind"]
    pair: list[object] = ["--draft-model", draft] if has_draft else []
    run = chat(target, "hello\nand then?\nwhy\n", *options, *pair)
    assert run.code == 0
    said = "s:be kind\n"
    texts = replies(run)
    assert len(texts) == 3
    for message, text in zip(("hello", "and then?", "why"), texts, strict=True):
        said += f"u:{message}\na:"
        single = ["generate", "-m", target, "-n", 12, "--ignore-eos", "--no-chat-template"]
        sampling = options[: options.index("--system")]
        assert mlxgen_here(*single, *sampling, f"--prompt={said}").text == text
        said += f"{text}\n"
    assert len(run.lines(ACCEPTANCE)) == (3 if has_draft else 0)


def test_texts_and_statistics_are_on_stdout_and_the_rest_on_stderr(target: Path) -> None:
    run = chat(target, "hello\nagain\n")
    assert len(run.lines("[Generated 12 tokens in ")) == 2
    assert "> " not in run.stdout and HINT not in run.stdout
    assert run.stderr.count("> ") == 3, "one for each line and one for the end"
    assert f"Chat: Ctrl-C stops a reply. {HINT}" in run.stderr


def test_quiet_leaves_the_texts_alone_on_stdout(target: Path) -> None:
    texts = replies(chat(target, "hello\nagain\n"))
    run = chat(target, "hello\nagain\n", "--quiet")
    assert run.stdout == "".join(f"{text}\n" for text in texts)
    assert run.stderr.count("> [Generated 12 tokens in ") == 2
    assert HINT not in run.stderr and "Loading" not in run.stderr


def test_on_a_terminal_the_prompt_is_beside_the_text_and_controls_are_escaped(
    models: ModelStore,
) -> None:
    vocabulary = byte_vocabulary()
    table = iid_table([-9.0] * 27 + [9.0] + [-9.0] * 228)
    escapes = models.table_directory(table, vocabulary=vocabulary)
    run = chat(escapes, "a\n", is_terminal=True)
    assert run.stdout.startswith("> " + "\\x1b" * 12 + "\n[Generated ")
    assert "\x1b" not in run.stdout and "> " not in run.stderr
    # Without a template, as it stands in the documentation.
    assert chat(escapes, "a\n").stdout.startswith("\x1b" * 12 + "\n")


def test_json_is_refused_before_anything_is_loaded(target: Path) -> None:
    run = chat(target, "hello\n", "--json")
    assert run.code == 2 and "--json prints one document" in run.error
    assert "Loading" not in run.stderr


@pytest.mark.parametrize("typed", ["", "/exit\n", "  /exit  \nhello\n", "\n \n\t\n"])
def test_leaving_and_empty_lines_say_nothing(target: Path, typed: str) -> None:
    run = chat(target, typed)
    assert (run.code, run.out) == (0, b"")


def test_clearing_begins_anew_and_keeps_the_system_text(target: Path) -> None:
    first, second, again = replies(
        chat(target, "hello\nhello\n/clear\nhello\n", "--system", "be kind")
    )
    assert first == again != second


def test_a_prompt_that_was_given_is_no_chat(target: Path) -> None:
    run = chat(target, "typed\n", "-p", "given")
    assert len(replies(run)) == 1 and HINT not in run.stderr
    # Reading a prompt from a terminal, to its end, is still possible.
    assert len(replies(chat(target, "one\nprompt\n", "-p", "-"))) == 1


def test_bad_messages_are_one_line_and_the_chat_goes_on(target: Path) -> None:
    run = chat(target, b"hello\nrefuse\n\xff\xfe\nhello\n")
    assert run.code == 0, run.stderr
    warnings = warnings_of(run)
    assert len(warnings) == 2
    assert "no \\x1b[1m" in warnings[0] and "not UTF-8" in warnings[1]
    expected = replies(chat(target, "hello\nhello\n"))
    assert replies(run) == expected


def test_a_full_context_window_is_told_and_can_be_cleared(models: ModelStore) -> None:
    small = directory(models, window=40)
    run = chat(small, "hello\n" + "x" * 20 + "\n/clear\nhello\n", "-n", 100)
    first, again = replies(run)
    assert first == again and run.code == 0
    (warning,) = warnings_of(run)
    assert "no room for a reply in the model's context window of 40; /clear forgets it" in warning
    assert run.stderr.count("context window of 40 tokens is full") == 2


def test_system_text_without_a_template_is_refused(models: ModelStore) -> None:
    plain = models.llama_directory(1, vocabulary=byte_vocabulary())
    run = chat(plain, "hello\n", "--system", "be kind")
    assert run.code == 2 and "--system needs a chat template" in run.stderr


def test_every_lossless_rule_and_lookup_chat(target: Path, draft: Path) -> None:
    for rule in ("stochastic", "block", "gumbel-match"):
        run = chat(target, "hi\nhi\n", "--draft-model", draft, "--accept-rule", rule, "--temp", 1)
        assert len(run.lines(f"{ACCEPTANCE}rule={rule} ")) == 2
    run = chat(target, "hihihihi\nhi\n", "--prompt-lookup")
    assert len(run.lines("[Drafters] ")) == 2


def test_the_seed_is_told_once_and_repeats_the_chat(target: Path) -> None:
    run = chat(target, "hello\nagain\n", "--temp", 1)
    (note,) = run.lines("Seed: ", stream="stderr")
    repeated = chat(target, "hello\nagain\n", "--temp", 1, "--seed", note.split()[1])
    assert replies(repeated) == replies(run)


def test_an_interrupted_message_without_a_reply_is_not_kept(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, calls = CachedModel.prefill, 0

    def interrupted_once(self: CachedModel, tokens: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        right(self, tokens)

    expected = replies(chat(target, "hello\n"))
    monkeypatch.setattr(CachedModel, "prefill", interrupted_once)
    run = chat(target, "never\nhello\n")
    assert run.code == 0 and "the message is not kept" in run.stderr
    assert run.stdout.startswith("\n[Interrupted]\n[Generated 0 tokens ")
    assert replies(run)[-1] == expected[0]


# On a real terminal


@pytest.fixture
def terminal(target: Path, draft: Path) -> Any:
    """`terminal(*options)`: a chat on a pseudo-terminal, at its first prompt."""

    def start(*options: object) -> Terminal:
        words = command_line("generate", "-m", target, "--draft-model", draft, *options)
        opened = Terminal(words)
        opened.wait_for("> $")
        return opened

    return start


def test_keys_on_a_terminal(terminal: Any) -> None:
    with terminal(*ENDLESS) as session:
        # Ctrl-C at the prompt drops the line and gives a hint.
        session.type("half a line")
        session.wait_for("half a line")
        time.sleep(SETTLED_S)
        session.type(CTRL_C)
        assert HINT in session.wait_for("> $")
        # Ctrl-C in a reply stops it, with its statistics.
        session.type("hello\n")
        session.wait_for("(?s)hello\n.{60}")
        session.type(CTRL_C)
        shown = session.wait_for(r"\(sampler-match.*\n> $")
        assert "[Interrupted]\n[Generated " in shown and ACCEPTANCE in shown
        # What was said is part of the next prompt: its statistics line counts on.
        session.type("and then\n")
        session.wait_for("(?s)and then\n.{60}")
        session.type(CTRL_C)
        assert "[Interrupted]" in session.wait_for(r"\(sampler-match.*\n> $")
        session.type(CTRL_D)
        assert session.wait() == 0
        assert session.shown.rstrip().endswith(">") and session.shown.endswith("\n")
        assert "Traceback" not in session.shown


def test_line_editing_and_a_pasted_text_of_two_lines(terminal: Any) -> None:
    with terminal("-n", 3, "--ignore-eos") as session:
        session.type("hellX\x7fo\n")
        first = session.wait_for(r"\(greedy.*\n> $")
        session.type("\x1b[200~one\ntwo\x1b[201~")
        session.wait_for("two")
        session.type("\n")
        pasted = session.wait_for(r"\(greedy.*\n> $")
        # The arrow brings the line before back.
        session.type("\x1b[A")
        session.wait_for("two")
        session.type("\x15/exit\n")
        assert session.wait() == 0
        assert first.count("[Generated 3 tokens") == pasted.count("[Generated 3 tokens") == 1


@pytest.mark.parametrize("is_replying", [False, True])
def test_sigterm_ends_the_chat(terminal: Any, is_replying: bool) -> None:
    with terminal(*ENDLESS) as session:
        if is_replying:
            session.type("hello\n")
            session.wait_for("hello\n[^~]{5}")
        time.sleep(SETTLED_S)
        session.send_signal(signal.SIGTERM)
        assert session.wait() == 130
        assert ("[Interrupted]" in session.shown) == is_replying
        assert "Traceback" not in session.shown
