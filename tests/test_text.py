"""Streamed text adds up to the decoding of all ids, and stop strings cut it where they should."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer

from mlxgen.models.default_pair import draft_directory
from mlxgen.text.stop import StopStrings
from mlxgen.text.stream import TextStream
from tests.fixtures.tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

TEXTS = [
    "plain text, ",
    "日本語",
    "é",
    "😀",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\r\n\n  ",
    "e\u0301",
    "\ufffd",
    "<|im_end|>",
    "\x1b[1m",
]
PIECES = ["▁", "▁▁", "▁a", "▁the", "b", "é", "日本", "\n", "\ufffd", "x\ufffd", "<0x4"]
# Tokens that end one character and begin the next, which no boundary between tokens respects.
STRADDLING = [
    *(bytes([byte]) for byte in range(256)),
    b"\x98\x80\xf0",
    b"\xa9\xf0\x9f",
    b"\x80\xff",
    b"\xf0\x9f\x98",
    b"a\xe2",
    b"\xac\xe2\x82",
]


@cache
def smollm2_tokenizer() -> Any:
    """The default pair's byte-level tokenizer, as the command loads it."""
    return load_tokenizer(draft_directory())


@cache
def llama_tokenizer() -> Any:
    return sentencepiece_tokenizer(PIECES)


@cache
def straddling_tokenizer() -> Any:
    return byte_level_tokenizer(STRADDLING)


def pieces_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What the stream returns for each id, and at the end."""
    stream = TextStream(tokenizer)
    return [*(stream.add(token) for token in ids), stream.finish()]


def whole(tokenizer: Any, ids: Sequence[int]) -> str:
    """The decoding of all ids at once."""
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def mixed(encode: Any, pool: st.SearchStrategy[int]) -> st.SearchStrategy[list[int]]:
    """Ids of texts, some cut off in the middle of a character, mixed with single ids."""
    spelled = st.sampled_from(TEXTS).map(encode)
    cut = st.tuples(spelled, st.integers(0, 12)).map(lambda pair: pair[0][: pair[1]])
    single = pool.map(lambda token: [token])
    parts = st.lists(st.one_of(spelled, cut, single), max_size=12)
    return parts.map(lambda found: [token for part in found for token in part])


@given(st.data())
def test_byte_level_stream_adds_up_to_the_decoding_of_all_ids(data: st.DataObject) -> None:
    tokenizer = smollm2_tokenizer()
    ids = data.draw(mixed(tokenizer.encode, st.integers(0, 49151)))
    assert "".join(pieces_of(tokenizer, ids)) == whole(tokenizer, ids)


@given(st.data())
def test_byte_fallback_stream_adds_up_to_the_decoding_of_all_ids(data: st.DataObject) -> None:
    tokenizer = llama_tokenizer()

    def encode(text: str) -> list[int]:
        return [3 + byte for byte in text.encode()]

    ids = data.draw(mixed(encode, st.integers(0, 3 + 256 + len(PIECES) - 1)))
    assert "".join(pieces_of(tokenizer, ids)) == whole(tokenizer, ids)


@given(st.lists(st.integers(0, len(STRADDLING) - 1), max_size=30))
@example([0x80] * 5 + [0xF0, 0x9F, 0x98, STRADDLING.index(b"\x80\xff")])
def test_stream_adds_up_when_tokens_straddle_characters(ids: list[int]) -> None:
    tokenizer = straddling_tokenizer()
    assert "".join(pieces_of(tokenizer, ids)) == whole(tokenizer, ids)


@given(st.lists(st.sampled_from([0x80, 0xE2, 0x82, 0xF0, 0x9F, 0x98, 0x41]), min_size=60))
def test_stream_adds_up_over_long_runs_of_broken_bytes(ids: list[int]) -> None:
    tokenizer = straddling_tokenizer()
    for repeated in (ids, ids * 4, [0x80] * 150 + ids):
        assert "".join(pieces_of(tokenizer, repeated)) == whole(tokenizer, repeated)


@given(st.text(max_size=20))
def test_byte_level_stream_holds_back_incomplete_characters_only(text: str) -> None:
    ids = list(text.encode())
    stream, decoder = TextStream(straddling_tokenizer()), codecs.getincrementaldecoder("utf-8")()
    for token in ids:
        complete = decoder.decode(bytes([token]))
        if "\ufffd" not in text:
            assert stream.add(token) == complete


def test_byte_fallback_stream_waits_for_the_run_of_bytes_to_end() -> None:
    tokenizer = llama_tokenizer()
    euro = [3 + byte for byte in "€".encode()]
    the, broken = tokenizer.convert_tokens_to_ids(["▁the", "<0xFF>"])
    assert pieces_of(tokenizer, [the, *euro, the]) == ["the", "", "", "", "€ the", ""]
    # One more byte unmakes the whole run, which text already shown could not follow.
    assert whole(tokenizer, [*euro, broken]) == "\ufffd" * 4
    assert pieces_of(tokenizer, [*euro, broken, the]) == ["", "", "", "", "\ufffd" * 4 + " the", ""]


def test_decoding_token_by_token_would_not_add_up() -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode("日本語 😀")
    assert "".join(tokenizer.decode([token]) for token in ids) != whole(tokenizer, ids)
    assert "".join(pieces_of(tokenizer, ids)) == "日本語 😀"


def test_finishing_twice_repeats_nothing() -> None:
    tokenizer = straddling_tokenizer()
    stream = TextStream(tokenizer)
    assert stream.add(0xE2) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_ids_without_a_token_have_no_text() -> None:
    tokenizer = straddling_tokenizer()
    unknown = len(STRADDLING) + 7
    assert pieces_of(tokenizer, [0x41, unknown, 0xC3, unknown, 0xA9]) == ["A", "", "", "", "é", ""]


def test_a_token_that_spells_a_byte_token_is_no_byte() -> None:
    tokenizer = byte_level_tokenizer([b"<0x41>", b"b"])
    assert pieces_of(tokenizer, [0, 1]) == ["<0x41>", "b", ""]


def reference(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], str | None]:
    """Text shown after each piece, looking at the whole text each time, and the stop found."""
    shown: list[str] = []
    text = ""
    for piece in pieces:
        text += piece
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        if found:
            start, stop = min(found)
            return [*shown, text[:start]], stop
        could_grow = [
            length
            for length in range(len(text) + 1)
            if any(text.endswith(stop[:length]) for stop in stops if length < len(stop))
        ]
        shown.append(text[: len(text) - max(could_grow, default=0)])
    return [*shown, text], None


stop_texts = st.text("ab", min_size=1, max_size=4)
piece_texts = st.lists(st.text("abc", max_size=4), max_size=12)


@given(piece_texts, st.lists(stop_texts, max_size=3))
def test_text_ends_before_the_stop_string_and_only_its_beginning_is_withheld(
    pieces: list[str], stops: list[str]
) -> None:
    expected, stop = reference(pieces, stops)
    strings, shown = StopStrings(stops), ""
    seen: list[str] = []
    for piece in pieces:
        shown += "".join(text for text, _ in strings.feed(piece, False))
        seen.append(shown)
        if strings.matched is not None:
            break
    if strings.matched is None:
        shown += "".join(text for text, _ in strings.flush())
        seen.append(shown)
    assert (seen, strings.matched) == (expected, stop)


@given(piece_texts, st.lists(stop_texts, max_size=3), st.lists(st.booleans(), min_size=12))
def test_characters_keep_the_mark_of_the_piece_they_came_in(
    pieces: list[str], stops: list[str], marks: list[bool]
) -> None:
    strings = StopStrings(stops)
    shown = [
        part
        for piece, mark in zip(pieces, marks, strict=False)
        for part in strings.feed(piece, mark)
    ]
    if strings.matched is None:
        shown += strings.flush()
    origins = [mark for piece, mark in zip(pieces, marks, strict=False) for _ in piece]
    assert all(text for text, _ in shown)
    kept = [mark for text, mark in shown for _ in text]
    assert kept == origins[: len(kept)]


def test_nothing_is_shown_after_a_stop_string() -> None:
    strings = StopStrings(["stop"])
    assert strings.feed("a stop sign", True) == [("a ", True)]
    assert strings.matched == "stop"
    assert strings.feed("more", False) == []


@pytest.mark.parametrize(
    ("stops", "matched", "shown"),
    [
        (["bc", "abcd"], "abcd", ""),
        (["ab", "abc"], "ab", ""),
        (["d", "bc"], "bc", "a"),
    ],
)
def test_of_stop_strings_that_one_piece_completes_the_first_to_start_wins(
    stops: list[str], matched: str, shown: str
) -> None:
    strings = StopStrings(stops)
    assert "".join(text for text, _ in strings.feed("abcd", False)) == shown
    assert strings.matched == matched


def test_of_stop_strings_in_several_pieces_the_first_completed_wins() -> None:
    strings = StopStrings(["bc", "abcd"])
    assert strings.feed("ab", False) == []
    assert strings.feed("c", False) == [("a", False)]
    assert strings.matched == "bc"
