"""mlxgen: text generation for MLX models with speculative decoding that is lossless."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxgen.config import (
        AcceptRule,
        CacheConfig,
        GenerationConfig,
        SamplingConfig,
        SpeculationConfig,
    )
    from mlxgen.conversation import Conversation
    from mlxgen.errors import MlxgenError
    from mlxgen.generation import Generation, GenerationStream, generate, stream_generate
    from mlxgen.memory import Memory
    from mlxgen.models.loading import LoadedModel, load
    from mlxgen.sampling.chain import effective_token_distribution, sample_token_with_distribution
    from mlxgen.speculative.loop import SpeculativeGenerator
    from mlxgen.speculative.rules import residual_resample, verify_draft_tokens
    from mlxgen.speculative.selection import acceptance_rule
    from mlxgen.speculative.statistics import SpeculativeAcceptanceStats

__version__ = "0.1.0"

_HOMES = {
    "mlxgen.config": (
        "AcceptRule",
        "CacheConfig",
        "GenerationConfig",
        "SamplingConfig",
        "SpeculationConfig",
    ),
    "mlxgen.conversation": ("Conversation",),
    "mlxgen.errors": ("MlxgenError",),
    "mlxgen.generation": ("Generation", "GenerationStream", "generate", "stream_generate"),
    "mlxgen.memory": ("Memory",),
    "mlxgen.models.loading": ("LoadedModel", "load"),
    "mlxgen.sampling.chain": ("effective_token_distribution", "sample_token_with_distribution"),
    "mlxgen.speculative.loop": ("SpeculativeGenerator",),
    "mlxgen.speculative.rules": ("residual_resample", "verify_draft_tokens"),
    "mlxgen.speculative.selection": ("acceptance_rule",),
    "mlxgen.speculative.statistics": ("SpeculativeAcceptanceStats",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 - in the order a reader meets them
    "load",
    "generate",
    "stream_generate",
    "Generation",
    "GenerationStream",
    "LoadedModel",
    "Conversation",
    "Memory",
    "GenerationConfig",
    "SamplingConfig",
    "SpeculationConfig",
    "CacheConfig",
    "AcceptRule",
    "MlxgenError",
    "SpeculativeGenerator",
    "SpeculativeAcceptanceStats",
    "acceptance_rule",
    "verify_draft_tokens",
    "residual_resample",
    "effective_token_distribution",
    "sample_token_with_distribution",
]


def __getattr__(name: str) -> Any:
    # Public names load on first use: `mlxgen --help` must not wait for MLX.
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'mlxgen' has no attribute {name!r}")
