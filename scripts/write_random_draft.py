"""Write a useless draft: the default draft's shape with weights drawn at random.

    python scripts/write_random_draft.py DIRECTORY

`--num-draft-tokens auto` has to notice that such a draft never pays.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import mlx.core as mx

from mlxgen.models import default_pair


def randomised(name: str, weight: mx.array) -> mx.array:
    """A weight of the same shape and dtype. Norms and scales stay, so that logits are of usual
    size."""
    if weight.dtype == mx.uint32:
        high, low = (mx.random.randint(0, 2**16, weight.shape).astype(mx.uint32) for _ in "12")
        return high * 2**16 + low
    if "norm" in name or name.endswith(("scales", "biases")):
        return weight
    return (0.02 * mx.random.normal(weight.shape)).astype(weight.dtype)


def main() -> None:
    """Parse, draw, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shutil.copytree(default_pair.draft_directory(), options.directory)
    weights = options.directory / "model.safetensors"
    mx.random.seed(options.seed)
    loaded = mx.load(str(weights))
    assert isinstance(loaded, dict)
    drawn = {name: randomised(name, weight) for name, weight in loaded.items()}
    mx.eval(drawn)
    mx.save_safetensors(str(weights), drawn, metadata={"format": "mlx"})


if __name__ == "__main__":
    main()
