"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import TrainingState, save_checkpoint
from .config import EMBEDDING, AffineFormat, TrainingSettings
from .corpus import Batches, Round
from .draft import Draft
from .llama import fast_attention
from .losses import head_loss
from .prompts import Role
from .schedule import Schedule
from .target import Target

# Total variation on the nearly greedy rows is taken at this temperature: it is close to
# disagreement there, yet has a gradient on more than the one or two likeliest tokens.
COLDEST_TEMPERATURE = 0.4

_WEIGHT_DECAY = 0.05
_BETAS = (0.9, 0.97)
_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class LoggedStep:
    """Means over the steps since the last one logged; kl in nats."""

    step: int
    loss: float
    kl: float
    overlap: float
    agreement: float


@dataclass
class TrainingSummary:
    """What a run did: its first step and the one after its last, and the logged means."""

    first_step: int
    next_step: int
    tokens: int = 0
    seconds: float = 0.0
    logged: list[LoggedStep] = field(default_factory=list)


def make_optimiser(draft: Draft) -> torch.optim.Optimizer:
    """AdamW; the embedding and the norms do not decay."""
    decaying: list[Tensor] = []
    constant: list[Tensor] = []
    for name, weight in draft.weights.items():
        decays = weight.dim() == 2 and name != EMBEDDING
        (decaying if decays else constant).append(weight)
    groups = [
        {"params": decaying, "weight_decay": _WEIGHT_DECAY},
        {"params": constant, "weight_decay": 0.0},
    ]
    fused = decaying[0].is_cuda
    return torch.optim.AdamW(groups, lr=0.0, betas=_BETAS, eps=1e-8, fused=fused)


def choose_positions(
    roles: Tensor, temperatures: Tensor, share: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The positions of a batch that enter the loss, and one over the temperature at each.

    roles: (rows, length) uint8; temperatures: (rows,). A position stands for the token after it.
    All positions before the target's answers and texts come first, then those before its users'
    turns, then forced ones, at random among equals. Returns flat indices (positions,) int64 and
    (positions,) float32.
    """
    following = torch.zeros_like(roles)
    following[:, :-1] = roles[:, 1:]
    own = following >= Role.ANSWER
    worth = torch.where(own, int(Role.ANSWER), following).float()
    # Drawn on the CPU, so that all devices choose the same.
    worth += torch.rand(roles.shape, generator=generator).to(roles.device)
    indices = worth.flatten().topk(max(1, int(roles.numel() * share)), sorted=False).indices
    inverse = (1 / temperatures.clamp(min=COLDEST_TEMPERATURE))[:, None]
    return indices, torch.where(own, inverse, 1.0).flatten()[indices]


def train(
    draft: Draft,
    target: Target,
    rounds: Sequence[Round],
    schedule: Schedule,
    settings: TrainingSettings,
    rounding: AffineFormat,
    stop_at_step: int,
    out: Path,
    log: Callable[[str], None],
    state: TrainingState | None = None,
) -> TrainingSummary:
    """Train from the state's step, or from 0, to a step of the schedule; checkpoints go to out."""
    optimiser = make_optimiser(draft)
    first_step = 0
    if state is not None:
        state.restore(optimiser, draft)
        first_step = state.step
        if state.schedule != asdict(schedule):
            log(f"the schedule differs from the checkpoint's, which was {state.schedule}")
    last_step = min(stop_at_step, schedule.steps)
    log(f"training from step {first_step} to {last_step} of {schedule.steps}")
    batches = Batches(rounds, settings.batch_tokens, settings.seed)
    summary = TrainingSummary(first_step, first_step)
    sums, since = torch.zeros(4, device=target.device), 0
    begin = time.monotonic()
    for step in range(first_step, last_step):
        part, rows = batches[step]
        tokens = part.tokens[rows]
        indices, inverse_temperatures = choose_positions(
            part.roles[rows],
            part.temperatures[rows],
            settings.position_share,
            torch.Generator().manual_seed((settings.seed << 32) + step),
        )
        weights = schedule.loss_weights(step)
        with fast_attention(target.device):
            hidden, table = draft.forward(
                tokens, target.precision.compute, rounding if schedule.rounds(step) else None
            )
            hidden = hidden.flatten(0, 1)[indices]
            result = head_loss(
                hidden,
                table,
                part.hidden[rows].flatten(0, 1)[indices],
                target.head,
                inverse_temperatures,
                weights,
                settings.chunk_positions,
            )
            torch.autograd.backward((hidden, table), (result.grad_hidden, result.grad_table))
        torch.nn.utils.clip_grad_norm_(draft.weights.values(), _GRADIENT_NORM)
        for group in optimiser.param_groups:
            group["lr"] = schedule.rate(step)
        optimiser.step()
        optimiser.zero_grad()

        summary.tokens += tokens.numel()
        summary.next_step = step + 1
        sums += torch.cat([result.loss[None], result.statistics])
        since += 1
        if summary.next_step % settings.log_every_steps == 0 or summary.next_step == last_step:
            logged = LoggedStep(summary.next_step, *(sums / since).tolist())
            summary.logged.append(logged)
            log(
                f"step {logged.step}, {time.monotonic() - begin:.0f} s, "
                f"{summary.tokens / 1e6:.1f}M tokens, epoch {step / batches.per_epoch:.1f}: "
                f"loss {logged.loss:.4f} (TV weight {weights.tv:.2f}), KL {logged.kl:.3f} nats, "
                f"overlap {logged.overlap:.4f}, agreement {logged.agreement:.4f}"
            )
            sums, since = torch.zeros_like(sums), 0
        if summary.next_step % settings.save_every_steps == 0 or summary.next_step == last_step:
            save_checkpoint(out, draft, optimiser, summary.next_step, schedule)
    summary.seconds = time.monotonic() - begin
    return summary
