"""Where a text ends: limit, end-of-sequence tokens, stop strings, in the order of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.command import Outcome, mlxgen_here
from tests.fixtures.model_directories import Vocabulary, successor_table, write_table_model
from tests.fixtures.runs import ModelStore

SYMBOLS = "abcdefghijklmnopqrst"
SPECIALS = ("<eos>", "<end>", "<also>")
VOCABULARY = Vocabulary(SYMBOLS, SPECIALS, eos="<eos>")
SIZE = len(VOCABULARY)
RUNS = [
    pytest.param([], id="plain"),
    pytest.param(["--num-draft-tokens", 1], id="k1"),
    pytest.param(["--num-draft-tokens", 3], id="k3"),
    pytest.param(["--num-draft-tokens", 8], id="k8"),
]
"""Without a draft, and with one that is always right, in blocks of several lengths."""


def alphabet_then(last: str, following: str) -> list[int]:
    """Successors: the alphabet, except that `last` is followed by another token."""
    successor = [(i + 1) % len(SYMBOLS) for i in range(len(SYMBOLS))] + [0] * len(SPECIALS)
    tokens = VOCABULARY.tokens
    successor[tokens.index(last)] = tokens.index(following)
    return successor


@pytest.fixture
def alphabet(models: ModelStore) -> Path:
    """Goes through the alphabet again and again."""
    return models.table_directory(successor_table(alphabet_then("t", "a")), vocabulary=VOCABULARY)


def generate(target: Path, draft_options: list[object], *more: object) -> Outcome:
    """A run of up to twelve tokens from the prompt "a"."""
    words: list[object] = ["generate", "-m", target, "-p", "a", "-n", 12]
    if draft_options:
        words += ["--draft-model", target, *draft_options]
    return mlxgen_here(*words, *more)


def document(target: Path, draft_options: list[object], *more: object) -> dict[str, Any]:
    return generate(target, draft_options, "--json", *more).document


def ending(found: dict[str, Any]) -> tuple[str, int, str, str | None]:
    """Text, number of tokens, finish reason and stop string."""
    assert found["generated_tokens"] == len(found["token_ids"])
    return found["text"], found["generated_tokens"], found["finish_reason"], found["stop_string"]


@pytest.mark.parametrize("draft_options", RUNS)
@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        # The token that completes a stop string counts; its text is cut.
        (["fg"], ("bcde", 6, "stop", "fg")),
        (["fgh"], ("bcde", 7, "stop", "fgh")),
        (["b"], ("", 1, "stop", "b")),
        (["fg", "e"], ("bcd", 4, "stop", "e")),
        (["efghi", "fg"], ("bcde", 6, "stop", "fg")),
        # What only begins like a stop string is printed in full.
        (["fx"], ("bcdefghijklm", 12, "length", None)),
        (["fgx", "gx", "mnopx"], ("bcdefghijklm", 12, "length", None)),
        (["zzz"], ("bcdefghijklm", 12, "length", None)),
        # Completed by the last token that the limit allows: the stop string wins.
        (["lm"], ("bcdefghijk", 12, "stop", "lm")),
        (["m"], ("bcdefghijkl", 12, "stop", "m")),
        # One token short of complete: the limit wins and the beginning is shown.
        (["mn"], ("bcdefghijklm", 12, "length", None)),
    ],
)
def test_text_ends_before_a_stop_string(
    alphabet: Path,
    draft_options: list[object],
    stops: list[str],
    expected: tuple[str, int, str, str | None],
) -> None:
    options = [word for stop in stops for word in ("--stop", stop)]
    assert ending(document(alphabet, draft_options, *options)) == expected


@pytest.mark.parametrize("draft_options", RUNS)
def test_printed_text_ends_where_the_document_says(
    alphabet: Path, draft_options: list[object]
) -> None:
    for stop in ("fg", "fx", "mn"):
        text = document(alphabet, draft_options, "--stop", stop)["text"]
        assert generate(alphabet, draft_options, "--stop", stop).text == text
        run = generate(alphabet, draft_options, "--stop", stop, "--quiet")
        assert run.stdout == text + "\n"


def test_nothing_behind_a_stop_string_is_counted_as_generated(alphabet: Path) -> None:
    found = document(alphabet, ["--num-draft-tokens", 8], "--stop", "cd")
    assert found["token_ids"] == [1, 2, 3]
    assert len(found["speculative"]["from_draft"]) == 3


@pytest.mark.parametrize("draft_options", RUNS)
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("ef", ("bcd", 5, "stop", "ef")),
        # "g" would need a token behind the end of sequence.
        ("fg", ("bcdef", 5, "stop", None)),
        ("f", ("bcde", 5, "stop", "f")),
    ],
)
def test_of_stop_string_and_end_of_sequence_the_first_in_the_text_wins(
    models: ModelStore,
    draft_options: list[object],
    stop: str,
    expected: tuple[str, int, str, str | None],
) -> None:
    target = models.table_directory(
        successor_table(alphabet_then("f", "<eos>")), vocabulary=VOCABULARY
    )
    assert ending(document(target, draft_options, "--stop", stop)) == expected


@pytest.mark.parametrize("draft_options", RUNS)
@pytest.mark.parametrize("limit", [4, 5, 6, 12])
def test_of_limit_and_end_of_sequence_the_first_in_the_text_wins(
    models: ModelStore, draft_options: list[object], limit: int
) -> None:
    target = models.table_directory(
        successor_table(alphabet_then("f", "<eos>")), vocabulary=VOCABULARY
    )
    found = document(target, draft_options, "-n", limit)
    # The end-of-sequence token would be the sixth: it takes no place in the budget of five.
    reason = "stop" if limit > 5 else "length"
    assert ending(found) == ("bcdef"[:limit], min(limit, 5), reason, None)
    assert VOCABULARY.tokens.index("<eos>") not in found["token_ids"]


def with_eos_from(directory: Path, source: str, token: str) -> Path:
    """A model that declares an end-of-sequence token in one place only."""
    token_id = VOCABULARY.tokens.index(token)
    vocabulary = Vocabulary(SYMBOLS, SPECIALS, eos=token if source == "tokenizer" else None)
    declared: dict[str, int | list[int]] = {"config": token_id, "config list": [0, token_id]}
    write_table_model(
        directory,
        successor_table(alphabet_then("d", token)),
        vocabulary=vocabulary,
        eos_token_id=declared.get(source),
    )
    if source.startswith("generation config"):
        value = [token_id, 0] if source.endswith("list") else token_id
        content = json.dumps({"eos_token_id": value})
        (directory / "generation_config.json").write_text(content, encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    ("source", "token"),
    [
        ("config", "<end>"),
        ("config", "h"),
        ("config list", "<end>"),
        ("generation config", "<also>"),
        ("generation config list", "<end>"),
        ("tokenizer", "<eos>"),
        ("tokenizer", "<end>"),
    ],
)
def test_end_of_sequence_ids_of_every_source_end_the_text(
    tmp_path: Path, source: str, token: str
) -> None:
    target = with_eos_from(tmp_path, source, token)
    for draft_options in ([], ["--num-draft-tokens", 3]):
        assert ending(document(target, draft_options)) == ("bcd", 3, "stop", None)


@pytest.mark.parametrize("draft_options", RUNS[::2])
@pytest.mark.parametrize("given", ["<also>", str(VOCABULARY.tokens.index("<also>"))])
def test_extra_end_of_sequence_token_is_given_by_text_or_id(
    models: ModelStore, draft_options: list[object], given: str
) -> None:
    target = models.table_directory(
        successor_table(alphabet_then("d", "<also>")), vocabulary=VOCABULARY
    )
    options = ["--extra-eos-token", given, "--extra-eos-token", "<end>"]
    assert ending(document(target, draft_options, *options)) == ("bcd", 3, "stop", None)
    without = document(target, draft_options)
    assert without["finish_reason"] == "length" and without["text"].startswith("bcd<also>a")


@pytest.mark.parametrize("draft_options", RUNS)
def test_ignoring_the_end_of_sequence_goes_on_to_the_limit(
    models: ModelStore, draft_options: list[object]
) -> None:
    target = models.table_directory(
        successor_table(alphabet_then("d", "<eos>")), vocabulary=VOCABULARY
    )
    options = ["--ignore-eos", "--extra-eos-token", "b"]
    found = document(target, draft_options, *options)
    assert ending(found) == ("bcd<eos>abcd<eos>abc", 12, "length", None)


@pytest.mark.parametrize("draft_options", RUNS)
def test_end_of_sequence_first_gives_an_empty_text(
    models: ModelStore, draft_options: list[object]
) -> None:
    target = models.table_directory(
        successor_table(alphabet_then("a", "<eos>")), vocabulary=VOCABULARY
    )
    found = document(target, draft_options)
    assert ending(found) == ("", 0, "stop", None)
    assert found["token_ids"] == []
    printed = generate(target, draft_options).stdout
    assert printed.startswith("\n[Generated 0 tokens in ")
    assert generate(target, draft_options, "--quiet").out == b"\n"


@pytest.mark.parametrize("draft_options", RUNS)
def test_unlimited_runs_until_the_end_of_sequence(
    models: ModelStore, draft_options: list[object]
) -> None:
    target = models.table_directory(
        successor_table(alphabet_then("t", "<eos>")), vocabulary=VOCABULARY
    )
    run = generate(target, draft_options, "--json", "-n", -1)
    assert ending(run.document) == (SYMBOLS[1:], len(SYMBOLS) - 1, "stop", None)
    (note,) = run.lines("Max tokens: ", stream="stderr")
    window = 1 << 20
    assert note == (
        f"Max tokens: unlimited (-1) -> {window - 1} (model context window {window}, prompt 1)"
    )


@pytest.mark.parametrize("draft_options", RUNS)
@pytest.mark.parametrize("given", [[], ["-n", "-1"], ["-n", "-7"], ["--max-tokens=-1"]])
def test_unlimited_ends_with_the_context_window(
    models: ModelStore, draft_options: list[object], given: list[str]
) -> None:
    target = models.table_directory(
        successor_table(alphabet_then("t", "a")),
        vocabulary=VOCABULARY,
        config={"max_position_embeddings": 30},
    )
    words: list[object] = ["generate", "-m", target, "-p", "abcdef", "--json", *given]
    if draft_options:
        words += ["--draft-model", target, *draft_options]
    found = mlxgen_here(*words).document
    assert found["generated_tokens"] == 24 and found["finish_reason"] == "length"


def test_prompt_longer_than_the_window_warns_and_gives_one_token(models: ModelStore) -> None:
    target = models.table_directory(
        successor_table(alphabet_then("t", "a")),
        vocabulary=VOCABULARY,
        config={"max_position_embeddings": 4},
    )
    run = mlxgen_here("generate", "-m", target, "-p", "abcdef", "--json")
    assert run.document["text"] == "g"
    (warning,) = run.lines("warning: ", stream="stderr")
    assert "6 tokens" in warning and "window 4" in warning
