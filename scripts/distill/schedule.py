"""What changes as training goes: learning rate, the mix of losses, and rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass

# What is left of the KL divergence once total variation has its full weight. It keeps a gradient
# on tokens that the draft gives no probability, where total variation's vanishes.
FINAL_KL_WEIGHT = 0.1


@dataclass(frozen=True)
class LossWeights:
    """Weights of the two losses: KL divergence in nats, total variation as a probability."""

    kl: float
    tv: float


@dataclass(frozen=True)
class Schedule:
    """Training as a function of progress, the share of the planned steps that are done."""

    steps: int = 20_700
    warmup_steps: int = 200
    learning_rate: float = 2.5e-3  # at the peak
    tv_from_share: float = 0.35  # total variation comes in
    tv_full_share: float = 0.6  # and has its full weight
    round_from_share: float = 0.7  # weights are rounded from here on

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("a schedule needs at least one step")
        if self.tv_full_share < self.tv_from_share:
            raise ValueError("total variation cannot be full before it comes in")

    def progress(self, step: int) -> float:
        return step / self.steps

    def rate(self, step: int) -> float:
        """The learning rate: a linear warm-up times a half cosine down to nothing."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.learning_rate * warmup * (1 + math.cos(math.pi * self.progress(step))) / 2

    def loss_weights(self, step: int) -> LossWeights:
        width = self.tv_full_share - self.tv_from_share
        past = self.progress(step) - self.tv_from_share
        ramp = min(1.0, max(0.0, past / width)) if width > 0 else float(past >= 0)
        return LossWeights(kl=1 - (1 - FINAL_KL_WEIGHT) * ramp, tv=ramp)

    def rounds(self, step: int) -> bool:
        """Whether the forward pass of this step runs on rounded weights."""
        return self.progress(step) >= self.round_from_share
