"""Arms: what their specs mean, and which are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxgen.config import AcceptRule, GenerationConfig, SamplingConfig, SpeculationConfig
from mlxgen.errors import OptionError
from mlxgen.experiment.arms import DEFAULT_ARMS, Arm, parse_arms

BASE = GenerationConfig(
    sampling=SamplingConfig(temperature=0.7),
    speculation=SpeculationConfig(num_draft_tokens=3),
    max_tokens=64,
)
GREEDY = replace(BASE, sampling=SamplingConfig())


def one(spec: str, *, base: GenerationConfig = BASE, has_draft: bool = True) -> Arm:
    (arm,) = parse_arms(None, [spec], base, has_draft=has_draft)
    return arm


def test_every_rule_runs_where_nothing_is_said() -> None:
    arms = parse_arms(None, [], BASE, has_draft=True)
    assert tuple(arm.name for arm in arms) == DEFAULT_ARMS
    assert {arm.config.speculation.accept_rule for arm in arms[1:]} == set(AcceptRule)
    assert [arm.speculates for arm in arms] == [False, True, True, True, True]


def test_a_list_comes_first_and_specs_follow() -> None:
    arms = parse_arms("block, plain", ["stochastic,k=8"], BASE, has_draft=True)
    assert [arm.name for arm in arms] == ["block", "plain", "stochastic,k=8"]


def test_a_spec_sets_what_it_says_and_leaves_the_rest() -> None:
    arm = one("stochastic, k=8, temp=1.0, top-p=0.9, top-k=40, min-p=0.05, draft-temp=0.5, lookup")
    sampling, speculation = arm.config.sampling, arm.config.speculation
    assert arm.name == "stochastic,k=8,temp=1.0,top-p=0.9,top-k=40,min-p=0.05,draft-temp=0.5,lookup"
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.9, 40)
    assert sampling.min_p == 0.05
    assert speculation.accept_rule is AcceptRule.STOCHASTIC
    assert (speculation.num_draft_tokens, speculation.draft_temperature) == (8, 0.5)
    assert speculation.prompt_lookup is not None and not speculation.diagnostics
    assert arm.config.max_tokens == 64
    assert one("stochastic").config.sampling == BASE.sampling


def test_auto_and_lookup_alone() -> None:
    assert one("block,k=auto").config.speculation.adapts_depth
    base = replace(BASE, speculation=SpeculationConfig(adapts_depth=True))
    assert not one("block,k=2", base=base).config.speculation.adapts_depth
    alone = one("sampler-match,lookup,k=0", has_draft=False)
    assert alone.speculates and not alone.needs_draft


def test_plain_has_sampling_of_its_own_but_no_draft() -> None:
    arm = one("plain,temp=1.3", has_draft=False)
    assert arm.config.sampling.temperature == 1.3
    assert not arm.needs_draft and not arm.config.speculation.drafts_with_model


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("typical", "arm 'typical': 'typical' is no rule; it takes plain, sampler-match"),
        ("", "'' is no rule"),
        ("k=8", "'k=8' is no rule"),
        ("stochastic,depth=8", "'depth=8' is not known; it takes k=, temp=, top-p="),
        ("stochastic,block", "'block' is not known"),
        ("stochastic,", "'' is not known"),
        ("stochastic,k", "k needs a value"),
        ("stochastic,k=", "k needs a value"),
        ("stochastic,k=many", "k must be a whole number or auto, not 'many'"),
        ("stochastic,k=-1", "--num-draft-tokens must be between 0 and"),
        ("stochastic,k=0", "k=0 proposes nothing; add lookup, or take plain"),
        ("stochastic,k=2,k=3", "sets k twice"),
        ("stochastic,temp=hot", "temp must be a number, not 'hot'"),
        ("stochastic,temp=nan", "--temp must be a finite number"),
        ("stochastic,top-k=1.5", "top-k must be a whole number, not '1.5'"),
        ("stochastic,top-p=2", "--top-p must be between 0 and 1"),
        ("stochastic,draft-temp=-1", "--draft-temp must be a finite number"),
        ("stochastic,temp=0,draft-temp=1", "--draft-temp above 0 does nothing"),
        ("plain,k=3", "k means nothing without a draft"),
        ("plain,lookup", "lookup means nothing without a draft"),
        ("plain,draft-temp=1", "draft-temp means nothing without a draft"),
    ],
)
def test_a_bad_spec_is_refused_by_name(spec: str, message: str) -> None:
    with pytest.raises(OptionError, match=r"^arm ") as caught:
        one(spec)
    assert message in str(caught.value) and repr(spec)[1:-1] in str(caught.value)


@pytest.mark.parametrize(
    ("listed", "specs", "message"),
    [
        ("plain,typical", [], "--arms does not know 'typical'"),
        ("stochastic,k=8", [], "settings belong to --arm"),
        ("", [], "--arms does not know ''"),
        ("plain,block,plain", [], "arm 'plain' is there twice"),
        ("block", ["block"], "arm 'block' is there twice"),
        (
            "stochastic",
            ["stochastic,k=3"],
            "'stochastic' and 'stochastic,k=3' are one and the same",
        ),
        (None, ["block,k=4,temp=1", "block,temp=1.0,k=4"], "one and the same"),
        (None, ["block,draft-temp=0.7", "block"], "one and the same"),
        (None, ["plain", "plain,temp=0.7"], "one and the same"),
        (None, ["block,name=a", "stochastic,name=a"], "arm 'a' is there twice"),
    ],
)
def test_unknown_and_repeated_arms_are_refused(
    listed: str | None, specs: list[str], message: str
) -> None:
    with pytest.raises(OptionError) as caught:
        parse_arms(listed, specs, BASE, has_draft=True)
    assert message in str(caught.value)


def test_at_temperature_0_all_rules_are_one() -> None:
    with pytest.raises(OptionError, match="at temperature 0 all rules are one and the same"):
        parse_arms("plain,sampler-match,block", [], GREEDY, has_draft=True)
    assert len(parse_arms("plain,block", ["block,k=2"], GREEDY, has_draft=True)) == 3


def test_a_name_of_its_own_makes_a_second_arm_of_the_same() -> None:
    arms = parse_arms("stochastic", ["stochastic,name=again"], BASE, has_draft=True)
    assert [arm.name for arm in arms] == ["stochastic", "again"]
    assert arms[0].config == arms[1].config


def test_arms_that_need_a_draft_model_are_refused_without_one() -> None:
    for listed, specs in ((None, []), ("block", []), (None, ["block,lookup"])):
        with pytest.raises(OptionError, match="needs --draft-model, or lookup with k=0"):
            parse_arms(listed, specs, BASE, has_draft=False)
