"""Pairs whose tokenizers or heads differ: refused by name, or harmless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.command import mlxgen_here
from tests.fixtures.model_directories import SYMBOLS_64, Vocabulary
from tests.fixtures.runs import ModelStore

VOCABULARY = Vocabulary(SYMBOLS_64[:40], ("<eos>", "<pad>"), eos="<eos>")
RULES = ["sampler-match", "stochastic", "block", "gumbel-match"]


def document(target: Path, draft: Path | None, *more: object) -> dict[str, Any]:
    words: list[object] = ["generate", "-m", target, "-p", "abcd", "-n", 30, "--json", "--seed", 4]
    if draft is not None:
        words += ["--draft-model", draft]
    return mlxgen_here(*words, "--ignore-eos", *more).document


@pytest.mark.parametrize("position", [0, 17, 38])
def test_one_swapped_token_is_refused_naming_it(models: ModelStore, position: int) -> None:
    target = models.llama_directory(1, vocabulary=VOCABULARY)
    draft = models.llama_directory(1, vocabulary=VOCABULARY.swapped(position, position + 1))
    run = mlxgen_here("generate", "-m", target, "--draft-model", draft, "-p", "abcd")
    ours, theirs = VOCABULARY.symbols[position], VOCABULARY.symbols[position + 1]
    assert run.code == 2
    assert (
        f"the draft has another vocabulary: token {position} is {ours!r} in the target and "
        f"{theirs!r} in the draft"
    ) in run.error


def test_a_special_token_of_another_name_is_refused(models: ModelStore) -> None:
    target = models.llama_directory(1, vocabulary=VOCABULARY)
    other = Vocabulary(VOCABULARY.symbols, ("<end>", "<pad>"), eos="<end>")
    draft = models.llama_directory(1, vocabulary=other)
    run = mlxgen_here("generate", "-m", target, "--draft-model", draft, "-p", "abcd")
    assert run.code == 2 and "token 40 is '<eos>' in the target and '<end>'" in run.error


def test_the_wrong_vocabulary_is_refused_even_when_the_draft_is_not_asked(
    models: ModelStore,
) -> None:
    # A limit of one token needs no round, and a mistake is a mistake all the same.
    target = models.llama_directory(1, vocabulary=VOCABULARY)
    draft = models.llama_directory(1, vocabulary=VOCABULARY.swapped(0, 1))
    words = ["generate", "-m", target, "--draft-model", draft, "-p", "abcd", "-n", 1]
    assert mlxgen_here(*words).code == 2
    assert mlxgen_here(*words, "--num-draft-tokens", 0).code == 0


def test_metadata_alone_is_no_difference(models: ModelStore) -> None:
    target = models.llama_directory(1, vocabulary=VOCABULARY)
    other = Vocabulary(VOCABULARY.symbols, VOCABULARY.specials, bos="<pad>")
    draft = models.llama_directory(1, disturbance=0.1, vocabulary=other)
    assert document(target, draft)["token_ids"] == document(target, None)["token_ids"]


@pytest.mark.parametrize("rows", [(None, 58), (58, None), (58, 50), (None, 38)])
@pytest.mark.parametrize("options", [[], ["--temp", 1.5]])
def test_heads_of_other_widths_give_the_plain_ids(
    models: ModelStore, rows: tuple[int | None, int | None], options: list[object]
) -> None:
    target = models.llama_directory(1, head_scale=3.0, vocabulary=VOCABULARY, head_rows=rows[0])
    draft = models.llama_directory(1, head_scale=3.0, vocabulary=VOCABULARY, head_rows=rows[1])
    ids = document(target, None, *options)["token_ids"]
    assert max(ids) < len(VOCABULARY)
    for rule in ("sampler-match", "gumbel-match"):
        assert document(target, draft, *options, "--accept-rule", rule)["token_ids"] == ids


@pytest.mark.parametrize("rows", [(None, 58), (58, None), (58, 50), (None, 38), (38, None)])
@pytest.mark.parametrize("rule", RULES)
def test_padding_is_never_emitted_by_any_rule(
    models: ModelStore, rows: tuple[int | None, int | None], rule: str
) -> None:
    target = models.llama_directory(1, head_scale=3.0, vocabulary=VOCABULARY, head_rows=rows[0])
    draft = models.llama_directory(2, head_scale=3.0, vocabulary=VOCABULARY, head_rows=rows[1])
    found = document(target, draft, "--temp", 3, "--accept-rule", rule, "-n", 80)
    # With flat distributions a third of the ids would be padding if it could be drawn.
    assert max(found["token_ids"]) < min(len(VOCABULARY), rows[0] or len(VOCABULARY))
    assert found["speculative"]["rule"] == rule


@pytest.mark.parametrize("longer", ["target", "draft"])
def test_tokens_that_only_one_tokenizer_has_are_noted_and_harmless(
    models: ModelStore, longer: str
) -> None:
    small = Vocabulary(VOCABULARY.symbols, VOCABULARY.specials, eos="<eos>")
    large = Vocabulary(VOCABULARY.symbols, (*VOCABULARY.specials, "<new>"), eos="<eos>")
    ours, theirs = (large, small) if longer == "target" else (small, large)
    target = models.llama_directory(1, head_scale=3.0, vocabulary=ours)
    draft = models.llama_directory(2, head_scale=3.0, vocabulary=theirs)
    words = ["generate", "-m", target, "--draft-model", draft, "-p", "abcd", "-n", 40, "--json"]
    for rule in RULES:
        run = mlxgen_here(*words, "--temp", 3, "--ignore-eos", "--accept-rule", rule)
        assert max(run.ids) < len(ours)
        (note,) = run.lines("note: ", stream="stderr")
        assert f"the {longer}'s tokenizer has 1 more token than the other" in note
