"""The results of `mlxgen verify`: lines for people and a document for scripts."""

from __future__ import annotations

from typing import Any

from mlxgen.audit.checks import CheckResult


def audit_document(results: list[CheckResult], facts: dict[str, Any]) -> dict[str, Any]:
    """facts: models, settings, device, seconds."""
    return {
        "passed": all(result.passed for result in results),
        **facts,
        "checks": [
            {
                "name": result.name,
                "passed": result.passed,
                "detail": result.detail,
                **result.facts,
            }
            for result in results
        ],
    }


def verdict_line(results: list[CheckResult]) -> str:
    """The last line: how many checks passed."""
    failed = [result.name for result in results if not result.passed]
    if not failed:
        return f"[Verify] passed: {len(results)} checks"
    return f"[Verify] failed: {len(failed)} of {len(results)} checks ({', '.join(failed)})"
