"""Options that say how another one works, and mean nothing without it."""

from __future__ import annotations

from collections.abc import Collection

from mlxgen.errors import OptionError

NEEDS = {
    "kv_group_size": "kv_bits",
    "quantized_kv_start": "kv_bits",
    "xtc_threshold": "xtc_probability",
    "dry_base": "dry_multiplier",
    "dry_allowed_length": "dry_multiplier",
    "dry_penalty_last_n": "dry_multiplier",
    "dry_sequence_breaker": "dry_multiplier",
}
"""By parameter name. Not `repeat_last_n`: generation_config.json may bring its penalty."""


def check_dependent_options(given: Collection[str]) -> None:
    """Raise `OptionError` where one of the options that were given lacks the one it needs."""
    for name, needed in NEEDS.items():
        if name in given and needed not in given:
            option, other = _spelled(name), _spelled(needed)
            raise OptionError(f"{option} means nothing without {other}; add {other} or drop it")


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")
