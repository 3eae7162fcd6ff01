"""Which acceptance rule runs: what was asked for, seen against the sampling and the drafter."""

from __future__ import annotations

from dataclasses import dataclass

from mlxgen.config import AcceptRule, SamplingConfig


@dataclass(frozen=True)
class Rule:
    """id: stable, without spaces, what scripts grep for. label: for people.

    is_lossless: the text follows the target's distribution exactly. needs_distribution: the rule
    uses the drafter's q.
    """

    id: str
    label: str
    is_lossless: bool = True
    needs_distribution: bool = False


GREEDY_ARGMAX = Rule(
    "greedy-argmax", "greedy target: accept iff the draft is the target's most likely token"
)
SAMPLER_MATCH = Rule(
    "sampler-match", "sampler-match: accept iff the draft equals the target's own draw"
)
STOCHASTIC = Rule("stochastic", "stochastic (modified rejection sampling)", needs_distribution=True)
SAMPLER_MATCH_NO_PROPOSAL_DISTRIBUTION = Rule(
    "sampler-match-no-proposal-distribution",
    "sampler-match: a rule that needs q was asked for, but the drafter reports none",
)


def acceptance_rule(
    requested: AcceptRule, sampling: SamplingConfig, reports_distribution: bool
) -> Rule:
    """The rule for a run. Greedy sampling comes first and wins over what was asked for."""
    if sampling.is_greedy:
        return GREEDY_ARGMAX
    if requested is AcceptRule.STOCHASTIC:
        return STOCHASTIC if reports_distribution else SAMPLER_MATCH_NO_PROPOSAL_DISTRIBUTION
    return SAMPLER_MATCH
