"""`mlxgen verify`: passes on a right pair, and names the check when something really is broken.

Faults are put into the running program, one place each; the pair stays as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxgen.cache import caches as cache_ops
from mlxgen.cache.cached_model import CachedModel
from mlxgen.drafters.draft_model import DraftModel
from mlxgen.sampling import chain as chain_module
from mlxgen.sampling.chain import Draws
from mlxgen.sampling.target_draw import draw_by_position
from mlxgen.speculative.rules import BlockKeep, block_keep
from tests.fixtures.command import Outcome, mlxgen_here
from tests.fixtures.model_directories import FloatArray, Vocabulary
from tests.fixtures.runs import ModelStore

CHECKS = [
    "vocabulary",
    "greedy parity",
    "same-seed parity, sampler-match",
    "same-seed parity, gumbel-match",
    "theory, sampler-match",
    "theory, gumbel-match",
    "theory, stochastic",
    "theory, block",
    "cache lock-step",
]


@pytest.fixture
def pair(models: ModelStore) -> tuple[Path, Path]:
    """Two llamas of 64 tokens that agree now and then, with spread-out distributions."""
    target = models.llama_directory(1, head_scale=3.0)
    return target, models.llama_directory(1, head_scale=3.0, disturbance=0.2)


def verify(pair: tuple[Path, Path], *options: object) -> Outcome:
    """Verify a pair on a prompt that its tokenizer knows."""
    prompt = () if "-p" in options else ("-p", "abc")
    return mlxgen_here("verify", "-m", pair[0], "--draft-model", pair[1], *prompt, *options)


def failed_checks(pair: tuple[Path, Path], *options: object) -> list[str]:
    """Names of the checks that fail, as both the document and the last line give them."""
    outcome = verify(pair, "--json", *options)
    assert outcome.code in (0, 1), outcome.stderr
    document = document_of(outcome)
    failed = [check["name"] for check in document["checks"] if not check["passed"]]
    assert [check["name"] for check in document["checks"]] == CHECKS
    assert document["passed"] == (not failed) == (outcome.code == 0)
    last = outcome.lines("[Verify] ", stream="stderr")[-1]
    if failed:
        assert last == f"[Verify] failed: {len(failed)} of 9 checks ({', '.join(failed)})"
    else:
        assert last == "[Verify] passed: 9 checks"
    return failed


def document_of(outcome: Outcome) -> dict[str, Any]:
    """The document of a run that may have found faults."""
    return Outcome(0, outcome.out, outcome.err).document


def check_named(outcome: Outcome, name: str) -> dict[str, Any]:
    """One check of a document."""
    checks: list[dict[str, Any]] = document_of(outcome)["checks"]
    return next(check for check in checks if check["name"] == name)


# A right pair


def test_a_right_pair_passes(pair: tuple[Path, Path]) -> None:
    outcome = verify(pair)
    assert outcome.code == 0, outcome.stdout
    lines = outcome.stdout.splitlines()
    assert [line[:4] for line in lines[:-1]] == ["ok  "] * 9
    for line, name in zip(lines, CHECKS, strict=False):
        assert line[6:].startswith(name)
    assert lines[-1] == "[Verify] passed: 9 checks"
    assert "24 tokens equal plain decoding" in lines[1]
    assert "z = " in lines[-3]


def test_a_table_on_a_terminal(pair: tuple[Path, Path]) -> None:
    target, draft = pair
    arguments = ("verify", "-m", target, "--draft-model", draft, "-p", "abc", "-n", 6)
    outcome = mlxgen_here(*arguments, is_terminal=True, variables={"COLUMNS": "120"})
    assert outcome.code == 0
    assert "Check" in outcome.stdout and "What was seen" in outcome.stdout
    for name in CHECKS:
        assert name in outcome.stdout


def test_the_document_has_settings_and_facts(pair: tuple[Path, Path]) -> None:
    outcome = verify(pair, "--json", "-n", 16, "-t", 0.9, "--num-draft-tokens", 2, "--seed", 5)
    document = outcome.document
    assert document["passed"] is True
    assert document["models"] == {"target": str(pair[0]), "draft": str(pair[1])}
    assert document["temperature"] == 0.9 and document["num_draft_tokens"] == 2
    assert document["max_tokens"] == 16 and document["seed"] == 5
    assert document["device"] and 0 < document["seconds"] < 60
    by_name = {check["name"]: check for check in document["checks"]}
    assert by_name["greedy parity"]["tokens"] == 16
    assert by_name["greedy parity"]["differences"] == []
    theory = by_name["theory, stochastic"]
    assert theory["positions_tested"] > 0 and abs(theory["z"]) < 4.9
    assert 0 <= theory["accepted"] <= theory["positions_tested"]
    assert by_name["cache lock-step"]["rounds"] > 0


def test_several_prompts_are_all_run(pair: tuple[Path, Path]) -> None:
    document = verify(pair, "--json", "-n", 8, "-p", "abc", "-p", "xyz", "-p", "Q").document
    parity = next(check for check in document["checks"] if check["name"] == "greedy parity")
    assert parity["tokens"] == 24


def test_the_same_seed_repeats_the_document(pair: tuple[Path, Path]) -> None:
    def facts() -> dict[str, Any]:
        document = verify(pair, "--json", "-n", 12, "--seed", 9).document
        del document["seconds"]
        return document

    assert facts() == facts()


def test_a_target_as_its_own_draft_passes(pair: tuple[Path, Path]) -> None:
    assert failed_checks((pair[0], pair[0])) == []


def test_a_draft_that_never_agrees_passes(pair: tuple[Path, Path], models: ModelStore) -> None:
    assert failed_checks((pair[0], models.llama_directory(2, head_scale=20.0))) == []


# Faults


def test_a_target_cache_rewound_by_one_too_few(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count says one thing and the cache holds another: the text shows it."""
    right = cache_ops.rewind

    def one_too_few(caches: list[Any], length: int, role: str, **others: Any) -> Any:
        is_cut = role == "target" and any(cache.offset > length for cache in caches)
        return right(caches, length + 1 if is_cut else length, role, **others)

    monkeypatch.setattr("mlxgen.cache.cached_model.cache_ops.rewind", one_too_few)
    failed = failed_checks(pair)
    assert "greedy parity" in failed and "same-seed parity, sampler-match" in failed


def test_a_draft_cache_that_is_rewound_too_far(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs nothing but time, since what is owed is replayed; the lock-step shows it."""
    right = DraftModel.rewind

    def too_far(self: DraftModel, length: int) -> None:
        right(self, max(length - 2, 0))

    monkeypatch.setattr(DraftModel, "rewind", too_far)
    assert failed_checks(pair) == ["cache lock-step"]


def test_a_rule_that_accepts_everything(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxgen.speculative.rules.stochastic_hits", lambda p, q, uniforms: p >= 0)
    assert failed_checks(pair, "-n", 60) == ["theory, stochastic"]


def test_a_block_rule_that_keeps_too_much(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def generous(*rows: mx.array) -> BlockKeep:
        kept = block_keep(*rows)
        return kept._replace(keep=mx.ones_like(kept.keep))

    monkeypatch.setattr("mlxgen.speculative.rules.block_keep", generous)
    assert failed_checks(pair, "-n", 60) == ["theory, block"]


def test_a_draft_that_reports_another_q(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proposals are drawn from a row that is four times as sharp as the one that is reported."""
    right = chain_module.probabilities
    monkeypatch.setattr(
        "mlxgen.drafters.draft_model.probabilities", lambda weights: right(weights**0.25)
    )
    failed = failed_checks(pair, "-n", 120)
    assert {"theory, sampler-match", "theory, stochastic"} <= set(failed)
    assert not any("parity" in name or "lock-step" in name for name in failed)


def test_target_draws_keyed_by_another_position(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy text has no draws, and acceptance under a match rule does not depend on the key."""

    right: Any = draw_by_position

    def one_off(*arguments: Any) -> Draws:
        drawn: Draws = right(*arguments[:-1], arguments[-1] + 1)
        return drawn

    monkeypatch.setattr("mlxgen.speculative.verification.draw_by_position", one_off)
    failed = failed_checks(pair)
    assert "same-seed parity, sampler-match" in failed
    assert "same-seed parity, gumbel-match" in failed
    assert "greedy parity" not in failed
    outcome = verify(pair)
    assert outcome.code == 1
    assert "FAIL  same-seed parity, sampler-match" in outcome.stdout


# Low precision


NEAR_TIE, STEP = 0.0625, 0.125
"""Two logits of about 8 differ by one spacing of bfloat16 there, and rounding moves one by two."""


def tied_table(margin: float) -> FloatArray:
    """A walk 0, 1, 2, ... whose token after 3 is 4 by a margin over 0."""
    table = np.zeros((6, 6))
    table[np.arange(6), [1, 2, 3, 4, 5, 0]] = 8.0
    table[3, 0], table[3, 4] = 8.0, 8.0 + margin
    return table


def tied_pair(models: ModelStore, margin: float) -> tuple[Path, Path]:
    """The walk as its own draft."""
    directory = models.table_directory(tied_table(margin), vocabulary=Vocabulary.of_size(6))
    return directory, directory


def round_blocks(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    """A forward over several tokens rounds the logit of token 0 up, one over a single token not.

    The tables here are too small for products to round differently, so it is put in by hand.
    """
    right = CachedModel.forward

    def forward(self: CachedModel, ids: mx.array) -> mx.array:
        logits = right(self, ids)
        if self.role == "target" and ids.shape[0] > 1:
            logits = logits + mx.array([step, 0, 0, 0, 0, 0], dtype=logits.dtype)
        return logits

    monkeypatch.setattr(CachedModel, "forward", forward)


@pytest.fixture
def rounding_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks round as bfloat16 may."""
    round_blocks(monkeypatch, STEP)


@pytest.fixture
def in_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models keep the precision that they are stored in, also on a CPU; tables become bfloat16."""
    monkeypatch.setattr("mlxgen.models.loading._LARGEST_SHARE_OF_MEMORY", 0.0)
    right = CachedModel.forward
    monkeypatch.setattr(
        CachedModel, "forward", lambda self, ids: right(self, ids).astype(mx.bfloat16)
    )


def parity_of(outcome: Outcome) -> dict[str, Any]:
    """The greedy parity check of a document."""
    return check_named(outcome, "greedy parity")


@pytest.mark.usefixtures("in_own_precision", "rounding_of_blocks")
def test_a_tie_in_low_precision_is_reported_and_passes(models: ModelStore) -> None:
    """Step, both tokens and the margin between the two best."""
    pair = tied_pair(models, NEAR_TIE)
    outcome = verify(pair, "-p", "a", "--json", "-t", 0.05)
    check = parity_of(outcome)
    assert check["passed"], outcome.stderr
    (difference,) = check["differences"]
    # Prompt "a" is token 0; the tokens 1, 2, 3 come first.
    assert (difference["step"], difference["expected"], difference["found"]) == (3, 4, 0)
    assert difference["margin_nats"] == pytest.approx(NEAR_TIE)
    assert difference["is_tie"] is True
    assert check["detail"] == (
        "step 3: 'e' became 'a', top-2 margin 0.0625 nats (a tie in this precision)"
    )
    line = verify(pair, "-p", "a", "-t", 0.05).stdout.splitlines()[1]
    assert line.startswith("ok    greedy parity") and "step 3: 'e' became 'a'" in line


def test_a_tie_in_float32_is_a_hundred_times_closer(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_blocks(monkeypatch, 0.0008)
    check = parity_of(verify(tied_pair(models, 0.0004), "-p", "a", "--json", "-t", 0.05))
    assert check["passed"] and check["differences"][0]["is_tie"] is True


@pytest.mark.usefixtures("rounding_of_blocks")
def test_the_same_difference_in_float32_fails(models: ModelStore) -> None:
    outcome = verify(tied_pair(models, NEAR_TIE), "-p", "a", "--json", "-t", 0.05)
    check = parity_of(outcome)
    assert outcome.code == 1 and not check["passed"]
    (difference,) = check["differences"]
    assert (difference["step"], difference["expected"], difference["found"]) == (3, 4, 0)
    assert difference["is_tie"] is False
    assert "a tie" not in check["detail"]


@pytest.mark.usefixtures("in_own_precision")
def test_a_difference_that_no_rounding_explains_fails_in_low_precision(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A margin of 2 nats at logits of 8, where bfloat16 has steps of 1/16."""
    right = CachedModel.forward

    def forward(self: CachedModel, ids: mx.array) -> mx.array:
        logits = right(self, ids)
        if self.role == "target" and ids.shape[0] > 1:
            logits = logits + mx.array([4.0, 0, 0, 0, 0, 0], dtype=logits.dtype)
        return logits

    monkeypatch.setattr(CachedModel, "forward", forward)
    outcome = verify(tied_pair(models, 2.0), "-p", "a", "--json", "-t", 0.05)
    check = parity_of(outcome)
    assert outcome.code == 1 and not check["passed"]
    assert check["differences"][0]["margin_nats"] == pytest.approx(2.0)


@pytest.mark.slow
def test_a_pair_in_bfloat16_passes(models: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxgen.models.loading._LARGEST_SHARE_OF_MEMORY", 0.0)
    target = models.llama_directory(1, head_scale=3.0, dtype=mx.bfloat16)
    draft = models.llama_directory(2, head_scale=3.0, dtype=mx.bfloat16)
    outcome = verify((target, draft), "-n", 40)
    assert outcome.code == 0, outcome.stdout
    assert "computed in its own precision" in outcome.stderr


# Usage


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temp", 0), "--temp must be above 0"),
        (("--temp", -1), "--temp must be above 0"),
        (("--num-draft-tokens", 0), "--num-draft-tokens must be at least 1"),
        (("-n", 1), "--max-tokens must be at least 2"),
        (("--seed", 2**64), "--seed"),
        (("--seed", "x"), "--seed"),
        (("--revision", "main"), "--revision"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_bad_usage_is_one_line(
    pair: tuple[Path, Path], options: tuple[object, ...], message: str
) -> None:
    outcome = verify(pair, *options)
    assert outcome.code == 2
    assert message in outcome.error


def test_a_target_without_a_draft_is_refused_before_it_is_loaded(pair: tuple[Path, Path]) -> None:
    outcome = mlxgen_here("verify", "-m", pair[0])
    assert outcome.code == 2
    assert outcome.error == "verify needs --draft-model beside -m"
    assert "Loading" not in outcome.stderr


def test_no_model_and_no_default_pair(tmp_path: Path) -> None:
    outcome = mlxgen_here("verify", variables={"MLXGEN_CACHE": str(tmp_path)})
    assert outcome.code == 2
    assert "the default pair is not set up" in outcome.error


def test_a_pair_of_different_vocabularies_is_refused(
    pair: tuple[Path, Path], models: ModelStore
) -> None:
    swapped = models.llama_directory(1, head_scale=3.0, vocabulary=Vocabulary().swapped(3, 9))
    outcome = verify((pair[0], swapped))
    assert outcome.code == 2
    assert "'d'" in outcome.error or "'j'" in outcome.error


def test_an_empty_prompt_is_refused(pair: tuple[Path, Path]) -> None:
    outcome = verify(pair, "-p", "")
    assert outcome.code == 2
    assert "the prompt is empty" in outcome.error


# The default pair


@pytest.mark.slow
def test_the_default_pair_passes() -> None:
    """Everything as a user runs it; it says how long it took, which depends on the machine."""
    outcome = mlxgen_here("verify", "--json")
    assert outcome.code == 0, outcome.stderr
    document = outcome.document
    assert document["passed"] is True
    assert [check["name"] for check in document["checks"]] == CHECKS
    assert document["seconds"] > 0
