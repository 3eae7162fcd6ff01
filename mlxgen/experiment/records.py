"""What is kept of a run: counts, sums of closed forms, a digest of its text, and two times."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from mlxgen.experiment.arms import PLAIN
from mlxgen.experiment.plan import Phase, RunKey

if TYPE_CHECKING:
    from mlxgen.generation import Generation
    from mlxgen.speculative.loop import Round

_TIMES = ("prefill_ms", "decode_ms")
_LARGEST = 1e15
"""No number of a run comes near it, and sums of such numbers are exact enough."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One finished run.

    target_forwards: of decoding, by width 1 or by block. text_sha256: of the emitted ids.
    `*_by_offset`: by position in the block, from the first. sum_min, sum_prod, gumbel: sums over
    the tested positions; expected, variance: of the number accepted, as theory has them;
    largest_step: as in `TheoryCheck`. The sums are 0 in a timed run.
    """

    key: RunKey
    rule: str
    prompt_tokens: int
    tokens: int
    target_forwards: int
    finish_reason: str
    text_sha256: str
    rounds: int = 0
    proposed: int = 0
    positions_tested: int = 0
    accepted: int = 0
    tested_by_offset: tuple[int, ...] = ()
    accepted_by_offset: tuple[int, ...] = ()
    sum_min: float = 0.0
    sum_prod: float = 0.0
    gumbel: float = 0.0
    expected: float = 0.0
    variance: float = 0.0
    largest_step: int = 1
    prefill_ms: float
    decode_ms: float

    @property
    def counts(self) -> tuple[object, ...]:
        """What a repeated run must have in common with the first."""
        return (self.text_sha256, self.rounds, self.positions_tested, self.accepted)

    def as_json(self) -> dict[str, Any]:
        """One line of the journal. What depends on the clock stands under "timing"."""
        values = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("key", *_TIMES)
        }
        key = {**asdict(self.key), "phase": self.key.phase.value}
        return {**key, **values, "timing": {name: getattr(self, name) for name in _TIMES}}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> RunRecord:
        """The record of a journal's line.

        Raises `KeyError`, `TypeError`, `ValueError` or `OverflowError`.
        """
        line = dict(line)
        place = (int(line.pop(name)) for name in ("arm", "prompt", "seed"))
        key = RunKey(Phase(line.pop("phase")), *place)
        times: dict[str, Any] = {name: float(line["timing"][name]) for name in _TIMES}
        line.pop("timing")
        for name in ("tested_by_offset", "accepted_by_offset"):
            line[name] = tuple(int(count) for count in line[name])
        record = cls(key=key, **line, **times)
        record._check()
        return record

    def _check(self) -> None:
        """Raises `TypeError` or `ValueError` for a value that no run has."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "str":
                if not (isinstance(value, str) and value.isascii() and value.isprintable()):
                    raise TypeError(f"{field.name} is no name or digest")
            elif field.name != "key":
                _check_numbers(value if isinstance(value, tuple) else (value,), field.type)


def _check_numbers(values: tuple[Any, ...], kind: object) -> None:
    for value in values:
        is_fitting = isinstance(value, int | float if kind == "float" else int)
        if not (is_fitting and 0 <= value <= _LARGEST):
            raise ValueError(f"{value} is no count, sum or time")


class RoundCounter:
    """Watches the rounds of a run, to tell which tokens came out of them."""

    def __init__(self) -> None:
        self.emitted = 0
        self.saw_end = False

    def see(self, done: Round) -> None:
        """Count a round; one that emits less than it settled met an end of sequence."""
        self.emitted += len(done.emitted)
        self.saw_end = len(done.emitted) <= done.accepted

    def forwards(self, result: Generation) -> int:
        """Target forwards of decoding: one a round, and one a token outside rounds.

        An end of sequence is not among the tokens but took a forward as well.
        """
        rounds = 0 if result.statistics is None else result.statistics.rounds
        ended = result.finish_reason == "stop" and result.stop_string is None
        return rounds + len(result.tokens) - self.emitted + (ended and not self.saw_end)


def record_of(key: RunKey, result: Generation, rounds: RoundCounter) -> RunRecord:
    """What is kept of a finished run."""
    stats = result.statistics
    values: dict[str, Any] = {}
    if stats is not None:
        tested = stats.positions_tested
        values = {
            "rounds": stats.rounds,
            "proposed": stats.proposed,
            "positions_tested": tested,
            "accepted": stats.accepted,
            "tested_by_offset": tuple(stats.tested_by_offset),
            "accepted_by_offset": tuple(stats.accepted_by_offset),
            "sum_min": stats.closed_form_sum_min * tested,
            "sum_prod": stats.closed_form_sum_prod * tested,
            "gumbel": stats.closed_form_gumbel * tested,
            "expected": stats.check.expected,
            "variance": stats.check.variance,
            "largest_step": stats.check.largest_step,
        }
    ids = ",".join(str(token.id) for token in result.tokens)
    return RunRecord(
        key=key,
        rule=PLAIN if stats is None else stats.rule.id,
        prompt_tokens=len(result.prompt_ids),
        tokens=len(result.tokens),
        target_forwards=rounds.forwards(result),
        finish_reason=result.finish_reason.value,
        text_sha256=hashlib.sha256(ids.encode()).hexdigest(),
        prefill_ms=result.prefill_ms,
        decode_ms=result.decode_ms,
        **values,
    )
