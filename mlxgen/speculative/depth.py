"""How many tokens to draft in the next round: a fixed number, or what measured costs say pays.

A round of k proposals costs k draft steps and one verification of width k + 1, and emits
1 + sum_{i<=k} prod_{j<=i} a_j tokens on average, where a_j is the acceptance at position j given
that the chain got there (Leviathan et al. 2023, section 3.5, by position and with measured costs).
The best k maximises tokens per second; 0 is plain decoding. The choice looks at past rounds only,
so it is lossless under every rule, `block` included.

Where plain decoding is the best, the rounds that find it so are lost time. So it probes only while
the better ends of what it knows would pay (see `estimates`), and decodes plainly behind a probe
until what that lost is a hundredth of the time.

A machine changes its pace from second to second, when other work comes and goes, by as much as is
at stake between two lengths. That slows all forwards alike, so costs are kept relative to the pace
at which they were measured, and a length tried a while ago is compared fairly with the present one.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from mlxgen.speculative.estimates import (
    KNOWN_FIRST_USE_EXCESS,
    Acceptance,
    Cost,
    cost_on_line,
    mean_tokens,
)

MAX_DEPTH_TOKENS = 8
_MEASURED_STEPS = 6
_PACE_SAMPLES = 7
_PACE_RATE = 0.3
_FIRST_USE_EXCESS = 2.0
_PATIENCE_ROUNDS = 4.0
_SECOND_LOOK_ROUNDS = 128
_TRIAL_GAIN = 1.05
_FIRST_TRIAL_ROUNDS = 24
_LAST_TRIAL_ROUNDS = 768
_PRIOR_ACCEPTANCE = 0.7
_SWITCH_GAIN = 1.02
_FIRST_PROBE_ROUNDS = 32
_PROBE_ROUNDS = 4
_JUDGED_ROUNDS = 2
_PROBING_SHARE = 0.01
_CHANGING_OVER_STEPS = 0.5
_SHORTEST_PAUSE_TOKENS = 4
_LONGEST_PAUSE_TOKENS = 1024
_CHECKED_GAIN = 1.15
_TIMED_AGAIN_ROUNDS = (16, 64, 256)
_LONGEST_UNCHECKED_ROUNDS = 512
_FIRST_CHECK_ROUNDS = 8
_LAST_CHECK_ROUNDS = 128


@dataclass(frozen=True)
class TimedRound:
    """A finished round and what it took. draft_ms: its draft's part, where that was timed apart;
    is_steady: whether the tokens before it were the same drafter's, or plain steps."""

    k: int
    tested: int
    accepted: int
    cost_ms: float
    draft_ms: float | None
    is_steady: bool = True


class DraftDepth(Protocol):
    """Chooses k for each round. Costs are in milliseconds."""

    def choose(self) -> int:
        """k of the next round; 0 decodes plainly for `plain_tokens` tokens."""

    @property
    def plain_tokens(self) -> int:
        """How many tokens to decode plainly before asking again, when k is 0."""

    @property
    def wants_split_costs(self) -> bool:
        """Whether the next round should time its draft apart, at the price of a synchronisation."""

    def record_plain(self, tokens: int, step_ms: float, is_steady: bool = True) -> None:
        """Learn from a stretch of tokens decoded plainly, a step of which takes step_ms. is_steady:
        whether that is the time from one step to the next."""

    def record_round(self, timed: TimedRound) -> None:
        """Learn from a round."""

    def summary(self) -> DepthSummary | None:
        """What was chosen and why, None where nothing was."""


class FixedDepth:
    """Always the same k."""

    plain_tokens = sys.maxsize
    wants_split_costs = False

    def __init__(self, k: int) -> None:
        self._k = k

    def choose(self) -> int:
        """k."""
        return self._k

    def record_plain(self, tokens: int, step_ms: float, is_steady: bool = True) -> None:
        """Nothing to learn."""

    def record_round(self, timed: TimedRound) -> None:
        """Nothing to learn."""

    def summary(self) -> None:
        """Nothing was chosen."""


@dataclass(frozen=True)
class DepthSummary:
    """What an adaptive run chose and why. Costs in milliseconds at the pace of the end, None where
    never measured.

    predicted_speedup: against plain decoding at the last choice; break_even: the acceptance, alike
    at every position, at which that choice costs as much as plain decoding, None for k = 0.
    """

    k: int
    rounds_by_k: dict[int, int]
    plain_ms: float | None
    draft_step_ms: float | None
    verify_ms: dict[int, float]
    acceptance: list[float]
    predicted_speedup: float | None
    break_even: float | None


class AdaptiveDepth:
    """Chooses the k with the best expected tokens per second, 0 included.

    It begins with a few plain steps and a probe: short rounds, until one length is ahead of plain
    decoding or none may be. Drafting, it moves one step beyond what it has measured at a time;
    decoding plainly, it probes again, the later the more the last probe lost. State is one run's.
    """

    def __init__(self, max_tokens: int = MAX_DEPTH_TOKENS) -> None:
        self._max = max_tokens
        self._plain = Cost()
        self._draft_step = Cost()
        self._rounds: dict[int, Cost] = {}
        self._verifications = {1: 1.0}
        self._acceptance: list[Acceptance] = []
        self._pace = 1.0
        self._pace_samples: deque[float] = deque(maxlen=_PACE_SAMPLES)
        self._k = 0
        self._is_measuring_plain = True
        self._pause_tokens = _SHORTEST_PAUSE_TOKENS
        self._plain_since_probe = 0
        self._probe_rounds_left = _FIRST_PROBE_ROUNDS
        self._probe_loss_steps = 0.0
        self._probe_rounds = 0
        self._rounds_since_plain = 0
        self._check_rounds = _FIRST_CHECK_ROUNDS
        self._rounds_by_k: dict[int, int] = {}
        self._first_use_excess = _FIRST_USE_EXCESS
        self._trial: int | None = None
        self._trial_rounds = _FIRST_TRIAL_ROUNDS
        self._rounds_since_trial = 0

    # What the loop asks.

    @property
    def plain_tokens(self) -> int:
        """Length of the plain stretch before the next probe."""
        if self._is_measuring_plain:
            return _MEASURED_STEPS
        return self._pause_tokens

    @property
    def wants_split_costs(self) -> bool:
        """In the first two rounds, in the first of each probe and a few times later: what is held
        up only looks dear, and a draft that looks dear rules longer rounds out."""
        is_probing = self._probe_rounds_left > 0 and self._probe_rounds == 0
        is_due = not self._draft_step.is_trusted or self._finished_rounds in _TIMED_AGAIN_ROUNDS
        return is_due or is_probing

    def choose(self) -> int:
        """k of the next round."""
        if self._is_measuring_plain:
            return 0
        if self._probe_rounds_left > 0:
            return self._probe_length() if self._is_calibrated() else 1
        return self._k if self._trial is None else self._trial

    def record_plain(self, tokens: int, step_ms: float, is_steady: bool = True) -> None:
        """After enough plain tokens it is time to probe."""
        if tokens < 1:
            return
        if is_steady or self._plain.ms is None:
            self._learn(self._plain, step_ms)
        self._look_at_costs()
        self._rounds_since_plain = 0
        self._plain_since_probe += tokens
        is_due = self._plain_since_probe >= self.plain_tokens
        if self._is_measuring_plain:
            self._is_measuring_plain = not is_due
        elif self._k == 0 and self._probe_rounds_left == 0 and is_due:
            self._probe_rounds_left, self._probe_loss_steps = _PROBE_ROUNDS, 0.0
            self._probe_rounds = 0
            for position in self._acceptance:
                position.doubt()
        if is_due:
            self._plain_since_probe = 0

    def record_round(self, timed: TimedRound) -> None:
        """Update costs and acceptance, then choose anew.

        A round behind plain steps or another drafter's pays for what the draft has missed, and one
        that times its draft apart for the wait: neither costs what the rounds of a stretch do.
        """
        k, cost_ms = timed.k, timed.cost_ms
        is_behind_its_like = timed.is_steady and self._rounds_since_plain > 0
        if timed.draft_ms is not None:
            self._draft_step.add(max(timed.draft_ms, 1e-6) / k / self._pace)
        elif is_behind_its_like and not self._is_first_use(k, cost_ms):
            cost = self._rounds.setdefault(k, Cost(self._finished_rounds))
            self._learn(cost, cost_ms)
            if cost.first_was_dear:
                self._first_use_excess = KNOWN_FIRST_USE_EXCESS
        self._trial = None
        self._rounds_by_k[k] = self._rounds_by_k.get(k, 0) + 1
        self._rounds_since_plain += 1
        for position in range(timed.tested):
            if position == len(self._acceptance):
                self._acceptance.append(Acceptance(self._acceptance_at(position)))
            self._acceptance[position].learn(position < timed.accepted)
        self._look_at_costs()
        if self._probe_rounds_left == 0:
            self._decide()
            return
        # What compiling took is not lost again.
        usual_ms = min(cost_ms / self._pace, _FIRST_USE_EXCESS * self._round_ms(k))
        self._probe_loss_steps += usual_ms / self._round_ms(0) - (timed.accepted + 1)
        self._decide_on_probe()

    def _learn(self, cost: Cost, sample_ms: float) -> None:
        """Add a sample as it would have been at the pace of the beginning, and follow the pace. A
        mean of the samples, or what is compared with the newest ones alone, would run away from
        costs that are not measured: samples stray upwards alone."""
        sample_ms = max(sample_ms, 1e-6)
        if cost.tells_pace and cost.ms is not None:
            self._pace_samples.append(sample_ms / (cost.first_ms or cost.ms))
            self._pace += _PACE_RATE * (median(self._pace_samples) - self._pace)
        cost.add(sample_ms / self._pace)

    def _is_first_use(self, k: int, cost_ms: float) -> bool:
        """Whether a length was never used before, and took so long that it may have paid for
        compiling kernels."""
        if k in self._rounds_by_k:
            return False
        return cost_ms / self._pace > self._first_use_excess * self._round_ms(k)

    @property
    def _finished_rounds(self) -> int:
        return sum(self._rounds_by_k.values())

    # How it decides.

    def _is_calibrated(self) -> bool:
        return self._draft_step.is_trusted and 1 in self._rounds and self._rounds[1].is_trusted

    def _decide(self) -> None:
        """While drafting: stay, change the length, or stop."""
        best = max(self._candidates(), key=self._rate)
        if self._rate(best) > _SWITCH_GAIN * self._rate(self._k):
            self._k = best
        if self._k == 0:
            self._pause_tokens = _SHORTEST_PAUSE_TOKENS
            return
        if self._should_measure_plain():
            self._is_measuring_plain = True
            self._check_rounds = min(4 * self._check_rounds, _LAST_CHECK_ROUNDS)
            return
        self._rounds_since_trial += 1
        if self._rounds_since_trial >= self._trial_rounds:
            self._trial = self._promising_length()
            self._rounds_since_trial = 0
            self._trial_rounds = min(2 * self._trial_rounds, _LAST_TRIAL_ROUNDS)

    def _decide_on_probe(self) -> None:
        """Draft where that is ahead, go on while it may be, else decode plainly for a while."""
        self._probe_rounds_left -= 1
        if self._is_calibrated():
            best = max(self._candidates(), key=self._rate)
            if best > 0 and self._rate(best) > _SWITCH_GAIN * self._rate(0):
                self._k, self._probe_rounds_left = best, 0
                return
        self._probe_rounds += 1
        is_judged = 1 in self._rounds and self._probe_rounds >= _JUDGED_ROUNDS
        if is_judged and not self._may_pay():
            self._probe_rounds_left = 0
        if self._probe_rounds_left == 0:
            lost_steps = self._probe_loss_steps + _CHANGING_OVER_STEPS
            pause_tokens = max(round(lost_steps / _PROBING_SHARE), _SHORTEST_PAUSE_TOKENS)
            self._pause_tokens = min(pause_tokens, _LONGEST_PAUSE_TOKENS)

    def _promising_length(self) -> int | None:
        """A longer round that may be well ahead. What is known may rule it out for ever otherwise:
        the line through known costs, or a few unlucky tests of long ago."""
        for position in self._acceptance[self._k :]:
            position.doubt()
        best = max(range(self._k + 1, self._max + 1), key=self._hope, default=0)
        return best if best and self._hope(best) > _TRIAL_GAIN * self._rate(self._k) else None

    def _should_measure_plain(self) -> bool:
        """Once in any case: it was measured at the beginning, when a machine may not be at its
        usual pace. Then where drafting is so little ahead that a plain step's cost decides, and
        now and then elsewhere."""
        is_first = self._check_rounds == _FIRST_CHECK_ROUNDS
        is_long_ago = self._rounds_since_plain >= _LONGEST_UNCHECKED_ROUNDS
        decides = is_first or self._rate(self._k) < _CHECKED_GAIN * self._rate(0)
        return is_long_ago or (decides and self._rounds_since_plain >= self._check_rounds)

    def _probe_length(self) -> int:
        """The shortest one that may pay, else the one that is nearest to it."""
        lengths = range(1, self._max + 1)
        enough = _SWITCH_GAIN * self._rate(0)
        nearest = max(lengths, key=self._hope)
        return next((k for k in lengths if self._hope(k) > enough), nearest)

    def _may_pay(self) -> bool:
        return any(self._hope(k) > self._rate(0) for k in range(1, self._max + 1))

    def _hope(self, k: int) -> float:
        """Tokens per millisecond, were acceptance somewhat better than it looks and the cost as low
        as it may be."""
        last = len(self._acceptance) - 1
        rates = (self._acceptance[min(position, last)].hoped_rate for position in range(k))
        return mean_tokens(rates) / self._hoped_ms(k)

    def _hoped_ms(self, k: int) -> float:
        """Of an unknown length as if its verification cost no more than the dearest one known."""
        if k + 1 in self._verifications:
            return self._rounds[k].hoped_ms
        return self._drafting_ms(k) + max(self._verifications.values())

    def _candidates(self) -> range:
        """0 up to one step beyond the longest round whose cost is known."""
        return range(min(self._max, max(self._verifications)) + 1)

    def _look_at_costs(self) -> None:
        """Work out, once a round, what the known lengths cost."""
        known = (k for k in self._rounds if self._is_known(k))
        self._verifications = self._verifications_of(known)

    def _is_known(self, k: int) -> bool:
        """One sample is enough to go by for a while, and gets a second look in the end; the sooner,
        the more the length promised before."""
        cost = self._rounds[k]
        age_rounds = self._finished_rounds - cost.since_round
        return cost.is_trusted or age_rounds < self._patience_rounds(k)

    def _patience_rounds(self, k: int) -> float:
        """How long one sample of a length stands for its cost."""
        verify = self._verifications_of(
            other for other, cost in self._rounds.items() if cost.is_trusted
        )

        def rate(length: int) -> float:
            round_ms = self._drafting_ms(length) + cost_on_line(verify, length + 1)
            return self.expected_tokens(length) / round_ms

        gain = rate(k) / rate(self._k) - 1
        return min(_SECOND_LOOK_ROUNDS, _PATIENCE_ROUNDS / max(gain, 1e-6))

    def _rate(self, k: int) -> float:
        """Expected tokens per millisecond."""
        return self.expected_tokens(k) / self._round_ms(k)

    def expected_tokens(self, k: int) -> float:
        """Mean number of tokens that a round of k emits."""
        return mean_tokens(self._acceptance_at(position) for position in range(k))

    def _acceptance_at(self, position: int) -> float:
        if not self._acceptance:
            return _PRIOR_ACCEPTANCE
        return self._acceptance[min(position, len(self._acceptance) - 1)].rate

    def _round_ms(self, k: int) -> float:
        """As measured, else k draft steps and a verification on the line through those known."""
        return self._drafting_ms(k) + cost_on_line(self._verifications, k + 1)

    def _verifications_of(self, lengths: Iterable[int]) -> dict[int, float]:
        """By width: what rounds leave beside their draft steps; a plain step is width 1."""
        known = {1: self._plain.ms or 1.0}
        for k in lengths:
            known[k + 1] = max((self._rounds[k].ms or 0.0) - self._drafting_ms(k), 0.0)
        return known

    def _drafting_ms(self, k: int) -> float:
        return k * (self._draft_step.least_ms or 0.0)

    def summary(self) -> DepthSummary:
        """What `--profile` prints."""
        k = self._k
        is_known = self._is_calibrated()
        return DepthSummary(
            k=k,
            rounds_by_k=dict(sorted(self._rounds_by_k.items())),
            plain_ms=self._now(self._plain),
            draft_step_ms=self._now(self._draft_step),
            verify_ms={
                width: self._pace * ms
                for width, ms in sorted(self._verifications.items())
                if width > 1
            },
            acceptance=[position.rate for position in self._acceptance],
            predicted_speedup=self._rate(k) / self._rate(0) if is_known else None,
            break_even=self._break_even(k) if is_known and k > 0 else None,
        )

    def _now(self, cost: Cost) -> float | None:
        return None if cost.ms is None else self._pace * cost.ms

    def _break_even(self, k: int) -> float:
        """The constant acceptance at which k pays exactly as much as plain decoding."""
        wanted = self._round_ms(k) / self._round_ms(0)
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            expected = sum(middle**i for i in range(k + 1))
            low, high = (middle, high) if expected < wanted else (low, middle)
        return high
