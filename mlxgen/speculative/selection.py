"""Which acceptance rule runs: what was asked for, seen against the sampling and the drafter."""

from __future__ import annotations

from dataclasses import dataclass

from mlxgen.config import AcceptRule, SamplingConfig
from mlxgen.drafters.proposal import LengthPolicy


@dataclass(frozen=True)
class Rule:
    """id: stable, without spaces, what scripts grep for. label: for people.

    is_lossless: the text follows the target's distribution exactly. needs_distribution: the rule
    uses the drafter's q. couples_draws: the drafter draws with the target's noise. length_policy:
    the most that a drafter may decide under this rule.
    """

    id: str
    label: str
    is_lossless: bool = True
    needs_distribution: bool = False
    couples_draws: bool = False
    length_policy: LengthPolicy = LengthPolicy.VALUE


GREEDY_ARGMAX = Rule(
    "greedy-argmax", "greedy target: accept iff the draft is the target's most likely token"
)
SAMPLER_MATCH = Rule(
    "sampler-match", "sampler-match: accept iff the draft equals the target's own draw"
)
STOCHASTIC = Rule(
    "stochastic",
    "stochastic (modified rejection sampling)",
    needs_distribution=True,
    length_policy=LengthPolicy.PREFIX,
)
BLOCK = Rule(
    "block",
    "block (whole-block verification)",
    needs_distribution=True,
    length_policy=LengthPolicy.FIXED,
)
GUMBEL_MATCH = Rule(
    "gumbel-match",
    "gumbel-match: accept iff the draft equals the target's own draw, with shared Gumbel noise",
    couples_draws=True,
)
SAMPLER_MATCH_NO_PROPOSAL_DISTRIBUTION = Rule(
    "sampler-match-no-proposal-distribution",
    "sampler-match: a rule that needs q was asked for, but the drafter reports none",
)

_RULES = {
    AcceptRule.SAMPLER_MATCH: SAMPLER_MATCH,
    AcceptRule.STOCHASTIC: STOCHASTIC,
    AcceptRule.BLOCK: BLOCK,
    AcceptRule.GUMBEL_MATCH: GUMBEL_MATCH,
}


def acceptance_rule(
    requested: AcceptRule, sampling: SamplingConfig, reports_distribution: bool
) -> Rule:
    """The rule for a run. Greedy sampling comes first and wins over what was asked for."""
    if sampling.is_greedy:
        return GREEDY_ARGMAX
    rule = _RULES[requested]
    if rule.needs_distribution and not reports_distribution:
        return SAMPLER_MATCH_NO_PROPOSAL_DISTRIBUTION
    return rule
