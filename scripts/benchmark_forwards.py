"""Milliseconds of a forward of the default target by number of tokens, for several BLAS libraries.

    python scripts/benchmark_forwards.py --repeats 3
    python scripts/benchmark_forwards.py --busy 2      # with two processes that keep cores busy

Only one BLAS can stand behind MLX in a process, so each has a process of its own; they take turns.
A cell is the median over all forwards of that width, behind 64 tokens. Linux CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import scipy
from busy_processes import busy_processes
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from mlxgen.backend import blas
from mlxgen.models import default_pair
from mlxgen.models.loading import load

WIDTHS = range(1, 10)
_FORWARDS = 9
_MKL = "MKL"


def arms() -> dict[str, dict[str, str]]:
    """Environment by name."""
    folder = Path(scipy.__file__).parent.parent / "scipy.libs"
    openblas = str(next(folder.glob("libscipy_openblas-*.so"), "no OpenBLAS of SciPy's here"))
    return {
        "MLX's own": {blas.VARIABLE: "off"},
        "SciPy's OpenBLAS, 1 thread": {blas.VARIABLE: openblas, "OPENBLAS_NUM_THREADS": "1"},
        "SciPy's OpenBLAS, 2 threads": {blas.VARIABLE: openblas, "OPENBLAS_NUM_THREADS": "2"},
        f"{_MKL}, 1 thread": {blas.VARIABLE: "", blas.THREADS_VARIABLE: "1"},
        f"{_MKL}, 2 threads": {blas.VARIABLE: "", blas.THREADS_VARIABLE: "2"},
    }


def forwards_ms() -> list[list[float]]:
    """The child process: times by width."""
    model = load(str(default_pair.target_directory())).model
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1] * 64]), cache=caches))
    times: list[list[float]] = []
    for width in WIDTHS:
        block = mx.array([[3] * width])
        of_width = []
        for _ in range(_FORWARDS):
            started_s = time.perf_counter()
            mx.eval(model(block, cache=caches))
            of_width.append(1e3 * (time.perf_counter() - started_s))
            trim_prompt_cache(caches, width)
        times.append(of_width)
    return times


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument("--child", metavar="ARM", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        library = blas.use_fast_blas().detail
        if options.child.startswith(_MKL) and not library.startswith(_MKL):
            raise SystemExit(f"the package mkl is not installed: this is {library}")
        print(json.dumps(forwards_ms()))
        return
    found: dict[str, list[list[float]]] = {name: [[] for _ in WIDTHS] for name in arms()}
    with busy_processes(options.busy):
        for _ in range(options.repeats):
            for name, settings in arms().items():
                child = subprocess.run(
                    [sys.executable, __file__, "--child", name],
                    env={**os.environ, **settings},
                    stdout=subprocess.PIPE,
                    check=True,
                )
                for times, more in zip(found[name], json.loads(child.stdout), strict=True):
                    times += more
    print("| BLAS |" + "".join(f" {width} |" for width in WIDTHS))
    print("|---|" + "---|" * len(WIDTHS))
    for name, by_width in found.items():
        print(f"| {name} |" + "".join(f" {statistics.median(times):.0f} |" for times in by_width))


if __name__ == "__main__":
    main()
