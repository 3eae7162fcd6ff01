"""What stands on which stream: bytes on a pipe, escapes on a terminal, and how runs end."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.command import (
    ACCEPTANCE,
    Outcome,
    command_line,
    first_bytes,
    mlxgen_here,
    mlxgen_process,
    started,
)
from tests.fixtures.model_directories import Vocabulary, iid_table, successor_table
from tests.fixtures.runs import ModelStore
from tests.fixtures.tokenizers import byte_vocabulary

START = 0x01
TIMEOUT_S = 60


@pytest.fixture
def saying(models: ModelStore) -> Any:
    """`saying(text)`: a model that says the text after byte 1, then ends. No byte may repeat."""

    def make(text: str) -> Path:
        data = text.encode()
        assert len(set(data)) == len(data) and START not in data
        successor = [256] * 257
        for byte, following in zip([START, *data], data, strict=False):
            successor[byte] = following
        vocabulary = byte_vocabulary("<eos>", eos="<eos>")
        return models.table_directory(successor_table(successor), vocabulary=vocabulary)

    return make


def say(target: Path, *options: object, **how: Any) -> Outcome:
    words: list[object] = ["generate", "-m", target, "-p", chr(START), "-n", 60]
    return mlxgen_here(*words, "--draft-model", target, *options, **how)


@pytest.mark.parametrize("text", ["é😀 \n", "\x1b[31mRED", "tab\tel\x07[/x]", "long 日", " \n"])
def test_text_on_a_pipe_is_byte_exact(saying: Any, text: str) -> None:
    run = say(saying(text), "--quiet")
    assert run.out == text.encode() + b"\n"
    assert say(saying(text)).out.startswith(text.encode() + b"\n[Generated ")
    assert say(saying(text), "--json").document["text"] == text


def test_text_is_the_decoding_of_the_ids(models: ModelStore) -> None:
    # At this temperature most bytes are no characters at all.
    target = models.table_directory(iid_table([0.0] * 256), vocabulary=byte_vocabulary())
    words = ["generate", "-m", target, "-p", "a", "-n", 80, "--temp", 1, "--seed", 3]
    document = mlxgen_here(*words, "--json").document
    assert document["text"] == bytes(document["token_ids"]).decode(errors="replace")
    assert "\ufffd" in document["text"]
    assert mlxgen_here(*words, "--quiet").stdout == document["text"] + "\n"


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_character_cut_off_by_the_limit_is_a_replacement_not_a_crash(
    saying: Any, limit: int
) -> None:
    run = say(saying("😀"), "-n", limit, "--json")
    assert run.document["text"] == ("😀" if limit == 4 else "\ufffd")
    assert run.document["generated_tokens"] == limit


def test_long_lines_are_neither_wrapped_nor_padded(models: ModelStore) -> None:
    vocabulary = Vocabulary("ab ")
    target = models.table_directory(successor_table([1, 2, 0]), vocabulary=vocabulary)
    words = ["generate", "-m", target, "-p", "a", "-n", 300, "--quiet"]
    for is_terminal in (False, True):
        run = mlxgen_here(*words, variables={"COLUMNS": "20"}, is_terminal=is_terminal)
        assert run.stdout == "b a" * 100 + "\n"


@pytest.mark.parametrize("options", [[], ["--json"], ["--quiet"], ["--logprobs", 2]])
def test_stdout_that_is_not_unicode_never_stops_a_run(saying: Any, options: list[object]) -> None:
    run = say(saying("é😀ok"), *options, encoding="ascii")
    assert run.code == 0
    text = run.out.decode("ascii")
    if options == ["--json"]:
        assert json.loads(text)["text"] == "é😀ok"
    else:
        assert text.startswith("??ok\n")


def test_strict_ascii_process_exits_0(saying: Any) -> None:
    words = ["generate", "-m", saying("é😀ok"), "-p", chr(START)]
    strict = {"PYTHONIOENCODING": "ascii:strict", "LC_ALL": "C", "PYTHONUTF8": "0"}
    run = mlxgen_process(*words, variables=strict)
    assert run.code == 0 and run.out.startswith(b"??ok\n")
    assert "Traceback" not in run.stderr


def test_control_characters_are_shown_as_escapes_on_a_terminal_only(saying: Any) -> None:
    text = "\x1b[31mR\x07\r\u009bK\t\n"
    target = saying(text)
    shown = say(target, "--quiet", is_terminal=True).stdout
    assert shown == "\\x1b[31mR\\x07\\x0d\\x9bK\t\n\n"
    assert say(target, "--quiet").stdout == text + "\n"


def test_log_probability_lines_on_a_terminal_hold_no_control_characters(saying: Any) -> None:
    run = say(saying("\u009b2\x1b"), "--logprobs", 2, is_terminal=True)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", run.stdout)


COLOUR, PLAIN = "\x1b[36m", "\x1b[0m"


def test_show_draft_colours_accepted_text_on_a_terminal(saying: Any) -> None:
    target = saying("abcdefgh")
    run = say(target, "--show-draft", "--num-draft-tokens", 3, "--quiet", is_terminal=True)
    # a, then the bonus token after three accepted ones, are the target's own.
    coloured = "".join(f"{COLOUR}{letter}{PLAIN}" for letter in "bcd")
    last = "".join(f"{COLOUR}{letter}{PLAIN}" for letter in "fgh")
    assert run.stdout == f"a{coloured}e{last}\n"
    assert "warning" not in run.stderr


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"is_terminal": True, "variables": {"NO_COLOR": "1"}},
        {"is_terminal": True, "variables": {"NO_COLOR": "yes"}},
    ],
)
def test_show_draft_without_colours_warns_and_prints_the_bare_text(
    saying: Any, how: dict[str, Any]
) -> None:
    run = say(saying("abcdefgh"), "--show-draft", "--quiet", **how)
    assert run.stdout == "abcdefgh\n"
    (warning,) = run.lines("warning: ", stream="stderr")
    assert "--show-draft" in warning


def test_without_show_draft_a_terminal_gets_no_colours(saying: Any) -> None:
    assert say(saying("abcdefgh"), "--quiet", is_terminal=True).out == b"abcdefgh\n"


def test_json_marks_the_draft_tokens_without_a_warning(saying: Any) -> None:
    run = say(saying("abcdefgh"), "--show-draft", "--json", "--num-draft-tokens", 3)
    assert run.document["speculative"]["from_draft"] == [0, 1, 1, 1, 0, 1, 1, 1]
    assert "warning" not in run.stderr


@pytest.fixture
def endless(models: ModelStore) -> Path:
    """A model whose text never ends by itself."""
    return models.table_directory(iid_table([0.0] * 26), vocabulary=Vocabulary.of_size(26))


def endlessly(target: Path, *options: object) -> list[str]:
    return command_line(
        *("generate", "-m", target, "--draft-model", target, "-p", "a", "-n", 10_000_000),
        *("--temp", 1, *options),
    )


def test_reader_that_closes_the_pipe_ends_the_run_quietly(endless: Path) -> None:
    with started(endlessly(endless)) as process:
        assert process.stdout is not None and process.stderr is not None
        assert len(process.stdout.read(1)) == 1
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(TIMEOUT_S) == 0, errors
    assert "Traceback" not in errors and "Broken pipe" not in errors and "error" not in errors


@pytest.mark.parametrize(("closing", "left"), [(">&-", b""), ("2>&-", b"abc\n")])
def test_closed_stream_gets_nothing_and_lends_nothing_to_the_other(
    saying: Any, closing: str, left: bytes
) -> None:
    words = ["generate", "-m", saying("abc"), "-p", chr(START), "--quiet"]
    run = mlxgen_process(*words, prefix=["sh", "-c", f'exec "$@" {closing}', "sh"])
    assert run.code == 0 and run.out == left and b"error" not in run.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that only Linux has")
def test_full_disk_is_one_line_and_exit_1(saying: Any) -> None:
    words = ["generate", "-m", saying("abc"), "-p", chr(START)]
    run = mlxgen_process(*words, prefix=["sh", "-c", 'exec "$@" >/dev/full', "sh"])
    assert run.code == 1 and "No space left on device" in run.error


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interruption_keeps_text_and_statistics(endless: Path, sent: signal.Signals) -> None:
    with started(endlessly(endless)) as process:
        assert process.stdout is not None and process.stderr is not None
        first = first_bytes(process, 20)
        process.send_signal(sent)
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    run = Outcome(process.returncode, first + output, errors)
    text, interrupted, generated, acceptance, *rest = run.stdout.split("\n")
    assert re.fullmatch("[a-z]{20,}", text)
    assert interrupted == "[Interrupted]"
    assert generated.startswith(f"[Generated {len(text)} tokens in ")
    assert acceptance.startswith(f"{ACCEPTANCE}rule=sampler-match rounds=") and rest == [""]
    assert "Traceback" not in run.stderr


def test_interruption_leaves_the_document_valid(endless: Path) -> None:
    words = endlessly(endless, "--json")
    with started(words, variables={"MLXGEN_LOG": "info"}) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stderr:
            if b"speculative acceptance rule active" in line:
                break
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=TIMEOUT_S)
    document = Outcome(process.returncode, output, errors).document
    assert process.returncode == 130
    assert document["finish_reason"] == "interrupted"
    assert document["generated_tokens"] == len(document["token_ids"]) == len(document["text"])
    assert "[Interrupted]" in document["lines"]


def test_interruption_before_the_text_begins_is_one_line(endless: Path) -> None:
    with started(endlessly(endless)) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"Loading model from")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert output == b"" or b"[Interrupted]" in output


def test_real_terminal_gets_escapes_and_colours(saying: Any) -> None:
    master, slave = pty.openpty()
    words = ["generate", "-m", saying("ok\x1b[5m"), "-p", chr(START), "-n", 20, "--show-draft"]
    words += ["--draft-model", saying("ok\x1b[5m"), "--quiet"]
    with started(command_line(*words), stdout=slave) as process:
        os.close(slave)
        shown = b""
        while select.select([master], [], [], TIMEOUT_S)[0]:
            try:
                data = os.read(master, 1000)
            except OSError:  # the other side is closed
                break
            shown += data
            if not data:
                break
        assert process.wait(TIMEOUT_S) == 0
    os.close(master)
    coloured = b"".join(b"\x1b[36m%s\x1b[0m" % part for part in (b"k", b"\\x1b", b"["))
    assert shown == b"o" + coloured + b"5" + b"\x1b[36mm\x1b[0m" + b"\r\n"
