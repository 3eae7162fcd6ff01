"""The errors that mlxgen raises on purpose, and the exit codes they map to.

Every message is one line that names the cause and, where there is one, the cure. Code outside
the command line raises these and knows nothing of processes; `ExitCode` is read in one place,
`mlxgen.cli.outcome`.

    MlxgenError
    ├── InputError           what the user passed cannot be used            exit 2
    │   ├── OptionError      a flag, an environment variable, a combination
    │   ├── ModelError       a model, tokenizer or adapter that cannot be loaded
    │   ├── ContextError     a conversation that has outgrown the context window
    │   └── PairError        a target and a draft that do not fit each other
    └── GenerationError      a failure while running                        exit 1
        └── NonFiniteError   a model produced no usable distribution
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit statuses, as documented in docs/cli.md."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    INTERRUPTED = 130


class MlxgenError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = ExitCode.FAILED


class InputError(MlxgenError):
    """What the user passed cannot be used."""

    exit_code = ExitCode.BAD_INPUT


class OptionError(InputError):
    """An option, an environment variable or a combination of them is wrong."""


class ModelError(InputError):
    """A model, a tokenizer or an adapter cannot be found or loaded."""


class ContextError(InputError):
    """A conversation that leaves no room for a reply in the model's context window."""


class PairError(InputError):
    """A target and a draft that cannot work together."""


class GenerationError(MlxgenError):
    """Generation failed while it was running."""


class NonFiniteError(GenerationError):
    """A model's next-token logits were not finite, so there is nothing to draw from."""

    def __init__(self, role: str, step: int) -> None:
        super().__init__(
            f"the {role} model's logits are not usable at step {step} (NaN, infinity, or no token "
            f"left): its weights or config.json may be damaged, or --logit-bias bans every token"
        )
        self.role = role
        self.step = step
