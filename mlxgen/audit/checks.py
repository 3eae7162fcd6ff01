"""The checks that show, on a person's own two models, that speculation changes nothing.

Each check is a small experiment with a verdict. Parity checks compare ids with plain decoding;
theory checks compare the number of acceptances with the closed form of the rule that ran;
lock-step checks the caches after every round of every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from mlxgen.audit.parity import Difference, first_difference
from mlxgen.config import AcceptRule, GenerationConfig, SamplingConfig
from mlxgen.errors import PairError
from mlxgen.generation import Generation, generate
from mlxgen.models.loading import LoadedModel
from mlxgen.models.vocabulary import compare_vocabularies
from mlxgen.speculative.loop import Round
from mlxgen.speculative.theory_check import TheoryCheck
from mlxgen.text.prompt import encode_prompt

PATH_BY_PATH = (AcceptRule.SAMPLER_MATCH, AcceptRule.GUMBEL_MATCH)
BY_DISTRIBUTION = (AcceptRule.STOCHASTIC, AcceptRule.BLOCK)


@dataclass(frozen=True)
class CheckResult:
    """name: what was checked; detail: what was seen, for people; facts: the same for scripts."""

    name: str
    passed: bool
    detail: str
    facts: dict[str, Any] = field(default_factory=dict)


class _CacheWatch:
    """Counts rounds in which a cache length is not what the boundary invariant says."""

    def __init__(self) -> None:
        self.rounds = 0
        self.broken: list[str] = []
        self._text_tokens = 0

    def start(self, prompt_tokens: int) -> None:
        # The first token comes from the target alone, before any round.
        self._text_tokens = prompt_tokens + 1

    def see(self, done: Round) -> None:
        self.rounds += 1
        self._text_tokens += len(done.emitted)
        wanted = self._text_tokens - 1
        draft = (done.draft_cache_tokens or 0) + done.owed_tokens
        if not done.target_cache_tokens == draft == wanted or done.owed_tokens not in (0, 1):
            self.broken.append(
                f"round {self.rounds}: target {done.target_cache_tokens}, draft "
                f"{done.draft_cache_tokens} + {done.owed_tokens} owed, expected {wanted}"
            )


def run_checks(
    target: LoadedModel,
    draft: LoadedModel,
    prompts: list[str],
    config: GenerationConfig,
    progress: Callable[[str], None] = lambda message: None,
) -> Iterator[CheckResult]:
    """Run every check and yield its result as soon as it is known.

    config: temperature above 0 for the sampled checks; its diagnostics are turned on.
    """
    yield _vocabulary(target, draft)
    config = replace(config, speculation=replace(config.speculation, diagnostics=True))
    greedy = replace(config, sampling=SamplingConfig())
    encoded = [encode_prompt(target.tokenizer, prompt) for prompt in prompts]
    watch = _CacheWatch()

    def speculate(prompt_ids: list[int], settings: GenerationConfig) -> Generation:
        watch.start(len(prompt_ids))
        return generate(target, prompt_ids, settings, draft=draft, on_round=watch.see)

    progress("greedy decoding")
    plain = [generate(target, ids, greedy) for ids in encoded]
    runs = [speculate(ids, greedy) for ids in encoded]
    yield _parity("greedy parity", target, plain, runs, greedy)

    progress("plain sampling")
    plain = [generate(target, ids, config) for ids in encoded]
    theory: list[CheckResult] = []
    for rule in (*PATH_BY_PATH, *BY_DISTRIBUTION):
        progress(rule.value)
        settings = replace(config, speculation=replace(config.speculation, accept_rule=rule))
        runs = [speculate(ids, settings) for ids in encoded]
        if rule in PATH_BY_PATH:
            yield _parity(f"same-seed parity, {rule.value}", target, plain, runs, config)
        theory.append(_theory(rule, runs))
    yield from theory
    yield _lock_step(watch)


def _vocabulary(target: LoadedModel, draft: LoadedModel) -> CheckResult:
    try:
        notes = compare_vocabularies(target.vocabulary, draft.vocabulary)
    except PairError as error:
        return CheckResult("vocabulary", False, str(error))
    detail = f"{target.drawable_ids} ids stand for the same tokens"
    return CheckResult("vocabulary", True, "; ".join([detail, *notes]))


def _parity(
    name: str,
    target: LoadedModel,
    plain: list[Generation],
    speculative: list[Generation],
    config: GenerationConfig,
) -> CheckResult:
    compared = sum(len(run.tokens) for run in plain)
    differences = [
        difference
        for expected, found in zip(plain, speculative, strict=True)
        if (
            difference := first_difference(
                target, expected.prompt_ids, expected.token_ids, found.token_ids, config
            )
        )
    ]
    facts: dict[str, Any] = {
        "tokens": compared,
        "differences": [_difference_facts(difference) for difference in differences],
    }
    if not differences:
        return CheckResult(name, True, f"{compared} tokens equal plain decoding", facts)
    worst = max(differences, key=lambda difference: difference.margin_nats)
    detail = (
        f"step {worst.step}: {_shown(target, worst.expected)} became "
        f"{_shown(target, worst.found)}, top-2 margin {worst.margin_nats:.4f} nats"
    )
    is_tied = all(difference.is_tie for difference in differences)
    if is_tied:
        detail += " (a tie in this precision)"
    return CheckResult(name, is_tied, detail, facts)


def _difference_facts(difference: Difference) -> dict[str, Any]:
    return {
        "step": difference.step,
        "expected": difference.expected,
        "found": difference.found,
        "margin_nats": difference.margin_nats,
        "is_tie": difference.is_tie,
    }


def _shown(target: LoadedModel, token: int | None) -> str:
    return "the end" if token is None else repr(target.tokenizer.decode([token]))


def _theory(rule: AcceptRule, runs: list[Generation]) -> CheckResult:
    statistics = [run.statistics for run in runs if run.statistics is not None]
    total = TheoryCheck.combined([stats.check for stats in statistics])
    tested = sum(stats.positions_tested for stats in statistics)
    detail = (
        f"accepted {total.observed} of {tested} tested, theory expects {total.expected:.2f}: "
        f"z = {total.z + 0.0:.2f}"
    )
    facts = {
        "accepted": total.observed,
        "expected": total.expected,
        "positions_tested": tested,
        "z": total.z,
    }
    return CheckResult(f"theory, {rule.value}", total.is_consistent, detail, facts)


def _lock_step(watch: _CacheWatch) -> CheckResult:
    detail = f"both caches at the boundary after each of {watch.rounds} rounds"
    if watch.broken:
        detail = watch.broken[0]
    return CheckResult(
        "cache lock-step",
        not watch.broken,
        detail,
        {"rounds": watch.rounds, "broken": watch.broken},
    )


def device_name() -> str:
    """The device that the checks ran on."""
    return str(mx.default_device())
