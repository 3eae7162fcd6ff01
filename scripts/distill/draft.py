"""The draft: a small llama with tied embeddings, whose weights may be rounded as it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from .config import EMBEDDING, FINAL_NORM, AffineFormat, LlamaConfig
from .llama import gated_mlp, rms_norm, rotary_tables, rotate
from .rounding import round_straight_through
from .target import Target

_INITIAL_GAIN = 0.5  # standard deviation of a matrix's entries, times the root of its inputs


class Draft:
    """weights: float32 leaf tensors by their Hugging Face names, all with gradients."""

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Tensor], device: str) -> None:
        for name, shape in config.weight_shapes().items():
            if name not in weights or tuple(weights[name].shape) != shape:
                raise ValueError(f"the draft's weights lack {name} of shape {shape}")
        self.config = config
        self.weights: dict[str, Tensor] = {
            # A copy, since these are trained in place.
            name: weights[name].detach().to(device, torch.float32, copy=True).requires_grad_()
            for name in config.weight_shapes()
        }

    @classmethod
    def random(cls, config: LlamaConfig, seed: int, device: str) -> Draft:
        """Small random matrices; those that write to the residual stream are smaller still."""
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, shape in config.weight_shapes().items():
            if len(shape) == 1:
                weights[name] = torch.ones(shape)
                continue
            gain = _INITIAL_GAIN / math.sqrt(shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                gain /= math.sqrt(2 * config.layers)
            weights[name] = torch.randn(shape, generator=generator) * gain
        return cls(config, weights, device)

    def with_wider_mlp(self, mlp_size: int, seed: int) -> Draft:
        """The same function with more units in its MLPs, for training to go on from.

        New units read at random, with half the spread of those there are, and write nothing yet.
        Raises `ValueError` where that would be fewer units.
        """
        if mlp_size < self.config.mlp_size:
            raise ValueError(f"an MLP of {self.config.mlp_size} units cannot widen to {mlp_size}")
        config = replace(self.config, mlp_size=mlp_size)
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, shape in config.weight_shapes().items():
            known = self.weights[name].detach().cpu()
            weights[name] = known
            if tuple(known.shape) != shape:
                spread = 0.0 if "down_proj" in name else float(known.std()) / 2
                weights[name] = torch.randn(shape, generator=generator) * spread
                weights[name][: known.shape[0], : known.shape[1]] = known
        return Draft(config, weights, str(next(iter(self.weights.values())).device))

    @property
    def parameter_count(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())

    def forward(
        self, tokens: Tensor, dtype: torch.dtype, rounding: AffineFormat | None = None
    ) -> tuple[Tensor, Tensor]:
        """Final hidden states and the head.

        tokens: (rows, length) integers. Returns (rows, length, hidden) of dtype and the tied
        embedding (vocabulary, hidden) in float32, rounded if there is a rounding.
        """
        config = self.config
        weights = self.weights
        if rounding is not None:
            matrices = {name: weight for name, weight in weights.items() if weight.dim() == 2}
            weights = weights | round_straight_through(matrices, rounding)
        table = weights[EMBEDDING]
        x = functional.embedding(tokens, table).to(dtype)
        cosines, sines = rotary_tables(
            tokens.shape[1], config.head_size, config.rope_theta, x.device
        )

        for index in range(config.layers):
            prefix = f"model.layers.{index}."

            def weight(name: str, prefix: str = prefix) -> Tensor:
                return weights[f"{prefix}{name}.weight"].to(dtype)

            def heads(x: Tensor) -> Tensor:
                return x.view(*x.shape[:2], -1, config.head_size).transpose(1, 2)

            y = rms_norm(x, weight("input_layernorm"), config.norm_epsilon)
            attended = functional.scaled_dot_product_attention(
                rotate(heads(functional.linear(y, weight("self_attn.q_proj"))), cosines, sines),
                rotate(heads(functional.linear(y, weight("self_attn.k_proj"))), cosines, sines),
                heads(functional.linear(y, weight("self_attn.v_proj"))),
                is_causal=True,
                enable_gqa=True,
            )
            x = x + functional.linear(
                attended.transpose(1, 2).flatten(2), weight("self_attn.o_proj")
            )
            y = rms_norm(x, weight("post_attention_layernorm"), config.norm_epsilon)
            x = x + gated_mlp(
                y, weight("mlp.gate_proj"), weight("mlp.up_proj"), weight("mlp.down_proj")
            )
        return rms_norm(x, weights[FINAL_NORM], config.norm_epsilon), table


def project_embedding(draft: Draft, target: Target, hidden: Tensor) -> None:
    """Start the draft's embedding from the target's, kept in its most useful directions.

    hidden: a sample of the target's last hidden states, (positions, hidden). With their second
    moment C = L L' the target's logits are (E L)(inverse(L) h), a table times a vector of
    uncorrelated entries; the leading right singular vectors of E L therefore span the inputs
    that move the logits most. The scale of each direction goes half to the draft's table and half
    to its final norm. The mean row of E moves all logits alike and is taken off first.
    """
    with torch.no_grad():
        states = hidden.double()
        moment = states.T @ states / len(states)
        ridge = 1e-8 * moment.diagonal().mean()  # a short sample may not span every direction
        root = torch.linalg.cholesky(moment + ridge * torch.eye(len(moment)).to(moment))
        table = target.embedding.double()
        scaled = (table - table.mean(dim=0)) @ root
        squares, directions = torch.linalg.eigh(scaled.T @ scaled)  # in ascending order
        size = draft.config.hidden_size
        squares, directions = squares[-size:].flip(0), directions[:, -size:].flip(1)
        gain = (squares.clamp(min=0) / len(table)).pow(0.25).clamp(min=1e-6)
        draft.weights[EMBEDDING].copy_(scaled @ directions / gain)
        draft.weights[FINAL_NORM].copy_(gain)
