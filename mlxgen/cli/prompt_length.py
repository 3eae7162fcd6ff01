"""How long a prompt may be, the same for every command."""

from __future__ import annotations

from mlxgen.errors import InputError
from mlxgen.models.checkpoint import Checkpoint

_LONGEST_PROMPT_WINDOWS = 2


def check_prompt_length(tokens: int, target: Checkpoint, name: str = "the prompt") -> None:
    """Refuse a prompt that is a mistake: far behind its window a model writes nonsense, after a
    prefill that may take hours. name: of the prompt, for the message."""
    window = target.declared_context_tokens
    if window is not None and tokens > _LONGEST_PROMPT_WINDOWS * window:
        raise InputError(
            f"{name} has {tokens} tokens, more than twice the model's context window of "
            f"{window}: shorten it"
        )
