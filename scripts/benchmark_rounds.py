"""Time of a speculative round against its floor and against mlx-lm, interleaved in one run.

    python scripts/benchmark_rounds.py --pair default
    python scripts/benchmark_rounds.py --pair 8b-1b --bits 4 --rounds 40 --repeats 5

The floor of a round is its k draft forwards and its verification of width k + 1, dispatched back to
back with one synchronisation and nothing sampled. Every arm is measured in every repeat, in turn;
times are medians over rounds, ratios are medians over repeats, with the smallest and the largest.
The last line of stdout is one JSON document. Pairs other than `default` have random weights: they
say what a round costs, not what it brings.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlxgen.backend.blas import use_fast_blas
from mlxgen.cache.cached_model import CachedModel
from mlxgen.config import AcceptRule, SamplingConfig
from mlxgen.decoding.plain import PlainGenerator
from mlxgen.drafters.draft_model import DraftModel
from mlxgen.models import default_pair
from mlxgen.models.loading import load
from mlxgen.sampling.chain import SamplerChain
from mlxgen.sampling.randomness import Randomness
from mlxgen.speculative.loop import SpeculativeGenerator

PROMPT = [1 + 7 * i % 40000 for i in range(64)]


class Shape(NamedTuple):
    """Sizes of a llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int


SHAPES = {
    "8b": Shape(4096, 32, 32, 8, 14336, 128256),
    "1b": Shape(2048, 16, 32, 8, 8192, 128256),
    "135m": Shape(576, 30, 9, 3, 1536, 49152),
    "15m": Shape(256, 3, 4, 2, 768, 49152),
}
PAIRS = {"8b-1b": ("8b", "1b"), "135m-15m": ("135m", "15m")}


def random_model(shape: str, dtype: mx.Dtype, bits: int | None) -> Any:
    """A llama of that shape with random weights, peaked enough to look like a language model."""
    size = SHAPES[shape]
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            intermediate_size=size.mlp,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            rms_norm_eps=1e-5,
            vocab_size=size.vocabulary,
            max_position_embeddings=8192,
            tie_word_embeddings=shape != "8b",
        )
    )
    model.model.norm.weight = 6 * model.model.norm.weight
    model.set_dtype(dtype)
    if bits is not None:
        nn.quantize(  # type: ignore[attr-defined]  # the stub lacks it
            model, group_size=64, bits=bits
        )
    mx.eval(model.parameters())
    return model


def load_models(pair: str, bits: int | None) -> tuple[Any, Any, int]:
    """Target, draft and the number of token ids."""
    if pair == "default":
        target = load(str(default_pair.target_directory()))
        draft = load(str(default_pair.draft_directory()), role="draft")
        return target.model, draft.model, target.drawable_ids
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu:
        use_fast_blas()
    dtype = mx.float32 if on_cpu else mx.bfloat16
    target_shape, draft_shape = PAIRS[pair]
    width = SHAPES[target_shape].vocabulary
    return random_model(target_shape, dtype, bits), random_model(draft_shape, dtype, bits), width


class Bench:
    """The arms of one pair. Each returns the median time of a round, or of a token, in ms."""

    def __init__(self, target: Any, draft: Any, width: int, k: int, rounds: int) -> None:
        self._target, self._draft, self._width = target, draft, width
        self._k, self._rounds = k, rounds
        self._prompt = [i % width for i in PROMPT]

    def floor(self) -> float:
        """Forwards of a round and nothing else."""
        caches = make_prompt_cache(self._target), make_prompt_cache(self._draft)
        prompt = mx.array(self._prompt)[None]
        mx.eval(self._target(prompt, cache=caches[0]), self._draft(prompt, cache=caches[1]))
        one, block = mx.array([[5]]), mx.array([[5] * (self._k + 1)])
        times = []
        for _ in range(self._rounds):
            started_s = time.perf_counter()
            outputs = []
            for _ in range(self._k):
                logits = self._draft(one, cache=caches[1])
                mx.async_eval(logits)
                outputs.append(logits)
            mx.eval(self._target(block, cache=caches[0]), *outputs)
            times.append(time.perf_counter() - started_s)
            trim_prompt_cache(caches[0], self._k + 1)
            trim_prompt_cache(caches[1], self._k)
        return 1e3 * statistics.median(times)

    def speculative(self, sampling: SamplingConfig, rule: AcceptRule, diagnostics: bool) -> float:
        """mlxgen's round."""
        chain, randomness = SamplerChain(sampling, self._width), Randomness(0)
        stamps: list[float] = []
        target = CachedModel(self._target, role="target", width=self._width)
        draft = CachedModel(self._draft, role="draft", width=self._width)
        generator = SpeculativeGenerator(
            target,
            DraftModel(draft, chain, randomness),
            chain,
            randomness,
            num_draft_tokens=self._k,
            accept_rule=rule,
            diagnostics=diagnostics,
            on_round=lambda _: stamps.append(time.perf_counter()),
        )
        generator.prefill(self._prompt)
        tokens = generator.tokens(self._rounds * (self._k + 1) + self._k)
        for _ in tokens:
            if len(stamps) > self._rounds:
                break
        tokens.close()
        return _median_gap_ms(stamps)

    def plain(self, sampling: SamplingConfig) -> float:
        """mlxgen's plain step."""
        generator = PlainGenerator(
            CachedModel(self._target, role="target", width=self._width),
            SamplerChain(sampling, self._width),
            Randomness(0),
        )
        generator.prefill(self._prompt)
        return _median_gap_ms([time.perf_counter() for _ in generator.tokens(self._rounds + 1)])

    def mlx_lm_speculative(self, temperature: float, top_p: float) -> float:
        """mlx-lm's round: it ends with a token that is not from the draft."""
        stamps = []
        for _, _, from_draft in speculative_generate_step(
            mx.array(self._prompt),
            self._target,
            self._draft,
            num_draft_tokens=self._k,
            max_tokens=self._rounds * (self._k + 1),
            sampler=make_sampler(temp=temperature, top_p=top_p),
        ):
            if not from_draft:
                stamps.append(time.perf_counter())
            if len(stamps) > self._rounds:
                break
        return _median_gap_ms(stamps)

    def mlx_lm_plain(self, temperature: float, top_p: float) -> float:
        """mlx-lm's plain step."""
        steps = generate_step(
            mx.array(self._prompt),
            self._target,
            max_tokens=self._rounds + 1,
            sampler=make_sampler(temp=temperature, top_p=top_p),
        )
        return _median_gap_ms([time.perf_counter() for _ in steps])


def _median_gap_ms(stamps: list[float]) -> float:
    return 1e3 * statistics.median(b - a for a, b in pairwise(stamps))


def arms(bench: Bench) -> dict[str, Callable[[], float]]:
    """Name to measurement."""
    greedy = SamplingConfig()
    sampled = SamplingConfig(temperature=0.7, top_p=0.9)
    pure = SamplingConfig(temperature=0.7)
    match, found = AcceptRule.SAMPLER_MATCH, {}
    found["floor"] = bench.floor
    found["plain T=0"] = lambda: bench.plain(greedy)
    found["plain T=0.7 top-p 0.9"] = lambda: bench.plain(sampled)
    found["round T=0"] = lambda: bench.speculative(greedy, match, False)
    for rule in AcceptRule:
        found[f"round T=0.7 {rule.value}"] = _round(bench, pure, rule, False)
        found[f"round T=0.7 top-p 0.9 {rule.value}"] = _round(bench, sampled, rule, False)
    found["round T=0.7 top-p 0.9 stochastic, diagnostics"] = _round(
        bench, sampled, AcceptRule.STOCHASTIC, True
    )
    found["mlx-lm plain T=0"] = lambda: bench.mlx_lm_plain(0.0, 0.0)
    found["mlx-lm plain T=0.7 top-p 0.9"] = lambda: bench.mlx_lm_plain(0.7, 0.9)
    found["mlx-lm round T=0"] = lambda: bench.mlx_lm_speculative(0.0, 0.0)
    found["mlx-lm round T=0.7 top-p 0.9"] = lambda: bench.mlx_lm_speculative(0.7, 0.9)
    return found


def _round(
    bench: Bench, sampling: SamplingConfig, rule: AcceptRule, diagnostics: bool
) -> Callable[[], float]:
    return lambda: bench.speculative(sampling, rule, diagnostics)


def measure(bench: Bench, repeats: int) -> dict[str, list[float]]:
    """Each arm once to warm up, then all arms in turn, `repeats` times: ms by arm and repeat."""
    measurements = arms(bench)
    for run in measurements.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in measurements}
    names = list(measurements)
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(measurements[name]())
    return times


def table(times: dict[str, list[float]]) -> str:
    """Markdown: median ms of each arm, and its ratio to the floor, repeat by repeat."""
    rows = ["| arm | ms, median | arm / floor | smallest - largest |", "|---|---|---|---|"]
    for name, values in times.items():
        ratios = [value / floor for value, floor in zip(values, times["floor"], strict=True)]
        rows.append(
            f"| {name} | {statistics.median(values):.2f} | {statistics.median(ratios):.3f} | "
            f"{min(ratios):.3f} - {max(ratios):.3f} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", choices=["default", *PAIRS], default="default")
    parser.add_argument("--bits", type=int, help="quantise random weights to this many bits")
    parser.add_argument("--k", type=int, default=4, help="draft tokens of a round")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    target, draft, width = load_models(options.pair, options.bits)
    bench = Bench(target, draft, width, options.k, options.rounds)
    times = measure(bench, options.repeats)
    print(table(times))
    facts = {
        "pair": options.pair,
        "bits": options.bits,
        "k": options.k,
        "rounds": options.rounds,
        "repeats": options.repeats,
        "device": str(mx.default_device()),
        "machine": platform.machine(),
        "mlx": metadata.version("mlx"),
        "times_ms": times,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
