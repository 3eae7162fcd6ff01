"""The target model, decoding many rows in step with a key/value cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from .config import EMBEDDING, FINAL_NORM, LlamaConfig
from .llama import Precision, gated_mlp, rms_norm, rotary_tables, rotate


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor  # (hidden,)
    qkv: Tensor  # query, key and value projections one under the other
    output: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class _Cache:
    """Keys and values of all layers: (layers, rows, key/value heads, length, head size)."""

    def __init__(self, config: LlamaConfig, rows: int, length: int, like: Tensor) -> None:
        shape = (config.layers, rows, config.kv_heads, length, config.head_size)
        self.keys, self.values = like.new_empty(shape), like.new_empty(shape)
        self.cosines, self.sines = rotary_tables(
            length, config.head_size, config.rope_theta, like.device
        )


class Target:
    """A llama from a Hugging Face checkpoint.

    embedding: (vocabulary, hidden) in the device's compute dtype; head: the same in its dtype of
    logits.
    """

    def __init__(self, directory: Path, device: str, compiled: bool = False) -> None:
        self.config = config = LlamaConfig.read(directory)
        self.device = device
        self.precision = Precision.of(device)
        stored = load_file(str(directory / "model.safetensors"))
        weights = {
            name: stored[name].to(device, self.precision.compute) for name in config.weight_shapes()
        }
        self.embedding = weights[EMBEDDING]
        self.head = self.embedding.to(self.precision.logits)
        self._final_norm = weights[FINAL_NORM]
        self._layers = []
        for index in range(config.layers):
            layer = {
                name.removeprefix(f"model.layers.{index}.").removesuffix(".weight"): weight
                for name, weight in weights.items()
                if name.startswith(f"model.layers.{index}.")
            }
            qkv = [layer[f"self_attn.{part}_proj"] for part in "qkv"]
            self._layers.append(
                _Layer(
                    attention_norm=layer["input_layernorm"],
                    qkv=torch.cat(qkv),
                    output=layer["self_attn.o_proj"],
                    mlp_norm=layer["post_attention_layernorm"],
                    gate=layer["mlp.gate_proj"],
                    up=layer["mlp.up_proj"],
                    down=layer["mlp.down_proj"],
                )
            )
        self._cache: _Cache | None = None
        self._before, self._after, self._draw = self._before_attention, self._after_attention, draw
        if compiled:
            self._before = torch.compile(self._before)
            self._after = torch.compile(self._after)
            self._draw = torch.compile(self._draw)

    def start(self, rows: int, length: int) -> None:
        """Make room for rows of this many tokens."""
        self._cache = _Cache(self.config, rows, length, self.embedding)

    def finish(self) -> None:
        """Give the cache's memory back, to the device too: the next round's is of another size."""
        self._cache = None
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def step(self, tokens: Tensor, position: int) -> Tensor:
        """Feed one token a row, (rows,) integers; returns the last hidden states (rows, hidden).

        Positions must come in order from 0 after start().
        """
        cache = self._cache
        if cache is None:
            raise RuntimeError("step() before start()")
        hidden = functional.embedding(tokens, self.embedding)
        angles = cache.cosines[position], cache.sines[position]
        for index, layer in enumerate(self._layers):
            queries, keys, values = self._before(hidden, layer, *angles)
            cache.keys[index, :, :, position] = keys
            cache.values[index, :, :, position] = values
            attended = functional.scaled_dot_product_attention(
                queries,
                cache.keys[index, :, :, : position + 1],
                cache.values[index, :, :, : position + 1],
            )
            hidden = self._after(hidden, attended, layer)
        return rms_norm(hidden, self._final_norm, self.config.norm_epsilon)

    def sample(self, hidden: Tensor, temperatures: Tensor) -> Tensor:
        """One token a row, (rows,) int64, from hidden (rows, hidden) at temperatures (rows,)."""
        return self._draw(hidden, self.head, temperatures)

    def _before_attention(
        self, hidden: Tensor, layer: _Layer, cosines: Tensor, sines: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (rows, kv heads, heads / kv heads, size), keys and values (rows, kv heads, size).

        The query heads that share a key/value head stand where attention expects the positions
        of a sequence, so that the cache is read once for all of them.
        """
        config = self.config
        heads, kv_heads, size = config.heads, config.kv_heads, config.head_size
        normed = rms_norm(hidden, layer.attention_norm, config.norm_epsilon)
        projected = functional.linear(normed, layer.qkv).view(-1, heads + 2 * kv_heads, size)
        queries, keys, values = torch.split(projected, [heads, kv_heads, kv_heads], dim=1)
        queries = rotate(queries, cosines, sines).view(-1, kv_heads, heads // kv_heads, size)
        return queries, rotate(keys, cosines, sines), values

    def _after_attention(self, hidden: Tensor, attended: Tensor, layer: _Layer) -> Tensor:
        hidden = hidden + functional.linear(attended.flatten(1), layer.output)
        normed = rms_norm(hidden, layer.mlp_norm, self.config.norm_epsilon)
        return hidden + gated_mlp(normed, layer.gate, layer.up, layer.down)


def draw(hidden: Tensor, head: Tensor, temperatures: Tensor) -> Tensor:
    """A sample a row by the Gumbel-max trick, which needs no normalised probabilities."""
    logits = functional.linear(hidden.to(head.dtype), head).float() / temperatures[:, None]
    gumbel = -torch.log(-torch.log(torch.rand_like(logits)))
    return (logits + gumbel).argmax(dim=-1)
