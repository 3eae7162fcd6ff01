"""Peak memory of a long speculative run of the default pair, beside what it has to hold.

    python scripts/measure_memory.py --tokens 4096

A row tells the peak since the row before, as MLX counts what it allocates. What is left of it
without weights and caches is the work of a round: a block of logits, the probabilities made of it,
and what the layers pass on.
"""

from __future__ import annotations

import argparse
from typing import Any

import mlx.core as mx
from mlx.utils import tree_reduce

from mlxgen.cache.caches import flattened
from mlxgen.config import AcceptRule, CacheConfig, SamplingConfig
from mlxgen.drafters.draft_model import DraftModel
from mlxgen.memory import fresh_draft, fresh_target
from mlxgen.models import default_pair
from mlxgen.models.loading import load
from mlxgen.sampling.chain import SamplerChain
from mlxgen.sampling.randomness import Randomness
from mlxgen.speculative.loop import SpeculativeGenerator

_ROWS = 8


def weight_bytes(model: Any) -> int:
    """Of all parameters."""
    total: int = tree_reduce(
        lambda sum_bytes, weight: sum_bytes + weight.nbytes, model.parameters(), 0
    )
    return total


def main() -> None:
    """Load, generate, print a row now and then."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    options = parser.parse_args()
    target = load(str(default_pair.target_directory()))
    draft = load(str(default_pair.draft_directory()), role="draft")
    width = target.drawable_ids
    chain, randomness = SamplerChain(SamplingConfig(temperature=0.7), width), Randomness(0)
    caches = CacheConfig()
    models = [fresh_target(target, caches), fresh_draft(target, draft, caches)]
    generator = SpeculativeGenerator(
        models[0],
        DraftModel(models[1], chain, randomness),
        chain,
        randomness,
        num_draft_tokens=options.k,
        accept_rule=AcceptRule.STOCHASTIC,
    )
    weights_bytes = sum(weight_bytes(loaded.model) for loaded in (target, draft))
    block_bytes = (options.k + 1) * width * 4
    print(f"weights of both: {_mb(weights_bytes)} MB; a block of logits: {_mb(block_bytes)} MB")
    print("| tokens | peak, MB | caches, MB | peak without weights and caches, MB | in blocks |")
    print("|---|---|---|---|---|")
    mx.clear_cache()
    mx.reset_peak_memory()
    generator.prefill([1 + 7 * i % 40000 for i in range(options.prompt_tokens)])
    for count, _ in enumerate(generator.tokens(options.tokens), 1):
        if count % max(options.tokens // _ROWS, 1) == 0:
            held = [cache for model in models for cache in flattened(model.caches)]
            caches_bytes = sum(cache.nbytes for cache in held)
            peak_bytes = mx.get_peak_memory()
            rest_bytes = peak_bytes - weights_bytes - caches_bytes
            print(
                f"| {count} | {_mb(peak_bytes)} | {_mb(caches_bytes)} | {_mb(rest_bytes)} | "
                f"{rest_bytes / block_bytes:.1f} |",
                flush=True,
            )
            mx.reset_peak_memory()


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f}"


if __name__ == "__main__":
    main()
