"""A comparison in words: tables as headings and cells, and the sentences around them."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxgen.experiment.intervals import FEWEST_PROMPTS, Interval
from mlxgen.experiment.summary import ArmSummary, Bound, PairSummary, Verdict
from mlxgen.report.experiment import Report

NONE = "-"


@dataclass(frozen=True)
class Column:
    """A heading; numbers stand at the right."""

    title: str
    is_number: bool = True


@dataclass(frozen=True)
class TextTable:
    """A table whose cells are text already. notes: what must be known to read it."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Aligned with blanks, for streams that are no terminal."""
        titles = tuple(column.title for column in self.columns)
        widths = [max(map(len, cells)) for cells in zip(titles, *self.rows, strict=True)]

        def line(cells: Sequence[str]) -> str:
            placed = [
                cell.rjust(width) if column.is_number else cell.ljust(width)
                for cell, width, column in zip(cells, widths, self.columns, strict=True)
            ]
            return "  ".join(placed).rstrip()

        return [self.title, line(titles), *map(line, self.rows), *self.notes]

    def markdown(self) -> list[str]:
        """A table of GitHub's Markdown, without title and notes."""
        rule = "|".join("---:" if column.is_number else "---" for column in self.columns)
        rows = [tuple(column.title for column in self.columns), *self.rows]
        head, *body = ["| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows]
        return [head, f"|{rule}|", *body]


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def bound_lines(report: Report) -> list[str]:
    """sum_min / sum_prod, which bounds what a speed can show; one line a way of sampling."""
    lines = [_bound_line(bound) for bound in report.comparison.bounds]
    if lines:
        lines.append(
            "That is the most by which acceptance at a position can grow from sampler-match to "
            "stochastic; near 1, there is little to gain by the rule."
        )
    return lines


def _bound_line(bound: Bound) -> str:
    ratio = "unbounded" if bound.ratio is None else f"{bound.ratio:.4f}"
    return (
        f"sum_min / sum_prod = {ratio} ({bound.sum_min:.4f} / {bound.sum_prod:.4f} over "
        f"{bound.positions_tested} positions of {'; '.join(bound.arms)})"
    )


def acceptance_table(report: Report) -> TextTable:
    """Acceptance against theory, arm by arm."""
    arms = [arm for arm in report.comparison.arms if arm.acceptance is not None]
    notes = []
    if seeds := report.settings["theory_seeds"]:
        notes.append(
            f"tested, measured, closed form, z: {seeds} of {report.settings['seeds']} runs of each "
            f"prompt, made again with closed forms and untimed; the rest: timed runs."
        )
    if any(arm.rule == "block" for arm in arms):
        notes.append(
            "block: theory speaks of accepted lengths; its closed form is the expected number "
            "accepted over the positions tested."
        )
    return TextTable(
        "Acceptance",
        (
            Column("arm", is_number=False),
            Column("rule", is_number=False),
            Column("tested"),
            Column("measured"),
            Column("closed form"),
            Column("z"),
            Column("accepted a round"),
            Column("tokens a forward"),
        ),
        tuple(_acceptance_row(arm) for arm in arms),
        tuple(notes),
    )


def _acceptance_row(arm: ArmSummary) -> tuple[str, ...]:
    acceptance, theory = arm.acceptance, arm.theory
    assert acceptance is not None
    length, forward = f"{acceptance.mean_accepted_len:.4f}", f"{arm.tokens_per_forward:.4f}"
    if theory is None:
        tested, rate = acceptance.positions_tested, acceptance.per_position_acceptance
        return (arm.name, arm.rule, str(tested), f"{rate:.4f}", NONE, NONE, length, forward)
    return (
        arm.name,
        arm.rule,
        str(theory.positions_tested),
        f"{theory.acceptance:.4f}",
        f"{theory.closed_form:.4f}",
        # A rounded -0.00 would look like a finding.
        f"{round(theory.z, 2) + 0.0:.2f}",
        length,
        forward,
    )


def speed_table(report: Report) -> TextTable:
    """Speeds and their ratios to the first arm."""
    return TextTable(
        "Speed of decoding in tokens a second, with 95 % intervals over prompts",
        (
            Column("arm", is_number=False),
            Column("tok/s"),
            Column("interval"),
            Column("prefill ms"),
            Column(f"ratio to {report.first}"),
            Column("interval"),
            Column("verdict", is_number=False),
        ),
        tuple(_speed_row(arm) for arm in report.comparison.arms),
    )


def _speed_row(arm: ArmSummary) -> tuple[str, ...]:
    timing = arm.timing
    return (
        arm.name,
        f"{timing.decode_tokens_per_s:.2f}",
        interval_text(timing.decode_interval, 2),
        f"{timing.prefill_ms:.1f}",
        NONE if timing.ratio_to_first is None else f"{timing.ratio_to_first:.3f}",
        interval_text(timing.ratio_interval, 3),
        NONE if timing.verdict is None else timing.verdict.value,
    )


def interval_text(interval: Interval | None, decimals: int) -> str:
    """Both ends, or a dash."""
    if interval is None:
        return NONE
    return f"{interval.low:.{decimals}f}-{interval.high:.{decimals}f}"


def verdict_lines(report: Report) -> list[str]:
    """What can be told apart, which texts are the same, and what to be wary of."""
    comparison = report.comparison
    alike = [pair for pair in comparison.pairs if pair.timing.verdict is Verdict.NO_DIFFERENCE]
    lines = [f"no difference shown: {_pair_text(pair)}" for pair in alike]
    if comparison.prompts < FEWEST_PROMPTS:
        lines.append(
            f"no intervals: they need {FEWEST_PROMPTS} prompts, and every arm has run "
            f"{comparison.prompts}"
        )
    elif not alike and len(comparison.arms) > 1:
        lines.append("every two arms can be told apart")
    lines += [f"the same text, token by token: {', '.join(g)}" for g in comparison.text_groups]
    if not comparison.complete:
        lines.append(
            f"incomplete: {comparison.runs} of {comparison.planned_runs} runs; only prompts and "
            f"seeds that every arm has run count"
        )
    return lines


def _pair_text(pair: PairSummary) -> str:
    interval = interval_text(pair.timing.interval, 3)
    return f"{pair.second} against {pair.first}, {pair.timing.ratio:.3f} ({interval})"


def warnings_of(report: Report) -> list[str]:
    """What casts doubt on the numbers."""
    doubts = []
    for arm in report.comparison.arms:
        theory = arm.theory
        if theory is None:
            continue
        if not theory.is_consistent:
            doubts.append(
                f"arm {arm.name} disagrees with theory (z = {theory.z:.2f}): please report the "
                f"command"
            )
        if not theory.repeats_timed and arm.settings.get("num_draft_tokens") != "auto":
            doubts.append(
                f"arm {arm.name}: runs made again with closed forms differ from the timed ones"
            )
    return doubts


def csv_text(report: Report) -> str:
    """One row an arm, under a heading; empty where there is nothing to say."""
    rows = [_csv_row(arm) for arm in report.comparison.arms]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_row(arm: ArmSummary) -> dict[str, Any]:
    acceptance, theory, timing = arm.acceptance, arm.theory, arm.timing

    def of(part: object, name: str) -> Any:
        return None if part is None else getattr(part, name)

    return {
        "arm": arm.name,
        "rule": arm.rule,
        "runs": arm.runs,
        "tokens": arm.tokens,
        "rounds": of(acceptance, "rounds"),
        "proposed": of(acceptance, "proposed"),
        "positions_tested": of(acceptance, "positions_tested"),
        "accepted": of(acceptance, "accepted"),
        "per_position_acceptance": of(acceptance, "per_position_acceptance"),
        "mean_accepted_len": of(acceptance, "mean_accepted_len"),
        "tokens_per_forward": arm.tokens_per_forward,
        "theory_positions_tested": of(theory, "positions_tested"),
        "theory_acceptance": of(theory, "acceptance"),
        "closed_form": of(theory, "closed_form"),
        "z": of(theory, "z"),
        "closed_form_sum_min": of(theory, "closed_form_sum_min"),
        "closed_form_sum_prod": of(theory, "closed_form_sum_prod"),
        "closed_form_gumbel": of(theory, "closed_form_gumbel"),
        "decode_tokens_per_s": timing.decode_tokens_per_s,
        "decode_low": of(timing.decode_interval, "low"),
        "decode_high": of(timing.decode_interval, "high"),
        "prefill_ms": timing.prefill_ms,
        "prefill_tokens_per_s": timing.prefill_tokens_per_s,
        "ratio_to_first": timing.ratio_to_first,
        "ratio_low": of(timing.ratio_interval, "low"),
        "ratio_high": of(timing.ratio_interval, "high"),
        "verdict": of(timing.verdict, "value"),
    }
