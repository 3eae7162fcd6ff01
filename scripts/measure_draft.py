"""What drafts are worth on text of the default target: acceptance in closed form, and their time.

    python scripts/measure_draft.py                          # the default draft
    python scripts/measure_draft.py --draft A --draft B      # two drafts on the same texts

The target samples a text for each of the first prompts of the bundled set at temperatures 1.0 and
0.7, and writes one greedily. p is the target's distribution after each token of a text and q the
draft's; every figure is a mean over the positions of the texts of one temperature. A draft step is
timed over one token, the drafts in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxgen.cache.cached_model import CachedModel
from mlxgen.config import GenerationConfig, SamplingConfig
from mlxgen.experiment.prompts import bundled_prompts
from mlxgen.generation import generate
from mlxgen.models import default_pair
from mlxgen.models.loading import LoadedModel, load
from mlxgen.sampling.chain import SamplerChain, probabilities
from mlxgen.sampling.elementary import probability_of
from mlxgen.speculative import closed_forms

TEMPERATURES = (1.0, 0.7, 0.0)
ROWS = {
    "sum of min(p, q): `stochastic`": "sum_min",
    "sum of p q: `sampler-match`, draft sampled": "sum_prod",
    "p(argmax q): `sampler-match`, draft greedy": "top",
    "argmax q = argmax p: `greedy-argmax`": "agreement",
}
"""Label of a row of the table, and the figure in it."""

Figures = Mapping[str, list[float]]


def write_texts(
    target: LoadedModel, prompts: Sequence[str], tokens: int, temperature: float
) -> list[tuple[list[int], int]]:
    """Ids of prompt and text for each prompt, and how many of them are the text."""
    texts = []
    for number, prompt in enumerate(prompts):
        print(f"prompt {number + 1} at {temperature}", file=sys.stderr, flush=True)
        config = GenerationConfig(
            sampling=SamplingConfig(temperature=temperature), max_tokens=tokens, seed=number
        )
        result = generate(target, prompt, config)
        texts.append(([*result.prompt_ids, *result.token_ids], len(result.tokens)))
    return texts


def figures_along(
    target: LoadedModel, draft: LoadedModel, ids: list[int], count: int, temperature: float
) -> dict[str, list[float]]:
    """The figures at each of the last `count` positions; at temperature 0 agreement alone."""
    width = target.drawable_ids
    logits = []
    for model, role in ((target, "target"), (draft, "draft")):
        cached = CachedModel(model.model, role=role, width=width)
        logits.append(cached.forward(mx.array(ids[:-1], dtype=mx.int32))[-count:])
    top = mx.argmax(logits[1], axis=-1)
    figures = {"agreement": top == mx.argmax(logits[0], axis=-1)}
    if temperature > 0:
        chain = SamplerChain(SamplingConfig(temperature=temperature), width)
        history = chain.new_history([])
        p, q = (probabilities(chain.weights(rows, history).rows) for rows in logits)
        figures |= {
            "sum_min": closed_forms.sum_min(p, q),
            "sum_prod": closed_forms.sum_prod(p, q),
            "top": probability_of(top, p),
        }
    return {name: np.array(values, dtype=np.float64).tolist() for name, values in figures.items()}


def table(by_temperature: Mapping[float, Figures]) -> str:
    """One draft's figures as the draft's README has them."""
    lines = ["| | T = 1.0 | T = 0.7 | greedy |", "|---|---|---|---|"]
    for label, name in ROWS.items():
        cells = [
            f"{statistics.fmean(figures[name]):.3f}" if name in figures else "-"
            for figures in by_temperature.values()
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    counts = [f"{len(figures['agreement']):,}" for figures in by_temperature.values()]
    lines.append(f"| positions | {' | '.join(counts)} |")
    return "\n".join(lines)


def step_times_ms(
    drafts: Mapping[str, LoadedModel], width: int, steps: int
) -> dict[str, list[float]]:
    """Times of single draft steps behind 64 tokens, the drafts in turn."""
    cached = {
        name: CachedModel(draft.model, role="draft", width=width) for name, draft in drafts.items()
    }
    times: dict[str, list[float]] = {name: [] for name in drafts}
    for model in cached.values():
        mx.eval(model.forward(mx.arange(64)))
    for step in range(steps + 5):
        for name, model in cached.items():
            started_s = time.perf_counter()
            mx.eval(mx.argmax(model.forward(mx.array([step])), axis=-1))
            if step >= 5:
                times[name].append(1e3 * (time.perf_counter() - started_s))
    return times


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draft", type=Path, action="append", help="a draft (the default one)")
    parser.add_argument("--prompts", type=int, default=10, help="how many prompts (10)")
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of a text (160)")
    parser.add_argument("--steps", type=int, default=100, help="draft steps to time (100)")
    options = parser.parse_args()
    if not default_pair.is_ready():
        print("error: the default pair is not set up: run `make pair`", file=sys.stderr)
        return 1
    target = load(str(default_pair.target_directory()))
    directories = options.draft or [default_pair.draft_directory()]
    drafts = {str(path): load(str(path), role="draft") for path in directories}
    prompts = [prompt.text for prompt in bundled_prompts()[: options.prompts]]
    found: dict[str, dict[float, dict[str, list[float]]]] = {name: {} for name in drafts}
    for temperature in TEMPERATURES:
        texts = write_texts(target, prompts, options.tokens, temperature)
        for name, draft in drafts.items():
            sums: dict[str, list[float]] = {}
            for ids, count in texts:
                for figure, values in figures_along(target, draft, ids, count, temperature).items():
                    sums.setdefault(figure, []).extend(values)
            found[name][temperature] = sums
    for name, by_temperature in found.items():
        print(f"{name}\n\n{table(by_temperature)}\n")
    times = step_times_ms(drafts, target.drawable_ids, options.steps)
    first = next(iter(times.values()))
    for name, values in times.items():
        ratios = [value / other for value, other in zip(values, first, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name}: a draft step takes {statistics.median(values):.2f} ms, {middle:.3f} "
            f"({low:.3f} - {high:.3f}) of the first draft's"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
