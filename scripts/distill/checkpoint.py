"""Checkpoints of a run: the draft as a Hugging Face model, and all that going on from it needs.

config.json and model.safetensors hold the draft in float16; training_state.safetensors holds
float32 weights and the optimiser's moments, and in its metadata the step and the schedule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .config import LlamaConfig
from .draft import Draft
from .schedule import Schedule

MODEL_FILE = "model.safetensors"
STATE_FILE = "training_state.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class TrainingState:
    """Where a run stopped: float32 weights and moments by name, steps done, its schedule."""

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    step: int
    schedule: dict[str, Any]

    def restore(self, optimiser: torch.optim.Optimizer, draft: Draft) -> None:
        """Put the moments into an optimiser whose parameters are the draft's."""
        saved = optimiser.state_dict()
        names = _parameter_names(optimiser, draft)
        saved["state"] = {
            index: {"step": torch.tensor(float(self.step))}
            | {moment: self.moments[moment][name] for moment in _MOMENTS}
            for index, name in enumerate(names)
        }
        optimiser.load_state_dict(saved)


def save_checkpoint(
    directory: Path,
    draft: Draft,
    optimiser: torch.optim.Optimizer,
    step: int,
    schedule: Schedule,
) -> None:
    """Replace the checkpoint in a directory; a run killed meanwhile leaves no half-written file."""
    directory.mkdir(parents=True, exist_ok=True)
    half = {name: weight.detach().half() for name, weight in draft.weights.items()}
    _replace_file(directory / MODEL_FILE, half, {"format": "pt"})
    draft.config.write(directory, "float16")

    state = {f"weight.{name}": weight.detach() for name, weight in draft.weights.items()}
    moments = optimiser.state_dict()["state"]
    for index, name in enumerate(_parameter_names(optimiser, draft)):
        for moment in _MOMENTS:
            state[f"{moment}.{name}"] = moments[index][moment]
    metadata = {"step": str(step), "schedule": json.dumps(asdict(schedule))}
    _replace_file(directory / STATE_FILE, state, metadata)


def load_state(directory: Path) -> TrainingState:
    """What save_checkpoint left for going on."""
    path = directory / STATE_FILE
    with safe_open(str(path), framework="pt") as stored:
        metadata = stored.metadata()
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(str(path)).items():
        kind, name = key.split(".", 1)
        parts.setdefault(kind, {})[name] = tensor
    return TrainingState(
        weights=parts["weight"],
        moments={moment: parts[moment] for moment in _MOMENTS},
        step=int(metadata["step"]),
        schedule=json.loads(metadata["schedule"]),
    )


def load_draft(directory: Path, device: str) -> Draft:
    """The draft of a checkpoint, without the state of its training."""
    weights = load_file(str(directory / MODEL_FILE))
    return Draft(LlamaConfig.read(directory), weights, device)


def _parameter_names(optimiser: torch.optim.Optimizer, draft: Draft) -> list[str]:
    """The names of the optimiser's parameters in its own order."""
    names = {id(weight): name for name, weight in draft.weights.items()}
    return [names[id(weight)] for group in optimiser.param_groups for weight in group["params"]]


def _replace_file(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    partial = path.with_suffix(".partial")
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, str(partial), metadata)
    partial.replace(path)
