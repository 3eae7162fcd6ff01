"""Prompt lookup, adaptive length, and what the loop owes to any drafter."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxgen.cache.cached_model import as_ids
from mlxgen.config import AcceptRule, PromptLookupConfig, SamplingConfig
from mlxgen.drafters.draft_model import DraftModel
from mlxgen.drafters.lookup_first import LookupFirst
from mlxgen.drafters.prompt_lookup import LookupGovernor, PromptLookup, find_continuation
from mlxgen.drafters.proposal import MODEL_DRAFTER, Drafter, Proposal
from mlxgen.sampling.history import History
from mlxgen.sampling.randomness import Randomness
from mlxgen.speculative.depth import AdaptiveDepth, DraftDepth, FixedDepth, TimedRound
from mlxgen.speculative.loop import SpeculativeGenerator
from tests.fixtures.runs import ModelStore, Settings
from tests.fixtures.statistics import softmax, transitions_follow

SAMPLED = SamplingConfig(temperature=0.9)
KINDS = ("auto", "lookup", "lookup first", "lookup first, auto")


class ScriptedDepth:
    """Choices by turn, 0 for plain stretches of three tokens."""

    plain_tokens = 3
    wants_split_costs = False

    def __init__(self, choices: list[int]) -> None:
        self._choices, self._turn = choices, 0

    def choose(self) -> int:
        return self._choices[self._turn % len(self._choices)]

    def record_plain(self, tokens: int, step_ms: float, is_steady: bool = True) -> None:
        self._turn += 1

    def record_round(self, timed: TimedRound) -> None:
        self._turn += 1

    def summary(self) -> None:
        return None


def run(
    settings: Settings,
    target: Any,
    draft: Any,
    kind: str,
    tokens: int,
    depth: DraftDepth | None = None,
    context_tokens: int | None = None,
) -> tuple[list[int], SpeculativeGenerator]:
    randomness = Randomness(settings.seed)
    lookup = PromptLookup(PromptLookupConfig(), settings.width)
    model = DraftModel(
        settings.cached(draft, "draft"),
        settings.chain(),
        randomness,
        context_tokens=context_tokens,
    )
    drafter: Drafter = model
    if kind.startswith("lookup"):
        drafter = LookupFirst(lookup, model) if "first" in kind else lookup
    if depth is None and "auto" in kind:
        depth = AdaptiveDepth()
    generator = SpeculativeGenerator(
        settings.cached(target, "target"),
        drafter,
        settings.chain(),
        randomness,
        num_draft_tokens=settings.k,
        depth=depth,
        accept_rule=settings.rule,
        diagnostics=settings.diagnostics,
        eos_ids=settings.eos_ids,
    )
    generator.prefill(list(settings.prompt))
    return [token.id for token in generator.tokens(tokens)], generator


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_ids_equal_plain_decoding(models: ModelStore, kind: str) -> None:
    settings = Settings(prompt=(3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4))
    target = models.llama(1)
    for draft in (models.llama(1), models.llama(2)):
        ids, _ = run(settings, target, draft, kind, 90)
        assert ids == settings.plain_ids(target, 90)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [AcceptRule.SAMPLER_MATCH, AcceptRule.GUMBEL_MATCH])
def test_match_rules_emit_the_ids_of_plain_decoding(
    models: ModelStore, kind: str, rule: AcceptRule
) -> None:
    sampling = SamplingConfig(
        temperature=0.9, top_p=0.95, repetition_penalty=1.1, xtc_probability=0.3
    )
    settings = Settings(prompt=(3, 1, 4, 1, 5, 3, 1), sampling=sampling, rule=rule)
    target, draft = models.llama(1), models.llama(2)
    ids, _ = run(settings, target, draft, kind, 90)
    assert ids == settings.plain_ids(target, 90)


@pytest.mark.parametrize("rule", list(AcceptRule))
def test_a_schedule_with_plain_stretches_keeps_full_acceptance_of_a_copy(
    models: ModelStore, rule: AcceptRule
) -> None:
    """The draft catches up on what was decoded without it before it drafts again."""
    sampling = SamplingConfig() if rule is AcceptRule.SAMPLER_MATCH else SAMPLED
    settings = Settings(sampling=sampling, rule=rule)
    model = models.llama(3)
    depth = ScriptedDepth([3, 0, 0, 3, 1, 0])
    _, generator = run(settings, model, model, "model", 80, depth=depth)
    stats = generator.statistics
    assert stats.rounds > 10
    # p and q are equal up to rounding, so under these rules nothing is rejected.
    assert stats.accepted == stats.positions_tested


def test_a_draft_past_its_context_window_stops_and_the_text_stays(models: ModelStore) -> None:
    settings = Settings()
    model = models.llama(1)
    ids, generator = run(settings, model, model, "model", 60, context_tokens=24)
    assert ids == settings.plain_ids(model, 60)
    assert 0 < generator.statistics.proposed < 24


def test_one_synchronisation_a_round_for_every_rule(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Diagnostics, penalties, bias and filters included. mx.eval is the only call that waits."""
    sampling = SamplingConfig(
        temperature=0.9,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        logit_bias=((3, -1.0),),
    )
    waits = 0
    evaluate = mx.eval

    def counted(*arrays: Any) -> None:
        nonlocal waits
        waits += 1
        evaluate(*arrays)

    for rule in AcceptRule:
        for chosen in (sampling, SamplingConfig()):
            settings = Settings(sampling=chosen, rule=rule, diagnostics=True)
            speculation = settings.speculative(models.llama(1), models.llama(2))
            monkeypatch.setattr(mx, "eval", counted)
            waits = 0
            speculation.ids(30)
            monkeypatch.setattr(mx, "eval", evaluate)
            # One for the first token; a last token without proposals may need one more.
            assert speculation.statistics.rounds <= waits <= speculation.statistics.rounds + 2


def test_tokens_of_a_round_come_after_the_next_round_was_dispatched(models: ModelStore) -> None:
    settings = Settings(k=3)
    model = models.llama(1)
    speculation = settings.speculative(model, model)
    tokens = speculation.generator.tokens(40)
    next(tokens)
    next(tokens)
    target, rounds = speculation.target, speculation.rounds
    assert len(rounds) == 1
    # The second round's block is in the cache before the first round's second token is taken.
    assert target.cached_tokens == rounds[0].target_cache_tokens + settings.k + 1
    tokens.close()
    assert target.cached_tokens == len(settings.prompt) + 1


class RecordedSteps(ScriptedDepth):
    """Stretches of plain_tokens, and what a step of each took."""

    def __init__(self, plain_tokens: int) -> None:
        super().__init__([0, 1])
        self.plain_tokens = plain_tokens
        self.step_ms: list[float] = []
        self.steady: list[bool] = []

    def record_plain(self, tokens: int, step_ms: float, is_steady: bool = True) -> None:
        super().record_plain(tokens, step_ms, is_steady)
        self.step_ms.append(step_ms)
        self.steady.append(is_steady)


@pytest.mark.parametrize(("plain_tokens", "tells_apart"), [(5, True), (3, False)])
def test_a_plain_step_costs_what_lies_between_two_tokens_within_a_stretch(
    models: ModelStore, plain_tokens: int, tells_apart: bool
) -> None:
    """Here the first token takes 50 ms, others 10 and the last none; a mean over the stretch, which
    is all that three tokens allow, takes all of them for alike."""
    settings = Settings()
    depth = RecordedSteps(plain_tokens)
    taken = 0

    def clock() -> float:
        return (40 * (taken > 0) + 10 * min(taken, plain_tokens - 1)) / 1e3

    model = models.llama(1)
    generator = SpeculativeGenerator(
        settings.cached(model, "target"),
        DraftModel(settings.cached(model, "draft"), settings.chain(), Randomness(1)),
        settings.chain(),
        Randomness(1),
        depth=depth,
        clock=clock,
    )
    generator.prefill(list(settings.prompt))
    for _ in generator.tokens(plain_tokens + 1):
        taken += 1
    assert (depth.step_ms[0] == pytest.approx(10)) is tells_apart
    assert depth.steady[0] is tells_apart


class RecordedRounds(FixedDepth):
    """Keeps what rounds cost, and whether that may be taken for the cost of others."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.costs: list[tuple[float, bool]] = []

    def record_round(self, timed: TimedRound) -> None:
        self.costs.append((timed.cost_ms, timed.is_steady))


class SlowHost(DraftModel):
    """The host takes 7 ms before it asks for a draft, and 1 ms to launch it."""

    clock_ms = 0.0

    def plan(self, history: History, k: int, limit: int) -> int:
        SlowHost.clock_ms += 7
        return super().plan(history, k, limit)

    def propose(
        self, history: History, k: int, *, want_distribution: bool, coupled: bool
    ) -> Proposal:
        SlowHost.clock_ms += 1
        return super().propose(history, k, want_distribution=want_distribution, coupled=coupled)


def test_a_round_costs_what_lies_between_the_ends_of_two_rounds(models: ModelStore) -> None:
    """Behind a plain step there is no such end, and it costs what lies behind its plan."""
    settings, depth = Settings(), RecordedRounds(2)
    model = models.llama(1)
    generator = SpeculativeGenerator(
        settings.cached(model, "target"),
        SlowHost(settings.cached(model, "draft"), settings.chain(), Randomness(1)),
        settings.chain(),
        Randomness(1),
        depth=depth,
        clock=lambda: SlowHost.clock_ms / 1e3,
    )
    generator.prefill(list(settings.prompt))
    for _ in generator.tokens(12):
        pass
    assert [cost for cost, _ in depth.costs[:3]] == pytest.approx([1, 8, 8])
    assert all(is_steady for _, is_steady in depth.costs)


def test_a_round_behind_one_of_another_drafter_is_not_taken_for_the_cost_of_rounds(
    models: ModelStore,
) -> None:
    """The draft model has to catch up with what lookup proposed; behind its own rounds and plain
    steps it does not, or the controller knows."""
    settings, depth = Settings(prompt=(1, 2, 3, 1, 2)), RecordedRounds(2)
    sources: list[str] = []

    class Watched(LookupFirst):
        def propose(
            self, history: History, k: int, *, want_distribution: bool, coupled: bool
        ) -> Proposal:
            sources.append(self.name)
            return super().propose(history, k, want_distribution=want_distribution, coupled=coupled)

    target, draft = models.llama(1), models.llama(2)
    randomness = Randomness(3)
    model = DraftModel(settings.cached(draft, "draft"), settings.chain(), randomness)
    generator = SpeculativeGenerator(
        settings.cached(target, "target"),
        Watched(PromptLookup(PromptLookupConfig(), settings.width), model),
        settings.chain(),
        randomness,
        depth=depth,
    )
    generator.prefill(list(settings.prompt))
    for _ in generator.tokens(200):
        pass
    pairs = list(pairwise([None, *sources]))
    expected = [before in (None, now) for before, now in pairs if now == MODEL_DRAFTER]
    assert not all(expected), "lookup proposed in between"
    assert [is_steady for _, is_steady in depth.costs] == expected


MARKOV_LOGITS = 1.6 * np.random.default_rng(11).standard_normal((5, 5))
FAR_LOGITS = 1.6 * np.random.default_rng(12).standard_normal((5, 5))


class JumpyCosts(AdaptiveDepth):
    """`auto` on a machine whose speed jumps about, so that it goes through many lengths."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = random.Random(4)

    def record_plain(self, tokens: int, step_ms: float, is_steady: bool = True) -> None:
        super().record_plain(tokens, self._generator.uniform(10, 20), is_steady)

    def record_round(self, timed: TimedRound) -> None:
        drafted_ms = timed.k * self._generator.uniform(0.01, 0.5)
        verified_ms = self._generator.uniform(8, 14)
        split = None if timed.draft_ms is None else drafted_ms
        super().record_round(replace(timed, cost_ms=drafted_ms + verified_ms, draft_ms=split))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "lookup", "lookup first", "lookup first, auto"])
@pytest.mark.parametrize("rule", list(AcceptRule))
def test_the_joint_law_of_the_text_is_the_targets(
    models: ModelStore, kind: str, rule: AcceptRule
) -> None:
    """1,500 tokens, each conditioned on the three before it; false alarms 1e-4 a case."""
    settings = Settings(
        prompt=(0, 1, 2), width=5, sampling=SamplingConfig(temperature=0.9), rule=rule, seed=21
    )
    target, draft = models.table(MARKOV_LOGITS), models.table(FAR_LOGITS)
    depth = JumpyCosts() if "auto" in kind else None
    ids, generator = run(settings, target, draft, kind, 1500, depth)
    assert generator.statistics.rounds > 50
    if depth is not None:
        assert len(depth.summary().rounds_by_k) >= 2, "several lengths were tried"
    laws = softmax(MARKOV_LOGITS / 0.9)
    assert transitions_follow(ids, laws, order=3)
    assert not transitions_follow(ids, softmax(MARKOV_LOGITS / 0.6)), "of another temperature"


@pytest.mark.slow
def test_the_joint_law_rejects_lookup_that_claims_another_distribution(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proposal found in the text was not drawn from a uniform q; saying so biases the text."""
    settings = Settings(
        prompt=(0, 1, 2),
        width=5,
        sampling=SamplingConfig(temperature=0.9),
        rule=AcceptRule.STOCHASTIC,
        seed=21,
    )
    monkeypatch.setattr(
        "mlxgen.drafters.prompt_lookup.one_hot",
        lambda ids, width: mx.full((len(ids), width), 1 / width),
    )
    target = models.table(MARKOV_LOGITS)
    ids, _ = run(settings, target, target, "lookup", 2500)
    assert not transitions_follow(ids, softmax(MARKOV_LOGITS / 0.9), order=3)


def naive_continuation(tokens: list[int], low: int, high: int, limit: int) -> list[int]:
    for size in range(high, low - 1, -1):
        if size >= len(tokens):
            continue
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size : start + size + limit]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 9),
)
def test_lookup_finds_the_most_recent_match_of_the_longest_ngram(
    tokens: list[int], low: int, extra: int, limit: int
) -> None:
    config = PromptLookupConfig(ngram_min=low, ngram_max=low + extra)
    found = find_continuation(as_ids(tokens), config, limit).tolist()
    assert found == naive_continuation(tokens, low, low + extra, limit)


def test_lookup_proposes_a_one_hot_distribution() -> None:
    lookup = PromptLookup(PromptLookupConfig(), 8)
    history = Settings(width=8).chain().new_history([1, 2, 3, 4, 1, 2, 3])
    assert lookup.plan(history, 3, 9) > 0
    proposal = lookup.propose(history, 3, want_distribution=True, coupled=False)
    assert proposal.ids.tolist() == [4, 1, 2]
    assert proposal.q is not None
    np.testing.assert_array_equal(np.array(proposal.q), np.eye(8)[[4, 1, 2]])


def test_the_governor_pauses_after_misses_and_opens_after_a_hit() -> None:
    governor = LookupGovernor(7)
    assert governor.width() < 7
    governor.record(3, 3)
    assert governor.width() == 7
    pauses = []
    for _ in range(3):
        for _ in range(2):
            governor.record(7, 0)
        pauses.append(0)
        while governor.width() == 0:
            pauses[-1] += 1
    assert pauses[0] > 0
    assert pauses == sorted(pauses)
    governor.record(3, 1)
    assert governor.width() > 0
