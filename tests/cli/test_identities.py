"""What must hold of every run: exact counts, the plain ids, a seed that replays it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.command import Outcome, mlxgen_here
from tests.fixtures.runs import ModelStore

RULES = ["sampler-match", "stochastic", "block", "gumbel-match"]
PATHWISE = ["sampler-match", "gumbel-match"]
"""The rules that emit the ids of plain decoding, path by path."""


@pytest.fixture
def target(models: ModelStore) -> Path:
    return models.llama_directory(1, head_scale=3.0)


@pytest.fixture(params=["always", "sometimes", "never"])
def draft(models: ModelStore, request: pytest.FixtureRequest) -> Path:
    """A draft that is the target, that was disturbed, and that is another model."""
    return {
        "always": models.llama_directory(1, head_scale=3.0),
        "sometimes": models.llama_directory(1, head_scale=3.0, disturbance=0.1),
        "never": models.llama_directory(2, head_scale=3.0),
    }[request.param]


def plain(target: Path, *more: object) -> Outcome:
    return mlxgen_here("generate", "-m", target, "-p", "some words", "--json", *more)


def speculative(target: Path, draft: Path, *more: object) -> Outcome:
    return plain(target, "--draft-model", draft, *more)


def assert_counts_add_up(document: dict[str, Any]) -> None:
    """The identities between the numbers of a document."""
    section = document["speculative"]
    generated = document["generated_tokens"]
    assert generated == len(document["token_ids"]) == len(section["from_draft"])
    assert generated == section["emitted_from_draft"] + section["emitted_from_target"]
    assert section["emitted_from_draft"] == sum(section["from_draft"]) <= section["accepted"]
    assert section["accepted"] <= section["positions_tested"] <= section["proposed"]
    assert section["accepted"] <= generated
    assert sum(section["tested_by_offset"]) == section["positions_tested"]
    assert sum(section["accepted_by_offset"]) == section["accepted"]
    accepted = section["accepted_by_offset"]
    assert accepted == sorted(accepted, reverse=True)
    for rate, numerator, denominator in (
        ("per_position_acceptance", "accepted", "positions_tested"),
        ("acceptance_rate", "accepted", "proposed"),
        ("mean_accepted_len", "accepted", "rounds"),
    ):
        expected = section[numerator] / section[denominator] if section[denominator] else 0
        assert section[rate] == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_greedy_runs_have_exactly_n_tokens_and_the_plain_ids(
    target: Path, draft: Path, k: int
) -> None:
    ids = plain(target, "-n", 6).ids
    assert len(ids) == 6
    for n in range(1, 7):
        document = speculative(target, draft, "-n", n, "--num-draft-tokens", k).document
        assert document["token_ids"] == ids[:n]
        assert document["generated_tokens"] == n and document["finish_reason"] == "length"
        assert_counts_add_up(document)


@pytest.mark.parametrize("k", [6, 8])
@pytest.mark.parametrize("n", [7, 12, 40])
def test_longer_greedy_runs_have_the_plain_ids_too(
    target: Path, draft: Path, k: int, n: int
) -> None:
    document = speculative(target, draft, "-n", n, "--num-draft-tokens", k).document
    assert document["token_ids"] == plain(target, "-n", n).ids
    assert document["speculative"]["rule"] == "greedy-argmax"
    assert_counts_add_up(document)


def test_the_three_drafts_agree_always_sometimes_and_never(models: ModelStore) -> None:
    target = models.llama_directory(1, head_scale=3.0)
    rates = [
        speculative(target, draft, "-n", 60).document["speculative"]["per_position_acceptance"]
        for draft in (
            target,
            models.llama_directory(1, head_scale=3.0, disturbance=0.1),
            models.llama_directory(2, head_scale=3.0),
        )
    ]
    assert rates[0] == 1 and 0.2 < rates[1] < 0.95 and rates[2] < 0.2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", [1, 4])
def test_same_seed_gives_the_same_ids_and_another_seed_others(
    target: Path, models: ModelStore, rule: str, k: int
) -> None:
    draft = models.llama_directory(1, head_scale=3.0, disturbance=0.1)
    options = ["-n", 25, "--temp", 1.2, "--accept-rule", rule, "--num-draft-tokens", k]
    first = speculative(target, draft, *options, "--seed", 7).document
    assert speculative(target, draft, *options, "--seed", 7).ids == first["token_ids"]
    assert speculative(target, draft, *options, "--seed", 8).ids != first["token_ids"]
    assert first["seed"] == 7 and first["speculative"]["rule"] == rule
    assert_counts_add_up(first)


@pytest.mark.parametrize("rule", PATHWISE)
@pytest.mark.parametrize("k", [1, 3, 7])
def test_match_rules_emit_the_plain_ids_of_the_seed_whatever_the_draft(
    target: Path, draft: Path, rule: str, k: int
) -> None:
    options = ["-n", 25, "--temp", 1.2, "--seed", 11]
    ids = plain(target, *options).ids
    more = ["--accept-rule", rule, "--num-draft-tokens", k]
    assert speculative(target, draft, *options, *more).ids == ids
    assert speculative(target, draft, *options, *more, "--accept-diag").ids == ids


def test_stochastic_emits_other_ids_than_plain_so_the_parity_above_says_something(
    target: Path, models: ModelStore
) -> None:
    draft = models.llama_directory(1, head_scale=3.0, disturbance=0.1)
    options = ["-n", 25, "--temp", 1.2, "--seed", 11]
    run = speculative(target, draft, *options, "--accept-rule", "stochastic")
    assert run.ids != plain(target, *options).ids


@pytest.mark.parametrize("rule", RULES)
def test_without_a_seed_runs_differ_and_the_reported_seed_replays_one(
    target: Path, models: ModelStore, rule: str
) -> None:
    # Two runs of 30 near-uniform draws over 64 tokens agree with a chance below 1e-20.
    draft = models.llama_directory(1, head_scale=3.0, disturbance=0.1)
    options = ["-n", 30, "--temp", 3, "--accept-rule", rule]
    runs = [speculative(target, draft, *options) for _ in range(2)]
    first, second = (run.document for run in runs)
    assert first["token_ids"] != second["token_ids"] and first["seed"] != second["seed"]
    for run in runs:
        seed = run.document["seed"]
        assert 0 <= seed < 2**64
        assert f"Seed: {seed}" in run.stderr.splitlines()
        assert speculative(target, draft, *options, "--seed", seed).ids == run.ids


def test_without_a_seed_and_without_json_the_seed_stands_on_stderr(target: Path) -> None:
    words = ["generate", "-m", target, "-p", "some words", "-n", 30, "--temp", 3]
    run = mlxgen_here(*words)
    (line,) = run.lines("Seed: ", stream="stderr")
    seed = re.fullmatch(r"Seed: (\d+)", line)
    assert seed is not None
    assert mlxgen_here(*words, "--seed", seed[1]).text == run.text


def test_greedy_run_mentions_no_seed(target: Path) -> None:
    assert plain(target, "-n", 2).lines("Seed", stream="stderr") == []


@pytest.mark.parametrize("rule", RULES)
def test_seeds_at_both_ends_of_their_range_work_and_differ(
    target: Path, models: ModelStore, rule: str
) -> None:
    draft = models.llama_directory(1, head_scale=3.0, disturbance=0.1)
    options = ["-n", 12, "--temp", 2, "--accept-rule", rule]
    seeds = [0, 1, 2**32, 2**64 - 1]
    texts = {tuple(speculative(target, draft, *options, "--seed", seed).ids) for seed in seeds}
    assert len(texts) == len(seeds)


def test_a_second_run_in_the_same_process_equals_the_first(target: Path, draft: Path) -> None:
    options = ["-n", 20, "--num-draft-tokens", 5]
    first, second = (speculative(target, draft, *options).document for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert first["speculative"] == second["speculative"]
