"""The command's text follows the exact law of table models, and its statistics the closed forms.

Each chi-square statistic raises a false alarm with probability 1e-4 (`ALPHA`), each acceptance rate
with 6e-7 (5 sigma, two-sided). The seeds are fixed, so a run either always passes or never does.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scipy.stats import chi2

from mlxgen.speculative import rules
from tests.fixtures.command import mlxgen_here
from tests.fixtures.model_directories import FloatArray, iid_table
from tests.fixtures.runs import ModelStore
from tests.fixtures.statistics import (
    DISTRIBUTION_SAMPLES,
    chi_square,
    follows,
    softmax,
    threshold,
    transitions_follow,
)

TEMPERATURE = 0.7
P = np.array([0.42, 0.20, 0.14, 0.10, 0.08, 0.06])
Q = np.array([0.60, 0.12, 0.06, 0.12, 0.04, 0.06])
TARGET, DRAFT = TEMPERATURE * np.log(P), TEMPERATURE * np.log(Q)
SUM_MIN, SUM_PROD = float(np.minimum(P, Q).sum()), float((P * Q).sum())
GUMBEL = float((1 / np.maximum(P[None] / P[:, None], Q[None] / Q[:, None]).sum(axis=1)).sum())
CHAIN = np.random.default_rng(5).normal(scale=0.5, size=(6, 6))
CHAIN_DRAFT = CHAIN + np.random.default_rng(6).normal(scale=0.5, size=(6, 6))
PADDING_LOGIT = 50.0

ARMS = [
    pytest.param("stochastic", 4, 0.5, id="stochastic-4"),
    pytest.param("stochastic", 1, 0.5, id="stochastic-1"),
    pytest.param("sampler-match", 1, 0.25, id="sampler-match-1"),
    pytest.param("block", 4, 0.125, id="block-4"),
    pytest.param("gumbel-match", 4, 0.125, id="gumbel-match-4"),
]


@pytest.fixture
def pair(models: ModelStore) -> tuple[Path, Path]:
    """A target that draws from P at each position, and a draft that draws from Q."""
    return models.table_directory(iid_table(list(TARGET))), models.table_directory(
        iid_table(list(DRAFT))
    )


def generate(
    target: Path, draft: Path, rule: str, k: int, samples: int, *more: object
) -> dict[str, Any]:
    """The document of a run that ends at its limit. Seed 2 everywhere."""
    run = mlxgen_here(
        *("generate", "-m", target, "--draft-model", draft, "-p", "a", "-n", samples),
        *("--accept-rule", rule, "--num-draft-tokens", k, "--temp", TEMPERATURE),
        *("--seed", 2, "--ignore-eos", "--json", *more),
    )
    document = run.document
    assert document["generated_tokens"] == len(document["token_ids"]) == samples
    assert document["speculative"]["rule"] == rule
    return document


def assert_rate(accepted: int, tested: int, expected: float) -> None:
    """Within 5 sigma of what theory predicts."""
    sigma = math.sqrt(expected * (1 - expected) / tested)
    assert abs(accepted / tested - expected) < 5 * sigma, (accepted / tested, expected, sigma)


def test_the_threshold_is_that_of_alpha() -> None:
    assert threshold(5) == pytest.approx(25.7448, abs=1e-4)
    assert chi2.sf(25.7448, 5) == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "k", "share"), ARMS)
def test_text_follows_the_law_and_acceptance_its_closed_form(
    pair: tuple[Path, Path], rule: str, k: int, share: float
) -> None:
    document = generate(*pair, rule, k, int(share * DISTRIBUTION_SAMPLES))
    ids = document["token_ids"]
    assert follows(ids, P), chi_square(ids, P)
    assert transitions_follow(ids, np.tile(P, (6, 1)))
    section = document["speculative"]
    tested = section["positions_tested"]
    assert section["per_position_acceptance"] == section["accepted"] / tested
    closed_form = {"stochastic": SUM_MIN, "sampler-match": SUM_PROD, "gumbel-match": GUMBEL}
    if rule in closed_form:
        assert_rate(section["accepted"], tested, closed_form[rule])
    else:
        # A whole block is accepted no less far, on average, than position by position.
        by_position = sum(SUM_MIN**length for length in range(1, k + 1))
        noise = 5 * (k / 2) / math.sqrt(section["rounds"])  # a length in 0..k deviates by k/2
        assert section["mean_accepted_len"] > by_position - noise


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "k"), [("stochastic", 4), ("sampler-match", 1)])
def test_pairs_of_tokens_follow_the_law_of_a_chain(models: ModelStore, rule: str, k: int) -> None:
    target, draft = models.table_directory(CHAIN), models.table_directory(CHAIN_DRAFT)
    document = generate(target, draft, rule, k, DISTRIBUTION_SAMPLES // 6)
    text = [0, *document["token_ids"]]
    assert transitions_follow(text, softmax(CHAIN / TEMPERATURE))
    assert not transitions_follow(text, softmax(CHAIN_DRAFT / TEMPERATURE))


@pytest.mark.parametrize("rule", ["stochastic", "sampler-match", "block", "gumbel-match"])
def test_diagnostics_report_the_closed_forms_of_the_tables(
    pair: tuple[Path, Path], rule: str
) -> None:
    section = generate(*pair, rule, 2, 100, "--accept-diag")["speculative"]
    assert section["closed_form_sum_min"] == pytest.approx(SUM_MIN, abs=1e-5)
    assert section["closed_form_sum_prod"] == pytest.approx(SUM_PROD, abs=1e-5)
    assert section["closed_form_gumbel"] == pytest.approx(GUMBEL, abs=1e-5)
    assert section["closed_form_sum_min"] >= section["closed_form_sum_prod"]
    assert section["check"]["verdict"] == "consistent"
    tested, expected = section["positions_tested"], section["check"]["expected"]
    closed_form = {"stochastic": SUM_MIN, "sampler-match": SUM_PROD, "gumbel-match": GUMBEL}
    if rule in closed_form:
        assert expected == pytest.approx(tested * closed_form[rule], rel=1e-4)


@pytest.mark.slow
def test_resampling_from_the_target_instead_of_the_residual_is_rejected(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_residual(p: mx.array, *_: object) -> tuple[mx.array, mx.array]:
        return p, mx.array(False)

    monkeypatch.setattr(rules, "residual_weights", no_residual)
    ids = generate(*pair, "stochastic", 4, DISTRIBUTION_SAMPLES // 8)["token_ids"]
    assert not follows(ids, P)


def top_two(law: FloatArray) -> set[int]:
    return set(np.argsort(law)[-2:].tolist())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "samples"),
    [("stochastic", 1500), ("sampler-match", 150), ("block", 150), ("gumbel-match", 150)],
)
def test_no_token_outside_the_targets_top_two(
    models: ModelStore, pair: tuple[Path, Path], rule: str, samples: int
) -> None:
    # The draft's own top two are 0 and 5: it keeps proposing a token that the target excludes.
    law = np.array([0.5, 0.05, 0.05, 0.05, 0.05, 0.3])
    draft = models.table_directory(iid_table(list(TEMPERATURE * np.log(law))))
    assert top_two(law) == {0, 5} and top_two(P) == {0, 1}
    document = generate(pair[0], draft, rule, 2, samples, "--top-k", 2)
    assert set(document["token_ids"]) == {0, 1}
    assert document["speculative"]["accepted"] < document["speculative"]["positions_tested"]


@pytest.mark.parametrize("padded", ["target", "draft", "both"])
@pytest.mark.parametrize("rule", ["stochastic", "sampler-match"])
def test_padding_is_never_emitted_and_changes_no_law(
    models: ModelStore, padded: str, rule: str
) -> None:
    uncut = softmax(np.array([*TARGET, *[PADDING_LOGIT] * 10]) / TEMPERATURE)
    assert uncut[:6].sum() < 1e-20
    pad = {"head_rows": 16, "padding_logit": PADDING_LOGIT}
    target_pad, draft_pad = (
        pad if padded in (which, "both") else {} for which in ("target", "draft")
    )
    target = models.table_directory(iid_table(list(TARGET)), **target_pad)
    draft = models.table_directory(iid_table(list(DRAFT)), **draft_pad)
    document = generate(target, draft, rule, 3, 200)
    assert follows(document["token_ids"], P)
    section = document["speculative"]
    expected = SUM_MIN if rule == "stochastic" else SUM_PROD
    assert_rate(section["accepted"], section["positions_tested"], expected)
