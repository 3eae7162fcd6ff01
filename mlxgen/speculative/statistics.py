"""What a speculative run counted, the same way on every rule."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxgen.speculative.selection import Rule


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


@dataclass
class SpeculativeAcceptanceStats:
    """Counters of one run; rates with a zero denominator are 0.

    rounds: target forwards that verified proposals. proposed: drafted tokens. positions_tested:
    proposals that were judged; a round's chain ends at its first rejection, or at an accepted end
    of sequence. accepted: proposals accepted, an end-of-sequence token included although it is not
    emitted. sum_min, sum_prod: closed forms summed over the tested positions, when diagnostics
    are on. residual_fallbacks: rejections with no residual mass, drawn from p.
    """

    rule: Rule
    diagnostics: bool = False
    rounds: int = 0
    proposed: int = 0
    positions_tested: int = 0
    accepted: int = 0
    sum_min: float = 0.0
    sum_prod: float = 0.0
    residual_fallbacks: int = 0
    tested_by_offset: list[int] = field(default_factory=list)
    accepted_by_offset: list[int] = field(default_factory=list)

    def record_round(
        self,
        *,
        proposed: int,
        tested: int,
        accepted: int,
        closed_forms: tuple[list[float], list[float]] | None = None,
        residual_fallback: bool = False,
    ) -> None:
        """Count a round. closed_forms: sum min and sum p q at each proposed position."""
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
        if closed_forms is not None:
            self.sum_min += sum(closed_forms[0][:tested])
            self.sum_prod += sum(closed_forms[1][:tested])

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
        return _ratio(self.sum_min, self.positions_tested)

    @property
    def closed_form_sum_prod(self) -> float:
        """Mean of sum p q over the tested positions."""
        return _ratio(self.sum_prod, self.positions_tested)
