"""Shapes of llama models and the settings of a run. Imports neither PyTorch nor MLX."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# The architecture that target.py and draft.py compute; any other value here would silently be
# computed wrongly, so read() refuses it. Absent means the value given.
_EXPECTED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
}
_ABSENT_IS_EXPECTED = {"hidden_act", "rope_scaling", "attention_bias", "mlp_bias"}

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a llama model with tied embeddings."""

    vocab_size: int
    hidden_size: int
    mlp_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    rope_theta: float
    norm_epsilon: float
    max_positions: int
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key/value heads")
        if self.head_size % 2:
            raise ValueError(f"rotary positions need an even head size, not {self.head_size}")

    @classmethod
    def read(cls, directory: Path) -> LlamaConfig:
        """The shape of the Hugging Face checkpoint in a directory."""
        path = directory / "config.json"
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if "quantization" in raw:
            raise ValueError(f"{path} is of a quantised model; dequantise it first")
        for key, expected in _EXPECTED.items():
            value = raw.get(key, expected if key in _ABSENT_IS_EXPECTED else None)
            if value != expected:
                raise ValueError(f"{path}: {key} is {value!r}; only {expected!r} is supported")
        try:
            return cls(
                vocab_size=raw["vocab_size"],
                hidden_size=raw["hidden_size"],
                mlp_size=raw["intermediate_size"],
                layers=raw["num_hidden_layers"],
                heads=raw["num_attention_heads"],
                kv_heads=raw.get("num_key_value_heads", raw["num_attention_heads"]),
                head_size=raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"]),
                rope_theta=raw["rope_theta"],
                norm_epsilon=raw["rms_norm_eps"],
                max_positions=raw["max_position_embeddings"],
                bos_token_id=raw.get("bos_token_id"),
                eos_token_id=raw.get("eos_token_id"),
                pad_token_id=raw.get("pad_token_id"),
            )
        except KeyError as missing:
            raise ValueError(f"{path} lacks {missing}") from None

    def write(self, directory: Path, dtype_name: str) -> None:
        """Write config.json for weights of this dtype ("float16", "bfloat16", "float32")."""
        raw = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.mlp_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_epsilon,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": dtype_name,
        }
        (directory / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")

    def draft(self, shape: DraftShape) -> LlamaConfig:
        """The config of a draft of this target: its vocabulary and constants, another shape."""
        if shape.hidden_size > self.hidden_size:
            raise ValueError(
                f"a draft's hidden size is at most the target's: {shape.hidden_size} is more than "
                f"{self.hidden_size}"
            )
        return replace(
            self,
            hidden_size=shape.hidden_size,
            mlp_size=shape.mlp_size,
            layers=shape.layers,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_size=shape.hidden_size // shape.heads,
        )

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's Hugging Face name and shape; matrices are (outputs, inputs)."""
        hidden, mlp = self.hidden_size, self.mlp_size
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "input_layernorm.weight": (hidden,),
                prefix + "self_attn.q_proj.weight": (queries, hidden),
                prefix + "self_attn.k_proj.weight": (keys, hidden),
                prefix + "self_attn.v_proj.weight": (keys, hidden),
                prefix + "self_attn.o_proj.weight": (hidden, queries),
                prefix + "post_attention_layernorm.weight": (hidden,),
                prefix + "mlp.gate_proj.weight": (mlp, hidden),
                prefix + "mlp.up_proj.weight": (mlp, hidden),
                prefix + "mlp.down_proj.weight": (hidden, mlp),
            }
        shapes[FINAL_NORM] = (hidden,)
        return shapes


@dataclass(frozen=True)
class DraftShape:
    """The sizes of a draft; the defaults are the published one's, 17.3M parameters.

    Smaller ones were tried before it, as (hidden, layers, heads, key/value heads, MLP, peak
    learning rate): 14.9M parameters (256, 3, 4, 2, 768, 2.5e-3), the first that was published;
    10.9M (192, 3, 3, 3, 576, 3e-3); and 6.7M (128, 2, 2, 2, 384, 4e-3).
    """

    hidden_size: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    mlp_size: int = 1280


@dataclass(frozen=True)
class AffineFormat:
    """MLX's affine quantisation: bits per weight, weights per scale and bias."""

    bits: int = 4
    group_size: int = 64

    def check(self, config: LlamaConfig) -> None:
        """Refuse a model with a matrix whose rows are not whole groups."""
        for name, shape in config.weight_shapes().items():
            if len(shape) == 2 and shape[1] % self.group_size:
                raise ValueError(
                    f"{name} has {shape[1]} inputs, not a multiple of the group size "
                    f"{self.group_size}"
                )


@dataclass(frozen=True)
class CorpusSettings:
    """How much text the target writes, in rounds of rows decoded in step."""

    tokens: int = 21_000_000
    rows_per_round: int = 8192
    long_row_tokens: int = 512
    short_row_tokens: int = 256
    long_share: float = 0.2  # of the tokens
    request_share: float = 0.45  # of the rows
    held_out_rows: int = 128  # of each round, never trained on

    def __post_init__(self) -> None:
        if not 0 <= self.held_out_rows < self.rows_per_round:
            raise ValueError("each round needs more rows than are held out of it")
        if not 0 <= self.long_share <= 1:
            raise ValueError(f"the long rows' share of the tokens cannot be {self.long_share}")

    def round_lengths(self) -> list[int]:
        """The length in tokens of each round's rows: the nearest whole rounds, one at least."""
        lengths: list[int] = []
        for length, share in (
            (self.long_row_tokens, self.long_share),
            (self.short_row_tokens, 1 - self.long_share),
        ):
            lengths += [length] * round(self.tokens * share / (self.rows_per_round * length))
        return lengths or [self.short_row_tokens]


@dataclass(frozen=True)
class TrainingSettings:
    """Sizes and rates of training that do not change as it goes."""

    batch_tokens: int = 32_768
    position_share: float = 0.75  # of a batch's positions enter the loss
    chunk_positions: int = 8192  # whose logits exist at a time
    log_every_steps: int = 200
    save_every_steps: int = 2000
    seed: int = 0
