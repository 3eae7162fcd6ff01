"""What a speculative run counted, the same way on every rule."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxgen.speculative import selection
from mlxgen.speculative.selection import Rule
from mlxgen.speculative.theory_check import TheoryCheck


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


@dataclass(frozen=True)
class RoundForms:
    """Closed forms of one round, at each proposed position: lists of k numbers.

    sum_min, sum_prod, gumbel: see `mlxgen.speculative.closed_forms`. block_survival: P(accepted
    length >= i), i = 1 .. k, if the block were judged by block verification.
    """

    sum_min: list[float]
    sum_prod: list[float]
    gumbel: list[float]
    block_survival: list[float]


@dataclass
class DrafterCounts:
    """What one of a run's drafters did."""

    rounds: int = 0
    proposed: int = 0
    positions_tested: int = 0
    accepted: int = 0


@dataclass
class SpeculativeAcceptanceStats:
    """Counters of one run; rates with a zero denominator are 0.

    rounds: target forwards that verified proposals. proposed: drafted tokens, up to the first end
    of sequence in a block. positions_tested:
    proposals that were judged; a chain ends at its first rejection, under `block` accepted + 1
    count when the block was cut. accepted: proposals accepted. An accepted end-of-sequence token
    counts although it is not emitted, and nothing behind it does. residual_fallbacks: rejections
    with no residual mass, drawn from p. check: the run against theory, when diagnostics are on.
    """

    rule: Rule
    diagnostics: bool = False
    rounds: int = 0
    proposed: int = 0
    positions_tested: int = 0
    accepted: int = 0
    residual_fallbacks: int = 0
    tested_by_offset: list[int] = field(default_factory=list)
    accepted_by_offset: list[int] = field(default_factory=list)
    by_drafter: dict[str, DrafterCounts] = field(default_factory=dict)
    check: TheoryCheck = field(default_factory=TheoryCheck)
    _sum_min: float = 0.0
    _sum_prod: float = 0.0
    _gumbel: float = 0.0
    _block_length: float = 0.0

    def record_round(
        self,
        *,
        source: str,
        proposed: int,
        tested: int,
        accepted: int,
        forms: RoundForms | None = None,
        residual_fallback: bool = False,
    ) -> None:
        """Count a round. source: the drafter; proposed: up to a drafted end of sequence."""
        counts = self.by_drafter.setdefault(source, DrafterCounts())
        counts.rounds += 1
        counts.proposed += proposed
        counts.positions_tested += tested
        counts.accepted += accepted
        self.rounds += 1
        self.proposed += proposed
        self.positions_tested += tested
        self.accepted += accepted
        self.residual_fallbacks += residual_fallback
        missing = tested - len(self.tested_by_offset)
        self.tested_by_offset.extend([0] * missing)
        self.accepted_by_offset.extend([0] * missing)
        for offset in range(tested):
            self.tested_by_offset[offset] += 1
            self.accepted_by_offset[offset] += offset < accepted
        if forms is not None:
            self._record_forms(forms, tested, accepted, proposed)

    def _record_forms(self, forms: RoundForms, tested: int, accepted: int, proposed: int) -> None:
        self._sum_min += sum(forms.sum_min[:tested])
        self._sum_prod += sum(forms.sum_prod[:tested])
        self._gumbel += sum(forms.gumbel[:tested])
        # A block's length stops counting at the end of sequence, which the drafted ids fix.
        survival = forms.block_survival[:proposed]
        self._block_length += sum(survival)
        if self.rule is selection.BLOCK:
            self.check.add_block(survival, accepted)
        else:
            self.check.add_positions(self._predicted(forms)[:tested], accepted)

    def _predicted(self, forms: RoundForms) -> list[float]:
        if self.rule is selection.STOCHASTIC:
            return forms.sum_min
        return forms.gumbel if self.rule is selection.GUMBEL_MATCH else forms.sum_prod

    @property
    def per_position_acceptance(self) -> float:
        """accepted / positions_tested, the rate that theory predicts."""
        return _ratio(self.accepted, self.positions_tested)

    @property
    def acceptance_rate(self) -> float:
        """accepted / proposed; it moves with the block length, so it compares nothing."""
        return _ratio(self.accepted, self.proposed)

    @property
    def mean_accepted_len(self) -> float:
        """accepted / rounds, the bonus token not counted."""
        return _ratio(self.accepted, self.rounds)

    @property
    def has_closed_forms(self) -> bool:
        """Whether there is a position with closed forms to report."""
        return self.diagnostics and self.positions_tested > 0

    @property
    def closed_form_sum_min(self) -> float:
        """Mean of sum min(p, q) over the tested positions."""
        return _ratio(self._sum_min, self.positions_tested)

    @property
    def closed_form_sum_prod(self) -> float:
        """Mean of sum p q over the tested positions."""
        return _ratio(self._sum_prod, self.positions_tested)

    @property
    def closed_form_gumbel(self) -> float:
        """Mean of the Gumbel form over the tested positions."""
        return _ratio(self._gumbel, self.positions_tested)

    @property
    def closed_form_block_len(self) -> float:
        """Mean over rounds of the accepted length that block verification expects."""
        return _ratio(self._block_length, self.rounds)
