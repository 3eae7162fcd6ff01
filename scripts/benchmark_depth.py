"""Speed of `--num-draft-tokens auto` beside plain decoding and fixed lengths, in bursts.

    python scripts/benchmark_depth.py --lengths 0 1 2
    python scripts/benchmark_depth.py --draft /tmp/useless-draft --lengths 0

Where a machine's pace drifts within seconds, whole runs one after another differ by more than the
lengths do. Here all arms decode the same prompt at the same time, a few tokens each in turn, and
each has a clock that runs only in its own turns. All arms share the noise of gumbel-match, so all
emit the same text. Ratios are taken within a prompt. The default pair, unless --draft names
another draft.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxgen.backend.allocator import restart_with_allocator
from mlxgen.config import AcceptRule, CacheConfig, SamplingConfig
from mlxgen.decoding.plain import PlainGenerator
from mlxgen.drafters.draft_model import DraftModel
from mlxgen.memory import fresh_draft, fresh_target
from mlxgen.models import default_pair
from mlxgen.models.loading import LoadedModel, load
from mlxgen.sampling.chain import SamplerChain
from mlxgen.sampling.randomness import Randomness
from mlxgen.speculative.depth import AdaptiveDepth, DraftDepth, FixedDepth
from mlxgen.speculative.loop import SpeculativeGenerator
from mlxgen.text.prompt import encode_prompt

PROMPTS = Path(__file__).resolve().parent.parent / "docs" / "benchmark_results" / "prose.jsonl"
_AUTO = "auto"
_BURST_TOKENS = 8


class Arm:
    """A run that can be stopped and goes on, and the time it took while it was not stopped."""

    def __init__(
        self, length: str, target: LoadedModel, draft: LoadedModel, prompt: list[int], seed: int
    ) -> None:
        self._spent_s, self._since_s = 0.0, 0.0
        chain = SamplerChain(SamplingConfig(temperature=0.7), target.drawable_ids)
        randomness = Randomness(seed)
        caches = CacheConfig()
        model = fresh_target(target, caches)
        generator: PlainGenerator | SpeculativeGenerator
        if length == "0":
            generator = PlainGenerator(model, chain, randomness)
        else:
            depth: DraftDepth = AdaptiveDepth() if length == _AUTO else FixedDepth(int(length))
            generator = SpeculativeGenerator(
                model,
                DraftModel(fresh_draft(target, draft, caches), chain, randomness),
                chain,
                randomness,
                depth=depth,
                accept_rule=AcceptRule.GUMBEL_MATCH,
                clock=self.clock,
            )
        generator.prefill(prompt)
        self._generator = generator
        self._tokens: Iterator[Any] | None = None

    def clock(self) -> float:
        """Seconds of this arm's own turns."""
        return self._spent_s + time.perf_counter() - self._since_s

    def take(self, count: int, budget: int) -> None:
        """Emit some tokens more of a run of `budget` tokens."""
        if self._tokens is None:
            self._tokens = self._generator.tokens(budget)
        self._since_s = time.perf_counter()
        for _ in range(count):
            next(self._tokens)
        # What was dispatched ahead must not run in another arm's turn.
        mx.synchronize()
        self._spent_s = self.clock()

    @property
    def spent_s(self) -> float:
        """Seconds so far."""
        return self._spent_s


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draft", help="directory of another draft")
    parser.add_argument("--lengths", nargs="+", default=["0", "1", "2", "3"], metavar="K")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=5)
    options = parser.parse_args()
    restart_with_allocator()
    target = load(str(default_pair.target_directory()))
    draft = load(options.draft or str(default_pair.draft_directory()), role="draft")
    texts = [json.loads(line) for line in PROMPTS.read_text("utf-8").splitlines()]
    names = [*options.lengths, _AUTO]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for seed, text in enumerate(texts[: options.prompts]):
        words = text if isinstance(text, str) else text["prompt"]
        prompt = encode_prompt(target.tokenizer, words)
        arms = {name: Arm(name, target, draft, prompt, seed) for name in names}
        turns = options.tokens // _BURST_TOKENS
        for turn in range(turns):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                arms[name].take(_BURST_TOKENS, options.tokens)
        for name, arm in arms.items():
            speeds[name].append(_BURST_TOKENS * turns / arm.spent_s)
    cells = [f"auto / it, prompt {number}" for number in range(1, len(speeds[_AUTO]) + 1)]
    print("| k | tok/s, median |" + "".join(f" {cell} |" for cell in [*cells, "median"]))
    print("|---|---|" + "---|" * (len(cells) + 1))
    for name, values in speeds.items():
        ratios = [a / b for a, b in zip(speeds[_AUTO], values, strict=True)]
        cells = [f"{ratio:.3f}" for ratio in [*ratios, statistics.median(ratios)]]
        print(
            f"| {name} | {statistics.median(values):.2f} |"
            + "".join(f" {cell} |" for cell in cells)
        )


if __name__ == "__main__":
    main()
