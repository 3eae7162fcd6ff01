"""Milliseconds of a forward by its number of tokens, the numbers in turn, in one run.

    python scripts/benchmark_widths.py --shape 8b --bits 4

A llama of that shape with random weights, behind 64 tokens. A cell is the median over the cycles
with its quartiles. It tells from how many tokens on a verification is cheaper when it is run wider.
"""

from __future__ import annotations

import argparse
import statistics
import time

import mlx.core as mx
from benchmark_rounds import SHAPES, random_model
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from mlxgen.backend.cuda import prepare_cuda


def forwards_ms(model: object, widths: range, cycles: int) -> dict[int, list[float]]:
    """Times by width, after two cycles to warm up."""
    assert callable(model)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1] * 64]), cache=caches))
    times: dict[int, list[float]] = {width: [] for width in widths}
    for cycle in range(-2, cycles):
        for width in widths:
            block = mx.array([[3] * width])
            started_s = time.perf_counter()
            mx.eval(model(block, cache=caches))
            if cycle >= 0:
                times[width].append(1e3 * (time.perf_counter() - started_s))
            trim_prompt_cache(caches, width)
    return times


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--bits", type=int, help="quantise to this many bits")
    parser.add_argument("--most", type=int, default=12, help="the widest forward, in tokens")
    parser.add_argument("--cycles", type=int, default=20)
    options = parser.parse_args()
    prepare_cuda()
    model = random_model(options.shape, mx.bfloat16, options.bits)
    print("| tokens | ms, median | quartiles |\n|---|---|---|")
    for width, times in forwards_ms(model, range(1, options.most + 1), options.cycles).items():
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        print(f"| {width} | {middle:.2f} | {low:.2f} - {high:.2f} |")


if __name__ == "__main__":
    main()
