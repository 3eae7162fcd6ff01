"""The document of `--json`: everything a run was told, did and measured. Strict JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from mlxgen.config import GenerationConfig
from mlxgen.decoding.tokens import Token
from mlxgen.generation import Generation
from mlxgen.report.lines import NO_ROUND_ID, NO_ROUND_LABEL


def generation_document(
    result: Generation,
    config: GenerationConfig,
    *,
    models: Mapping[str, str | None],
    why_inactive: str | None,
    lines: list[str],
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """Numbers that are not finite become null. models: paths of target and draft.

    why_inactive: why no draft was used, or None when one was. lines: the statistics lines.
    """
    document: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason.value,
        "stop_string": result.stop_string,
        "prompt_tokens": len(result.prompt_ids),
        "prompt_ids": list(result.prompt_ids),
        "reused_prompt_tokens": result.reused_tokens,
        "generated_tokens": len(result.tokens),
        "seed": result.seed,
        "models": dict(models),
        "sampling": {
            **asdict(config.sampling),
            "logit_bias": {str(token): value for token, value in config.sampling.logit_bias},
        },
        "timing": {
            "prefill_ms": result.prefill_ms,
            "prefill_tokens_per_s": result.prefill_tokens_per_s,
            "decode_ms": result.decode_ms,
            "decode_tokens_per_s": result.decode_tokens_per_s,
        },
        "speculative": _speculative(result, config, why_inactive),
        "lines": lines,
    }
    if config.logprobs:
        document["logprobs"] = [_logprobs(token, decode) for token in result.tokens]
    strict: dict[str, Any] = _strict(document)
    return strict


def _speculative(
    result: Generation, config: GenerationConfig, why_inactive: str | None
) -> dict[str, Any]:
    stats = result.statistics
    if stats is None:
        return {"active": False, "why_inactive": why_inactive}
    ran = stats.rounds > 0
    from_draft = [token.from_draft for token in result.tokens]
    section: dict[str, Any] = {
        "active": True,
        "rule": stats.rule.id if ran else NO_ROUND_ID,
        "label": stats.rule.label if ran else NO_ROUND_LABEL,
        "lossless": stats.rule.is_lossless,
        "num_draft_tokens": (
            "auto" if config.speculation.adapts_depth else config.speculation.num_draft_tokens
        ),
        "rounds": stats.rounds,
        "proposed": stats.proposed,
        "positions_tested": stats.positions_tested,
        "accepted": stats.accepted,
        "per_position_acceptance": stats.per_position_acceptance,
        "acceptance_rate": stats.acceptance_rate,
        "mean_accepted_len": stats.mean_accepted_len,
        "by_drafter": {name: asdict(counts) for name, counts in stats.by_drafter.items()},
        "draft_length": None if result.depth is None else asdict(result.depth),
        "residual_fallbacks": stats.residual_fallbacks,
        "tested_by_offset": stats.tested_by_offset,
        "accepted_by_offset": stats.accepted_by_offset,
        "from_draft": from_draft,
        "emitted_from_draft": sum(from_draft),
        "emitted_from_target": len(from_draft) - sum(from_draft),
    }
    if stats.has_closed_forms:
        section["closed_form_sum_min"] = stats.closed_form_sum_min
        section["closed_form_sum_prod"] = stats.closed_form_sum_prod
        section["closed_form_gumbel"] = stats.closed_form_gumbel
        section["closed_form_block_len"] = stats.closed_form_block_len
        section["check"] = {
            "expected": stats.check.expected,
            "accepted": stats.check.observed,
            "variance": stats.check.variance,
            "z": stats.check.z,
            "verdict": "consistent" if stats.check.is_consistent else "inconsistent",
        }
    return section


def _logprobs(token: Token, decode: Callable[[list[int]], str]) -> dict[str, Any] | None:
    if token.logprobs is None:
        return None
    return {
        "id": token.id,
        "token": decode([token.id]),
        "logprob": token.logprobs.logprob,
        "top": [
            {"id": i, "token": decode([i]), "logprob": value} for i, value in token.logprobs.top
        ],
    }


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
