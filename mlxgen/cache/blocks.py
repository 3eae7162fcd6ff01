"""Models that cannot verify a block of tokens.

Verification takes the logits of a block for those of its tokens one by one. Models give these up to
rounding; the ones below do not, through a fault of their code in mlx-lm.
"""

from __future__ import annotations

from typing import Any

from mlxgen.errors import PairError

UNEQUAL_BLOCKS = {
    "mlx_lm.models.phi3small": "mlx-lm's phi3small adds its attention mask instead of applying it",
}
"""Module of the model's class, and what is wrong with its blocks."""


def require_equal_blocks(model: Any) -> None:
    """Raise `PairError` for a target whose blocks have other logits than their tokens alone."""
    fault = UNEQUAL_BLOCKS.get(type(model).__module__)
    if fault is not None:
        raise PairError(
            f"speculation needs a target that can read several tokens at once, and {fault}: drop "
            f"--draft-model to decode without one"
        )
