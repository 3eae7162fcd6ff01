"""Which rule runs: what was asked for, the sampling, and whether the drafter reports q."""

from __future__ import annotations

import pytest

from mlxgen.config import AcceptRule, SamplingConfig
from mlxgen.speculative.selection import (
    GREEDY_ARGMAX,
    SAMPLER_MATCH,
    SAMPLER_MATCH_NO_PROPOSAL_DISTRIBUTION,
    STOCHASTIC,
    Rule,
    acceptance_rule,
)
from tests.fixtures.runs import ModelStore, ScriptedDrafter, Settings

SAMPLED = SamplingConfig(temperature=0.7)
GREEDY = (
    SamplingConfig(temperature=0.0),
    SamplingConfig(temperature=0.7, top_k=1),
    SamplingConfig(temperature=0.0, top_k=40, top_p=0.5),
)


@pytest.mark.parametrize("sampling", GREEDY)
@pytest.mark.parametrize("requested", AcceptRule)
@pytest.mark.parametrize("reports", [True, False])
def test_greedy_sampling_wins_over_every_request(
    sampling: SamplingConfig, requested: AcceptRule, reports: bool
) -> None:
    assert acceptance_rule(requested, sampling, reports) is GREEDY_ARGMAX


@pytest.mark.parametrize(
    ("requested", "reports", "expected"),
    [
        (AcceptRule.SAMPLER_MATCH, True, SAMPLER_MATCH),
        (AcceptRule.SAMPLER_MATCH, False, SAMPLER_MATCH),
        (AcceptRule.STOCHASTIC, True, STOCHASTIC),
        (AcceptRule.STOCHASTIC, False, SAMPLER_MATCH_NO_PROPOSAL_DISTRIBUTION),
    ],
)
@pytest.mark.parametrize("top_k", [0, 2])
def test_rule_follows_the_request_and_the_drafter(
    requested: AcceptRule, reports: bool, expected: Rule, top_k: int
) -> None:
    sampling = SamplingConfig(temperature=0.7, top_k=top_k)
    assert acceptance_rule(requested, sampling, reports) is expected


@pytest.mark.parametrize("sampling", [SAMPLED, *GREEDY])
@pytest.mark.parametrize("requested", AcceptRule)
@pytest.mark.parametrize("reports", [True, False])
def test_every_rule_is_lossless_and_has_an_id_that_scripts_can_grep(
    sampling: SamplingConfig, requested: AcceptRule, reports: bool
) -> None:
    rule = acceptance_rule(requested, sampling, reports)
    assert rule.is_lossless
    assert rule.id and " " not in rule.id and rule.label
    assert not rule.needs_distribution or reports


def test_ids_are_those_of_the_contract() -> None:
    rules = (GREEDY_ARGMAX, SAMPLER_MATCH, STOCHASTIC, SAMPLER_MATCH_NO_PROPOSAL_DISTRIBUTION)
    assert [rule.id for rule in rules] == [
        "greedy-argmax",
        "sampler-match",
        "stochastic",
        "sampler-match-no-proposal-distribution",
    ]


def test_default_rule_is_sampler_match() -> None:
    assert acceptance_rule(AcceptRule.SAMPLER_MATCH, SAMPLED, True).id == "sampler-match"
    assert Settings().rule is AcceptRule.SAMPLER_MATCH


@pytest.mark.parametrize("variable", ["1", "0", "nonsense"])
def test_the_rule_of_the_library_ignores_the_environment(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("MLXCEL_SPECULATIVE_STOCHASTIC_ACCEPT", variable)
    settings = Settings(sampling=SAMPLED)
    for rule in (AcceptRule.SAMPLER_MATCH, AcceptRule.STOCHASTIC):
        run = settings.but(rule=rule).speculative(models.llama(1), models.llama(2))
        run.ids(4)
        assert run.statistics.rule.id == rule.value


def test_drafter_without_a_distribution_falls_back_and_keeps_plain_ids(models: ModelStore) -> None:
    target = models.llama(1, head_scale=3.0)
    settings = Settings(sampling=SamplingConfig(temperature=0.9), rule=AcceptRule.STOCHASTIC)
    drafter = ScriptedDrafter(lambda text: (text[-1] + 1) % 64)
    run = settings.but(diagnostics=True).speculative(target, drafter)
    assert run.ids(40) == settings.plain_ids(target, 40)
    assert run.statistics.rule is SAMPLER_MATCH_NO_PROPOSAL_DISTRIBUTION
    assert run.statistics.rounds > 0
