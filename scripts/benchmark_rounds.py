"""Time of a speculative round against its floor and against mlx-lm, interleaved in one run.

    python scripts/benchmark_rounds.py --pair default
    python scripts/benchmark_rounds.py --pair 8b-1b --bits 4 --rounds 6 --cycles 40

The floor of a round is its k draft forwards and its verification of width k + 1, dispatched back to
back with one synchronisation and nothing sampled, as MLX runs them (on a CPU with the BLAS that
mlxgen gives it); an arm of its own has them as mlxgen runs them, which on CUDA is another way
(docs/cuda.md) and on a CPU with another memory allocator (docs/cpu.md). A cycle runs a burst of
rounds of every arm, in turn, so that a machine whose speed drifts within seconds slows all of them
alike. The time of a burst is the median of its rounds; ratios are taken within a cycle and printed
as their median and quartiles. The last line of stdout is one JSON document. Pairs other than
`default` have random weights: they say what a round costs, not what it brings.

Each of mlx-lm's arms runs in a process of its own, with the same weights: what mlxgen sets up for
a process, its BLAS on a CPU and MLX's settings on CUDA, must not help or harm it, nor what another
arm left behind, such as cuDNN's plans for attention at a length. So does each of mlxgen's plain
steps, since a process that does not speculate is set up in another way, and on a CPU the floor,
since an allocator is a whole process's. Every process holds weights of its own: where eight copies
are too many, name fewer --arms.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from functools import partial
from importlib import metadata
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_defaults import MLX_DEFAULTS
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlxgen.backend import blas
from mlxgen.backend.allocator import restart_with_allocator
from mlxgen.backend.cuda import lacks_block_attention, prepare_cuda
from mlxgen.cache.cached_model import CachedModel
from mlxgen.cache.short_attention import short_attention
from mlxgen.cache.wide_blocks import WIDE_TOKENS, lengths_to_fill_up
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


def load_models(pair: str, bits: int | None, verifies_blocks: bool) -> tuple[Any, Any, int]:
    """Target, draft and the number of token ids. verifies_blocks: as in `load`."""
    if pair == "default":
        target = load(str(default_pair.target_directory()), verifies_blocks=verifies_blocks)
        draft = load(
            str(default_pair.draft_directory()), role="draft", verifies_blocks=verifies_blocks
        )
        return target.model, draft.model, target.drawable_ids
    prepare_cuda(verifies_blocks=verifies_blocks)
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu:
        blas.use_fast_blas()
    dtype = mx.float32 if on_cpu else mx.bfloat16
    target_shape, draft_shape = PAIRS[pair]
    mx.random.seed(0)
    width = SHAPES[target_shape].vocabulary
    return random_model(target_shape, dtype, bits), random_model(draft_shape, dtype, bits), width


Ids = Generator[int, None, None]
"""Tokens as they are generated."""


class Burst(Protocol):
    """One arm: runs some rounds, or tokens where it has no draft, and returns their times in ms."""

    def __call__(self, rounds: int, /) -> list[float]: ...


_SETTLING = 2
"""Rounds at the beginning of a burst that do not count: the first one begins with a plain token."""


class Bench:
    """The arms of one pair, each with its own caches.

    A forward takes longer the more it attends to, so all arms begin a burst behind texts of the
    same length, however many tokens their rounds brought. That length grows from burst to burst, as
    a text does: at a length for the first time, MLX may have something to set up.
    """

    def __init__(self, target: Any, draft: Any, width: int, k: int) -> None:
        self._target, self._draft, self._width, self._k = target, draft, width, k
        self._prompt = [i % width for i in PROMPT]

    def floor(self, *, as_mlxgen: bool = False) -> Burst:
        """Forwards of a round and nothing else, as MLX runs them or as mlxgen does on CUDA."""
        target_cache, draft_cache = self._caches(self._target), self._caches(self._draft)
        width, in_pieces = self._k + 1, as_mlxgen and lacks_block_attention()
        if as_mlxgen and width in lengths_to_fill_up(self._target):
            width = WIDE_TOKENS
        one, block = mx.array([[5]]), mx.array([[5] * width])
        length = len(self._prompt) - 1

        def burst(rounds: int) -> list[float]:
            nonlocal length
            _trim([*target_cache, *draft_cache], length)
            times = []
            for _ in range(rounds + _SETTLING):
                started_s = time.perf_counter()
                outputs = []
                for _ in range(self._k):
                    logits = self._draft(one, cache=draft_cache)
                    mx.async_eval(logits)
                    outputs.append(logits)
                with short_attention() if in_pieces else nullcontext():
                    outputs.append(self._target(block, cache=target_cache))
                mx.eval(*outputs)
                times.append(1e3 * (time.perf_counter() - started_s))
                # One token of each round stays.
                trim_prompt_cache(target_cache, width - 1)
                trim_prompt_cache(draft_cache, self._k - 1)
            length += _growth(rounds)
            return times[_SETTLING:]

        return burst

    def speculative(self, sampling: SamplingConfig, rule: AcceptRule, diagnostics: bool) -> Burst:
        """mlxgen's round."""
        chain, randomness = SamplerChain(sampling, self._width), Randomness(0)
        target = CachedModel(
            self._target,
            role="target",
            width=self._width,
            filled_up=lengths_to_fill_up(self._target),
            attends_in_pieces=lacks_block_attention(),
        )
        draft = CachedModel(self._draft, role="draft", width=self._width)

        def begin(text: list[int], tokens: int, stamps_s: list[float]) -> Ids:
            _rewind([target, draft], len(text) - 1)
            generator = SpeculativeGenerator(
                target,
                DraftModel(draft, chain, randomness),
                chain,
                randomness,
                num_draft_tokens=self._k,
                accept_rule=rule,
                diagnostics=diagnostics,
                on_round=lambda _: stamps_s.append(time.perf_counter()),
            )
            generator.prefill(text)
            with closing(generator.tokens(tokens)) as steps:
                for token in steps:
                    yield token.id

        return self._growing(begin)

    def plain(self, sampling: SamplingConfig) -> Burst:
        """mlxgen's plain step."""
        chain, randomness = SamplerChain(sampling, self._width), Randomness(0)
        target = CachedModel(self._target, role="target", width=self._width)
        target.make_rewindable()

        def begin(text: list[int], tokens: int, stamps_s: list[float]) -> Ids:
            _rewind([target], len(text) - 1)
            generator = PlainGenerator(target, chain, randomness)
            generator.prefill(text)
            with closing(generator.tokens(tokens)) as steps:
                for token in steps:
                    stamps_s.append(time.perf_counter())
                    yield token.id

        return self._growing(begin)

    def mlx_lm_speculative(self, temperature: float, top_p: float) -> Burst:
        """mlx-lm's round: it ends with a token that is not from the draft."""
        caches = [*self._caches(self._target), *self._caches(self._draft)]

        def begin(text: list[int], tokens: int, stamps_s: list[float]) -> Ids:
            _trim(caches, len(text) - 1)
            steps = speculative_generate_step(
                mx.array(text[-1:]),
                self._target,
                self._draft,
                num_draft_tokens=self._k,
                max_tokens=tokens,
                sampler=make_sampler(temp=temperature, top_p=top_p),
                prompt_cache=caches,
            )
            with closing(steps):
                for token, _, from_draft in steps:
                    if not from_draft:
                        stamps_s.append(time.perf_counter())
                    yield int(token)

        return self._growing(begin)

    def mlx_lm_plain(self, temperature: float, top_p: float) -> Burst:
        """mlx-lm's plain step."""
        caches = self._caches(self._target)

        def begin(text: list[int], tokens: int, stamps_s: list[float]) -> Ids:
            _trim(caches, len(text) - 1)
            steps = generate_step(
                mx.array(text[-1:]),
                self._target,
                max_tokens=tokens,
                sampler=make_sampler(temp=temperature, top_p=top_p),
                prompt_cache=caches,
            )
            with closing(steps):
                for token, _ in steps:
                    stamps_s.append(time.perf_counter())
                    yield int(token)

        return self._growing(begin)

    def _growing(self, begin: Callable[[list[int], int, list[float]], Ids]) -> Burst:
        """Bursts of what `begin` starts behind a text, each behind the text of the one before.

        begin: is told the text, how many tokens it may make, and where to put a stamp at the end of
        a round; gives ids.
        """
        text = self._prompt

        def burst(rounds: int) -> list[float]:
            nonlocal text
            stamps_s: list[float] = []
            ids = []
            tokens = (rounds + _SETTLING + 2) * (self._k + 1)
            with closing(begin(text, tokens, stamps_s)) as steps:
                while len(stamps_s) <= rounds + _SETTLING:
                    ids.append(next(steps))
                # What was dispatched ahead must not run in another arm's time. Asked for here,
                # where mlx-lm has set its stream.
                mx.synchronize()
            gaps = [1e3 * (b - a) for a, b in pairwise(stamps_s)]
            text = [*text, *ids[: _growth(rounds)]]
            return gaps[_SETTLING : _SETTLING + rounds]

        return burst

    def _caches(self, model: Any) -> list[Any]:
        """mlx-lm's caches of all of the prompt but its last token."""
        caches: list[Any] = make_prompt_cache(model)
        mx.eval(model(mx.array(self._prompt[:-1])[None], cache=caches))
        return caches


def _growth(rounds: int) -> int:
    """How many tokens longer the next burst's text is: no burst brings fewer."""
    return rounds + 1


def _trim(caches: list[Any], length: int) -> None:
    for cache in caches:
        if cache.offset < length:
            raise SystemExit(f"a cache holds {cache.offset} tokens where {length} were expected")
        cache.trim(cache.offset - length)


def _rewind(models: list[CachedModel], length: int) -> None:
    for model in models:
        model.rewind(min(model.cached_tokens, length))


FLOOR = "floor"
GREEDY = SamplingConfig()
PURE = SamplingConfig(temperature=0.7)
SAMPLED = SamplingConfig(temperature=0.7, top_p=0.9)
ROUND_ARMS: dict[str, Callable[[Bench], Burst]] = {
    FLOOR: lambda bench: bench.floor(),
    "floor as mlxgen runs it": lambda bench: bench.floor(as_mlxgen=True),
    "round T=0": lambda bench: bench.speculative(GREEDY, AcceptRule.SAMPLER_MATCH, False),
    **{
        f"round T=0.7 {rule.value}": partial(
            Bench.speculative, sampling=PURE, rule=rule, diagnostics=False
        )
        for rule in AcceptRule
    },
    **{
        f"round T=0.7 top-p 0.9 {rule.value}": partial(
            Bench.speculative, sampling=SAMPLED, rule=rule, diagnostics=False
        )
        for rule in AcceptRule
    },
    "round T=0.7 top-p 0.9 stochastic, diagnostics": lambda bench: bench.speculative(
        SAMPLED, AcceptRule.STOCHASTIC, True
    ),
}
"""The floor and mlxgen's rounds: name to what makes the measurement."""
PLAIN_ARMS: dict[str, Callable[[Bench], Burst]] = {
    "plain T=0": lambda bench: bench.plain(GREEDY),
    "plain T=0.7 top-p 0.9": lambda bench: bench.plain(SAMPLED),
}
"""The same of mlxgen's plain steps."""
MLX_LM_ARMS: dict[str, Callable[[Bench], Burst]] = {
    "mlx-lm plain T=0": lambda bench: bench.mlx_lm_plain(0.0, 0.0),
    "mlx-lm plain T=0.7 top-p 0.9": lambda bench: bench.mlx_lm_plain(0.7, 0.9),
    "mlx-lm round T=0": lambda bench: bench.mlx_lm_speculative(0.0, 0.0),
    "mlx-lm round T=0.7": lambda bench: bench.mlx_lm_speculative(0.7, 0.0),
    "mlx-lm round T=0.7 top-p 0.9": lambda bench: bench.mlx_lm_speculative(0.7, 0.9),
}
"""The same of mlx-lm."""


def made(
    arms: dict[str, Callable[[Bench], Burst]], chosen: list[str], bench: Bench
) -> dict[str, Burst]:
    """The chosen ones among the arms, in their order."""
    return {name: make(bench) for name, make in arms.items() if name in chosen}


SERVED_ARMS = {FLOOR: ROUND_ARMS[FLOOR], **PLAIN_ARMS, **MLX_LM_ARMS}
"""Those that have a process of their own, the floor on a CPU only."""


def is_served(arm: str) -> bool:
    """Whether an arm has a process of its own on this device."""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return arm in SERVED_ARMS and (arm != FLOOR or on_cpu)


class OtherProcess:
    """An arm that this script serves in a child process: a line says how many rounds a burst has,
    and a line of JSON answers with its times."""

    def __init__(self, arm: str, arguments: list[str]) -> None:
        self._arm = arm
        self._child = subprocess.Popen(
            [sys.executable, __file__, *arguments, "--serve", arm],
            env=os.environ | (MLX_DEFAULTS if arm in MLX_LM_ARMS else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def burst(self, rounds: int) -> list[float]:
        """Run one."""
        requests, answers = self._child.stdin, self._child.stdout
        assert requests is not None and answers is not None
        try:
            print(rounds, file=requests, flush=True)
            answer = answers.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise SystemExit(f"the process of {self._arm} ended; its message is above")
        times: list[float] = json.loads(answer)
        return times

    def close(self) -> None:
        """End the child."""
        self._child.communicate()


def serve(burst: Burst) -> None:
    """The child's side, until its stdin ends."""
    for line in sys.stdin:
        print(json.dumps(burst(int(line))), flush=True)


COMPARED = [
    ("plain T=0", "mlx-lm plain T=0"),
    ("plain T=0.7 top-p 0.9", "mlx-lm plain T=0.7 top-p 0.9"),
    ("round T=0", "mlx-lm round T=0"),
    ("round T=0.7 sampler-match", "mlx-lm round T=0.7"),
    *[
        (f"round T=0.7 top-p 0.9 {rule.value}", "mlx-lm round T=0.7 top-p 0.9")
        for rule in AcceptRule
    ],
    *[
        (f"round T=0.7 top-p 0.9 {rule.value}", "round T=0.7 top-p 0.9 sampler-match")
        for rule in AcceptRule
        if rule is not AcceptRule.SAMPLER_MATCH
    ],
]
"""Pairs of arms whose ratio the second table shows."""


def measure(
    bursts: dict[str, Burst], rounds: int, cycles: int, seconds: float
) -> dict[str, list[float]]:
    """Bursts of all arms in turn, after two cycles to warm up: ms by arm and cycle."""
    times: dict[str, list[float]] = {name: [] for name in bursts}
    names = list(bursts)
    started_s = time.perf_counter()
    for cycle in range(-2, cycles):
        passed_s = time.perf_counter() - started_s
        print(f"cycle {cycle} of {cycles}, {passed_s:.0f} s", file=sys.stderr, flush=True)
        if cycle > 0 and passed_s > seconds:
            break
        shift = cycle % len(names)
        for name in names[shift:] + names[:shift]:
            burst_ms = statistics.median(bursts[name](rounds))
            if cycle >= 0:
                times[name].append(burst_ms)
    return times


def _ratios(times: dict[str, list[float]], upper: str, lower: str) -> str:
    """Median and quartiles of the ratio within a cycle."""
    ratios = [a / b for a, b in zip(times[upper], times[lower], strict=True)]
    if len(ratios) == 1:
        return f"{ratios[0]:.3f} | -"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} | {low:.3f} - {high:.3f}"


def table(times: dict[str, list[float]]) -> str:
    """Markdown: median ms of each arm and its ratio to the floor, then arm against arm."""
    rows = ["| arm | ms, median | arm / floor | quartiles |", "|---|---|---|---|"]
    for name, values in times.items():
        rows.append(f"| {name} | {statistics.median(values):.2f} | {_ratios(times, name, FLOOR)} |")
    rows += ["", "| arm | against | ratio | quartiles |", "|---|---|---|---|"]
    for upper, lower in COMPARED:
        if upper in times and lower in times:
            rows.append(f"| {upper} | {lower} | {_ratios(times, upper, lower)} |")
    return "\n".join(rows)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", choices=["default", *PAIRS], default="default")
    parser.add_argument("--bits", type=int, help="quantise random weights to this many bits")
    parser.add_argument("--k", type=int, default=4, help="draft tokens of a round")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of a burst")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument(
        "--seconds", type=float, default=600, help="begin no cycle after these, but make one"
    )
    every_arm = [*ROUND_ARMS, *PLAIN_ARMS, *MLX_LM_ARMS]
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=every_arm,
        default=every_arm,
        metavar="ARM",
        help="beside the floor; the first columns of the tables name them",
    )
    parser.add_argument("--serve", choices=SERVED_ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve not in {FLOOR, *MLX_LM_ARMS}:
        restart_with_allocator()
    if options.serve is not None:
        models = load_models(options.pair, options.bits, options.serve not in PLAIN_ARMS)
        serve(SERVED_ARMS[options.serve](Bench(*models, options.k)))
        return
    # Started first: the settings of this process come with its models.
    chosen = [FLOOR, *options.arms]
    others = {
        arm: OtherProcess(arm, sys.argv[1:])
        for arm in SERVED_ARMS
        if arm in chosen and is_served(arm)
    }
    bench = Bench(*load_models(options.pair, options.bits, True), options.k)
    bursts: dict[str, Burst] = {arm: other.burst for arm, other in others.items()}
    bursts |= made(ROUND_ARMS, [arm for arm in chosen if arm not in bursts], bench)
    times = measure(bursts, options.rounds, options.cycles, options.seconds)
    for other in others.values():
        other.close()
    print(table(times))
    facts = {
        "pair": options.pair,
        "bits": options.bits,
        "k": options.k,
        "rounds": options.rounds,
        "cycles": len(times[FLOOR]),
        "device": str(mx.default_device()),
        "machine": platform.machine(),
        "mlx": metadata.version("mlx"),
        "times_ms": times,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
