"""Which runs a comparison consists of, and in which order.

Speed is measured first, without the closed forms, whose computation takes time of its own. Then
the same runs of the first few seeds are made again with the closed forms, and are not timed: that
is what theory is compared with. Diagnostics draw nothing, so a repeated run gives the same text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from mlxgen.config import GenerationConfig
from mlxgen.experiment.arms import Arm
from mlxgen.experiment.prompts import Prompt
from mlxgen.experiment.setting import Machine


class Phase(str, Enum):
    """Timed without closed forms, or made again with them."""

    SPEED = "speed"
    THEORY = "theory"


@dataclass(frozen=True)
class RunKey:
    """Names one run. arm, prompt: indices; seed: of its generation."""

    phase: Phase
    arm: int
    prompt: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides what is run.

    seeds: runs of each arm at each prompt; theory_seeds: how many of them are made again.
    model_fingerprints: of target and draft, by role. command: what a person types to get this.
    """

    arms: tuple[Arm, ...]
    prompts: tuple[Prompt, ...]
    first_seed: int
    seeds: int
    theory_seeds: int
    use_template: bool
    machine: Machine
    model_names: dict[str, str]
    model_fingerprints: dict[str, str]
    command: str

    def schedule(self) -> list[RunKey]:
        """All runs. Arms take turns at each prompt, and another one goes first each time."""
        runs = []
        for phase, seeds in ((Phase.SPEED, self.seeds), (Phase.THEORY, self.theory_seeds)):
            for turn in range(seeds):
                for prompt in range(len(self.prompts)):
                    runs += [
                        RunKey(phase, arm, prompt, self.seed_of(turn, prompt))
                        for arm in rotated(len(self.arms), turn + prompt)
                        if phase is Phase.SPEED or self.arms[arm].speculates
                    ]
        return runs

    def seed_of(self, turn: int, prompt: int) -> int:
        """The seed of a prompt's run in a turn, the same for all arms.

        No two prompts share one: draws are keyed by seed and position, so their texts would hang
        together, and neither z nor the bootstrap could take them for independent.
        """
        return self.first_seed + turn * len(self.prompts) + prompt

    def config_of(self, run: RunKey) -> GenerationConfig:
        """The configuration of a run."""
        config = self.arms[run.arm].config
        diagnostics = run.phase is Phase.THEORY
        speculation = replace(config.speculation, diagnostics=diagnostics)
        return replace(config, seed=run.seed, speculation=speculation)

    def description(self) -> dict[str, Any]:
        """The experiment as JSON, for its fingerprint: two that differ in it must not be mixed."""
        config = self.arms[0].config
        return {
            "arms": [{"name": arm.name, **arm.facts} for arm in self.arms],
            "prompts": {
                "count": len(self.prompts),
                "sha256": _digest([asdict(prompt) for prompt in self.prompts]),
            },
            "first_seed": self.first_seed,
            "seeds": self.seeds,
            "theory_seeds": self.theory_seeds,
            "max_tokens": config.max_tokens,
            "ignore_eos": config.ignore_eos,
            "chat_template": self.use_template,
            "models": self.model_fingerprints,
            "machine": asdict(self.machine),
        }

    @property
    def fingerprint(self) -> str:
        """A digest of the description."""
        return _digest(self.description())


def rotated(count: int, turn: int) -> Sequence[int]:
    """0 to count - 1, beginning at turn modulo count."""
    return [(start + turn) % count for start in range(count)]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
