"""Milliseconds of a forward by its number of tokens, the numbers in turn, in one run.

    python scripts/benchmark_widths.py --shape 8b --bits 4
    python scripts/benchmark_widths.py --shape 8b --most 9 --behind 16384

A llama of that shape with random weights, behind as many tokens as asked for, with MLX's attention
and with that in pieces (`mlxgen.cache.short_attention`). A cell is the median over the cycles with
its quartiles. It tells how a verification is best run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import mlx.core as mx
from benchmark_rounds import SHAPES, random_model
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from mlxgen.backend.cuda import prepare_cuda
from mlxgen.cache.short_attention import short_attention


class Way(NamedTuple):
    """Tokens of a forward, and whether its attention goes in pieces."""

    width: int
    in_pieces: bool


def filled_caches(model: Any, tokens: int) -> list[Any]:
    """Caches of a text of that many tokens, with random keys and values."""
    size = model.args.hidden_size // model.args.num_attention_heads
    shape = (1, model.args.num_key_value_heads, tokens, size)
    caches: list[Any] = make_prompt_cache(model)
    for cache in caches:
        cache.update_and_fetch(
            mx.random.normal(shape, dtype=mx.bfloat16), mx.random.normal(shape, dtype=mx.bfloat16)
        )
    mx.eval([cache.state for cache in caches])
    return caches


def forwards_ms(model: Any, widths: range, behind: int, cycles: int) -> dict[Way, list[float]]:
    """Times by width and by whether attention went in pieces, after two cycles to warm up."""
    caches = filled_caches(model, behind)
    ways = [Way(width, in_pieces) for width in widths for in_pieces in (False, True)]
    times: dict[Way, list[float]] = {way: [] for way in ways}
    for cycle in range(-2, cycles):
        for way in ways:
            block = mx.array([[3] * way.width])
            started_s = time.perf_counter()
            with short_attention() if way.in_pieces else nullcontext():
                logits = model(block, cache=caches)
            mx.eval(logits)
            if cycle >= 0:
                times[way].append(1e3 * (time.perf_counter() - started_s))
            trim_prompt_cache(caches, way.width)
    return times


def cell(times: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} - {high:.2f})"


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--bits", type=int, help="quantise to this many bits")
    parser.add_argument("--most", type=int, default=12, help="the widest forward, in tokens")
    parser.add_argument("--behind", type=int, default=64, help="tokens of the text before it")
    parser.add_argument("--cycles", type=int, default=20)
    options = parser.parse_args()
    prepare_cuda()
    model = random_model(options.shape, mx.bfloat16, options.bits)
    widths = range(1, options.most + 1)
    times = forwards_ms(model, widths, options.behind, options.cycles)
    print("| tokens | ms, median (quartiles) | in pieces |\n|---|---|---|")
    for width in widths:
        print(f"| {width} | {cell(times[Way(width, False)])} | {cell(times[Way(width, True)])} |")


if __name__ == "__main__":
    main()
