"""Environment variables, read once at the edge. docs/environment-variables.md describes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from mlxgen.config import AcceptRule

ACCEPT_VARIABLE = "MLXCEL_SPECULATIVE_STOCHASTIC_ACCEPT"
DIAGNOSTIC_VARIABLE = "MLXCEL_SPECULATIVE_ACCEPT_DIAG"
_ON = frozenset({"1", "true", "yes", "on"})
_OFF = frozenset({"", "0", "false", "no", "off"})


def accept_rule(environment: Mapping[str, str], warn: Callable[[str], None]) -> AcceptRule:
    """The rule that the environment asks for. A value that is neither on nor off means off."""
    raw = environment.get(ACCEPT_VARIABLE, "")
    value = raw.strip().lower()
    if value in _ON:
        return AcceptRule.STOCHASTIC
    if value not in _OFF:
        warn(
            f"{ACCEPT_VARIABLE}={raw!r} is neither on (1, true, yes, on) nor off (0, false, no, "
            f"off); it counts as off"
        )
    return AcceptRule.SAMPLER_MATCH


def diagnostics(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for the diagnostic line: anything but an off value does."""
    return environment.get(DIAGNOSTIC_VARIABLE, "").strip().lower() not in _OFF


def log_level(environment: Mapping[str, str]) -> int | None:
    """The logging level of MLXGEN_LOG, else of RUST_LOG (`info`, or `target=info,...`)."""
    for variable in ("MLXGEN_LOG", "RUST_LOG"):
        value = environment.get(variable, "").strip().lower()
        if not value:
            continue
        levels = {directive.rpartition("=")[2].strip() for directive in value.split(",")}
        if levels & {"debug", "trace"}:
            return logging.DEBUG
        return logging.INFO if "info" in levels else None
    return None
