"""Decode speed and time to first token of whole commands, beside mlx-lm's plain decoding.

    python scripts/benchmark_commands.py --repeats 5 -n 96
    python scripts/benchmark_commands.py --busy 2      # with two processes that keep cores busy

Every arm is a process of its own, because only one BLAS can stand behind MLX in a process. Arms
take turns, another one first in each repeat, and ratios are taken within a repeat. On a CPU mlx-lm
gets the default pair's target with the same float32 weights as mlxgen, and MLX's own BLAS; the
quantised weights as they are on disk would be several times slower there. The last line of stdout
is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from busy_processes import busy_processes
from mlx_defaults import MLX_DEFAULTS

from mlxgen.models import default_pair

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "Explain how a bicycle stays upright while it is moving."
MLX_LM = "mlx-lm plain"
_SAMPLED = ["--temp", "0.7", "--seed", "1"]
ARMS = {
    "mlxgen plain": ["--num-draft-tokens", "0"],
    "mlxgen stochastic k=3": ["--accept-rule", "stochastic"],
    "mlxgen stochastic k=auto": ["--accept-rule", "stochastic", "--num-draft-tokens", "auto"],
}
"""Options of `mlxgen generate` by arm."""


def mlx_lm_decode(max_tokens: int) -> None:
    """The child process of mlx-lm's arm: streams text to stdout, its speed to stderr."""
    from mlx_lm.generate import stream_generate
    from mlx_lm.sample_utils import make_sampler

    from mlxgen.models.loading import load

    target = load(str(default_pair.target_directory()))
    messages = [{"role": "user", "content": PROMPT}]
    prompt = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    stamps_s = []
    for response in stream_generate(
        target.model,
        target.tokenizer,
        prompt,
        max_tokens=max_tokens,
        sampler=make_sampler(temp=0.7),
    ):
        stamps_s.append(time.perf_counter())
        print(response.text, end="", flush=True)
    speed = (len(stamps_s) - 1) / (stamps_s[-1] - stamps_s[0])
    print(f"Decode: ({speed:.4f} tok/s)", file=sys.stderr)


def run(arm: str, max_tokens: int) -> tuple[float, float]:
    """Tokens per second of decoding, and milliseconds from the start of the process to its first
    byte of text."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)
    if arm == MLX_LM:
        command = [sys.executable, __file__, "--mlx-lm-child", "-n", str(max_tokens)]
        environment = {**environment, **MLX_DEFAULTS}
    else:
        command = [sys.executable, "-m", "mlxgen", "generate", "-p", PROMPT, "--profile"]
        command += ["-n", str(max_tokens), *_SAMPLED, *ARMS[arm]]
    started_s = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first_ms = 1e3 * (time.perf_counter() - started_s)
        output = b"".join(process.communicate()).decode()
    found = re.search(r"Decode: .*\(([\d.]+) tok/s\)", output)
    if process.returncode or found is None:
        raise SystemExit(f"{arm} failed:\n{output}")
    return float(found[1]), first_ms


def _spread(values: list[float], digits: int) -> str:
    """Median, smallest and largest."""
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def table(speeds: dict[str, list[float]], firsts_ms: dict[str, list[float]]) -> str:
    """Markdown: medians with the smallest and largest, ratios within a repeat."""
    rows = [
        "| arm | tok/s | ratio to mlx-lm | first token, ms | ratio to mlx-lm |",
        "|---|---|---|---|---|",
    ]
    for arm, values in speeds.items():
        ratios = [a / b for a, b in zip(values, speeds[MLX_LM], strict=True)]
        waits = [a / b for a, b in zip(firsts_ms[arm], firsts_ms[MLX_LM], strict=True)]
        rows.append(
            f"| {arm} | {_spread(values, 2)} | {_spread(ratios, 2)} | "
            f"{_spread(firsts_ms[arm], 0)} | {_spread(waits, 2)} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("-n", type=int, default=96, dest="tokens", help="tokens of a run")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--mlx-lm-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mlx_lm_child:
        mlx_lm_decode(options.tokens)
        return
    arms = [MLX_LM, *options.arms]
    speeds: dict[str, list[float]] = {arm: [] for arm in arms}
    firsts_ms: dict[str, list[float]] = {arm: [] for arm in arms}
    with busy_processes(options.busy):
        for repeat in range(options.repeats):
            shift = repeat % len(arms)
            for arm in arms[shift:] + arms[:shift]:
                speed, first_ms = run(arm, options.tokens)
                speeds[arm].append(speed)
                firsts_ms[arm].append(first_ms)
    print(table(speeds, firsts_ms))
    facts = {"tokens": options.tokens, "busy": options.busy, "cores": os.cpu_count()}
    print(json.dumps({**facts, "tokens_per_second": speeds, "first_token_ms": firsts_ms}))


if __name__ == "__main__":
    main()
