"""Models that cannot verify a block of tokens, or not everywhere in a text.

Verification takes the logits of a block for those of its tokens one by one. Models give these up to
rounding; the ones below do not, through a fault of their code in mlx-lm or by what they are.
"""

from __future__ import annotations

from typing import Any

from mlx.nn.layers.base import Module

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


_DYNAMIC_ROPE = "DynamicNTKScalingRoPE"
_COUNTS_HEADS = "mlx_lm.models.internlm3"
"""Takes the number of heads for the length of a block."""


def equal_block_tokens(model: Any) -> int | None:
    """Most tokens of a text whose blocks have the logits of their tokens alone; None: any number.

    Dynamic NTK scaling turns positions by less the longer a text is that has outgrown the window,
    and by the same for a whole block: every token of it as if the text ended with the block.
    """
    modules = model.modules() if isinstance(model, Module) else []
    windows = [
        int(module.max_position_embeddings)
        for module in modules
        if type(module).__name__ == _DYNAMIC_ROPE
    ]
    if not windows:
        return None
    counted = model.args.num_attention_heads if type(model).__module__ == _COUNTS_HEADS else 0
    return max(min(windows) - int(counted), 0)
