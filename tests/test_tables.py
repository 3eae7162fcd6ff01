"""Ids and positions are never looked up behind the end of a model's tables, whatever its config
says: MLX would read or write other memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import mlxgen
from mlxgen.errors import InputError, ModelError, PairError
from mlxgen.models.tables import position_rows, token_rows
from mlxgen.models.vocabulary import compare_vocabularies
from tests.fixtures.command import mlxgen_here
from tests.fixtures.model_directories import Vocabulary, write_llama, write_tokenizer
from tests.fixtures.model_families import FAMILIES, build, family_config, skeleton

POSITIONS = 24


def write_family(directory: Path, name: str, **changes: Any) -> Path:
    """A directory with a random model of a family and the usual 64 tokens."""
    directory.mkdir()
    weights: Any = dict(tree_flatten(build(name, changes=changes).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = json.dumps(family_config(name, changes))
    (directory / "config.json").write_text(config, encoding="utf-8")
    write_tokenizer(directory, Vocabulary())
    return directory


@pytest.fixture(scope="module", params=["gpt2", "gpt_bigcode"])
def learned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that looks its positions up in a table of 24."""
    directory = tmp_path_factory.mktemp("learned") / request.param
    return write_family(directory, request.param, n_positions=POSITIONS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that computes its positions."""
    return write_llama(tmp_path_factory.mktemp("llama"), 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_table_of_tokens_that_is_found(name: str) -> None:
    model = skeleton(name)
    assert token_rows(model) == 64
    assert position_rows(model) == (1024 if name in ("gpt2", "gpt_bigcode") else None)


def test_the_smallest_table_counts_unless_the_model_minds_it() -> None:
    smaller = {"vocab_size_per_layer_input": 40}
    assert token_rows(skeleton("gemma4_text", smaller)) == 40
    assert token_rows(skeleton("gemma3n", smaller)) == 64


def test_a_config_that_names_more_rows_than_there_are_is_not_believed(tmp_path: Path) -> None:
    """Two places of a config disagree: the model is built from one, a reader may see the other."""
    directory = write_family(tmp_path / "model", "mistral3")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["text_config"] = {**config, "model_type": "llama"}
    config["vocab_size"] = 10**6
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tokenizer(directory, Vocabulary(specials=("<a>", "<b>")))
    loaded = mlxgen.load(str(directory))
    assert loaded.checkpoint.vocabulary_rows == 10**6
    assert loaded.embedding_rows == loaded.drawable_ids == 64
    for prompt in ("a<b>", [65], [-1]):
        with pytest.raises(InputError, match="tokenizer and weights do not belong together"):
            mlxgen.generate(loaded, prompt, mlxgen.GenerationConfig(max_tokens=1))


@pytest.mark.parametrize("options", [[], ["-n", 500], ["-n", 500, "--temp", 1, "--seed", 3]])
@pytest.mark.parametrize("drafting", [[], ["--num-draft-tokens", 5], ["--prompt-lookup"]])
def test_a_text_ends_where_the_table_of_positions_does(
    learned: Path, options: list[object], drafting: list[object]
) -> None:
    draft = ["--draft-model", learned] if "--num-draft-tokens" in drafting else []
    words: list[object] = ["generate", "-m", learned, "-p", "abcabc", "--ignore-eos", "--json"]
    run = mlxgen_here(*words, *options, *draft, *drafting)
    assert len(run.ids) == POSITIONS - 6 and run.document["finish_reason"] == "length"
    assert run.ids == mlxgen_here(*words, *options).ids


@pytest.mark.parametrize("tokens", [POSITIONS, POSITIONS + 1, 10 * POSITIONS])
def test_a_prompt_that_the_table_of_positions_does_not_hold_is_refused(
    learned: Path, tokens: int
) -> None:
    run = mlxgen_here("generate", "-m", learned, "-p", "a" * tokens, "-n", 1)
    assert run.code == 2 and "shorten it" in run.error


def positions_read(target: Path, draft: Path, tokens: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Positions that a draft was asked for, of a run whose ids are those of plain decoding."""
    with_draft, alone = mlxgen.load(str(draft), role="draft"), mlxgen.load(str(target))
    forward: Any = type(with_draft.model).__call__
    longest = 0

    def watched(model: Any, ids: mx.array, cache: Any) -> Any:
        nonlocal longest
        longest = max(longest, cache[0].offset + ids.shape[1])
        assert longest <= POSITIONS
        return forward(model, ids, cache)

    monkeypatch.setattr(type(with_draft.model), "__call__", watched)
    config = mlxgen.GenerationConfig(max_tokens=40)
    plain = mlxgen.generate(alone, [5] * tokens, config)
    run = mlxgen.generate(alone, [5] * tokens, config, draft=with_draft)
    assert run.token_ids == plain.token_ids
    return longest


@pytest.mark.parametrize("tokens", [3, POSITIONS - 1, POSITIONS, POSITIONS + 30])
def test_a_draft_reads_nothing_behind_its_table_of_positions(
    llama: Path, learned: Path, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = positions_read(llama, learned, tokens, monkeypatch)
    assert (longest > 0) == (tokens < POSITIONS)


@pytest.mark.parametrize("tokens", [3, POSITIONS + 30])
def test_the_check_rejects_a_draft_that_trusts_its_config(
    llama: Path, learned: Path, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlxgen.LoadedModel, "position_rows", None)
    with pytest.raises(AssertionError):
        positions_read(llama, learned, tokens, monkeypatch)


@pytest.mark.parametrize("role", ["plain", "target", "draft"])
def test_a_model_that_writes_behind_its_logits_is_refused(
    llama: Path, tmp_path: Path, role: str
) -> None:
    """phi3small masks ids of its own vocabulary of 100,352."""
    small = write_family(tmp_path / "phi3small", "phi3small")
    target, draft = (llama, small) if role == "draft" else (small, llama)
    words: list[object] = ["generate", "-m", target, "-p", "ab", "-n", 3]
    run = mlxgen_here(*words, *([] if role == "plain" else ["--draft-model", draft]))
    assert run.code == 2 and "needs a vocabulary of more than 100351 tokens" in run.error
    with pytest.raises(ModelError, match="100351"):
        mlxgen.load(str(small))


def test_ids_that_lie_far_apart_are_compared_in_no_time() -> None:
    sparse = {"a": 0, "b": 7, "z": 2**32 - 1}
    assert compare_vocabularies(sparse, sparse) == []
    with pytest.raises(PairError, match="token 7 is 'b' in the target and missing"):
        compare_vocabularies(sparse, {"a": 0, "z": 2**32 - 1})
