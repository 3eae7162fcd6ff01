"""The lines printed after the text. Their shape is a contract: scripts grep them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from mlxgen.generation import Generation
from mlxgen.speculative.statistics import SpeculativeAcceptanceStats

NO_ROUND_ID = "unknown"
NO_ROUND_LABEL = "no speculative round ran"


def generated_line(result: Generation) -> str:
    """Tokens and speed of decoding alone; prefill is reported apart."""
    return (
        f"[Generated {len(result.tokens)} tokens in {result.decode_ms / 1e3:.2f}s = "
        f"{result.decode_tokens_per_s:.2f} tok/s]"
    )


def profile_lines(result: Generation, peak_memory_bytes: int) -> list[str]:
    """The block of `--profile`, in place of the one line above."""
    return [
        "[Profile Results]",
        f"  Prompt tokens:    {len(result.prompt_ids)}",
        f"  Generated tokens: {len(result.tokens)}",
        f"  Prefill:          {result.prefill_ms:.2f} ms ({result.prefill_tokens_per_s:.2f} tok/s)",
        f"  Decode:           {result.decode_ms:.2f} ms ({result.decode_tokens_per_s:.2f} tok/s)",
        f"  Peak memory:      {peak_memory_bytes / 2**30:.2f} GB",
    ]


def acceptance_line(stats: SpeculativeAcceptanceStats) -> str:
    """The line of spec: prefix, field names, order and decimals never change."""
    ran = stats.rounds > 0
    return (
        f"[Speculative acceptance] rule={stats.rule.id if ran else NO_ROUND_ID} "
        f"rounds={stats.rounds} proposed={stats.proposed} "
        f"positions_tested={stats.positions_tested} accepted={stats.accepted} "
        f"per_position_acceptance={stats.per_position_acceptance:.4f} "
        f"acceptance_rate={stats.acceptance_rate:.4f} "
        f"mean_accepted_len={stats.mean_accepted_len:.4f} "
        f"({stats.rule.label if ran else NO_ROUND_LABEL})"
    )


def diagnostic_line(stats: SpeculativeAcceptanceStats) -> str:
    """The closed forms, averaged over the positions tested; the block form over the rounds."""
    return (
        f"[Speculative acceptance diagnostic] "
        f"closed_form_sum_min={stats.closed_form_sum_min:.4f} "
        f"closed_form_sum_prod={stats.closed_form_sum_prod:.4f} "
        f"closed_form_gumbel={stats.closed_form_gumbel:.4f} "
        f"closed_form_block_len={stats.closed_form_block_len:.4f} (per-position acceptance that "
        f"theory predicts for stochastic, sampler-match and gumbel-match, and mean_accepted_len "
        f"for block; sum_min >= sum_prod always)"
    )


def check_line(stats: SpeculativeAcceptanceStats) -> str:
    """The run judged by theory."""
    check = stats.check
    # A rounded -0.00 would look like a finding.
    z = round(check.z, 2) + 0.0
    return (
        f"[Speculative acceptance check] rule={stats.rule.id} expected={check.expected:.2f} "
        f"accepted={check.observed} positions_tested={stats.positions_tested} z={z:.2f} "
        f"verdict={'consistent' if check.is_consistent else 'inconsistent'}"
    )


def speculation_lines(stats: SpeculativeAcceptanceStats) -> list[str]:
    """The acceptance line, and the diagnostic and check lines when the run has closed forms."""
    lines = [acceptance_line(stats)]
    if stats.has_closed_forms:
        lines += [diagnostic_line(stats), check_line(stats)]
    return lines


def drafters_line(stats: SpeculativeAcceptanceStats) -> str:
    """Which drafter proposed what."""
    parts = [
        f"{name} rounds={counts.rounds} proposed={counts.proposed} "
        f"positions_tested={counts.positions_tested} accepted={counts.accepted}"
        for name, counts in sorted(stats.by_drafter.items())
    ]
    return "[Drafters] " + ("; ".join(parts) or "nothing was proposed")


def depth_lines(result: Generation) -> list[str]:
    """What `--num-draft-tokens auto` chose, and the costs and acceptance it went by."""
    depth = result.depth
    if depth is None:
        return []
    rounds = ", ".join(f"{k}: {count}" for k, count in depth.rounds_by_k.items()) or "none"
    verify = ", ".join(f"{width}: {ms:.2f}" for width, ms in depth.verify_ms.items()) or "none"
    acceptance = ", ".join(f"{rate:.2f}" for rate in depth.acceptance) or "none"
    measured = None
    if depth.plain_ms and result.tokens:
        measured = depth.plain_ms * len(result.tokens) / result.decode_ms
    return [
        f"[Draft length] last choice k={depth.k}; rounds by k: {rounds}",
        f"[Draft length] ms: plain step {_number(depth.plain_ms)}, draft step "
        f"{_number(depth.draft_step_ms)}, verification by width {verify}",
        f"[Draft length] acceptance by position {acceptance}; break-even "
        f"{_number(depth.break_even)}; speed-up over plain: predicted "
        f"{_number(depth.predicted_speedup)}, measured {_number(measured)}",
    ]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def logprob_lines(result: Generation, decode: Callable[[list[int]], str]) -> Iterator[str]:
    """One line a token: its log-probability and those of the most likely ones."""
    for token in result.tokens:
        if token.logprobs is None:
            continue
        top = " ".join(
            f"{json.dumps(decode([i]), ensure_ascii=False)}:{value:.4f}"
            for i, value in token.logprobs.top
        )
        text = json.dumps(decode([token.id]), ensure_ascii=False)
        logprob = token.logprobs.logprob
        yield f"[Logprobs] id={token.id} token={text} logprob={logprob:.4f} top={top}"
