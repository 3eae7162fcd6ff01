"""Measure what every rule accepts on the default pair, beside what theory says it accepts.

python scripts/measure_acceptance.py            # 5 prompts of 40 tokens, into the page in docs/
python scripts/measure_acceptance.py --tokens 200 --show    # to stdout instead

Every number of the table is of this run. A row sums the statistics of one run for each prompt.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import mlx.core as mx

from mlxgen.config import AcceptRule, GenerationConfig, SamplingConfig, SpeculationConfig
from mlxgen.generation import generate
from mlxgen.models import default_pair
from mlxgen.models.loading import LoadedModel, load
from mlxgen.speculative.statistics import SpeculativeAcceptanceStats
from mlxgen.speculative.theory_check import TheoryCheck

PAGE = Path(__file__).resolve().parent.parent / "docs" / "speculative-acceptance.md"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
TEMPERATURES = (0.7, 1.0)
NUM_DRAFT_TOKENS = 3
PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a map.",
    "Explain how a bicycle stays upright while it is moving.",
    "Give me a recipe for a simple vegetable soup.",
    "Write a polite email asking to move a meeting to Thursday.",
    "What were the main causes of the fall of the Roman Empire?",
)


@dataclass(frozen=True)
class Arm:
    """A rule, maybe with a temperature of its own for the draft."""

    rule: AcceptRule
    draft_temperature: float | None = None

    @property
    def label(self) -> str:
        """As a reader would type it."""
        own = self.draft_temperature
        return f"`{self.rule.value}`" + ("" if own is None else f", `--draft-temp {own:g}`")


ARMS = (
    Arm(AcceptRule.SAMPLER_MATCH),
    Arm(AcceptRule.SAMPLER_MATCH, draft_temperature=0.0),
    Arm(AcceptRule.GUMBEL_MATCH),
    Arm(AcceptRule.STOCHASTIC),
    Arm(AcceptRule.BLOCK),
)


@dataclass(frozen=True)
class Row:
    """The statistics of one arm at one temperature, a run for each prompt."""

    temperature: float
    arm: Arm
    runs: Sequence[SpeculativeAcceptanceStats]

    @property
    def rounds(self) -> int:
        """Verification forwards."""
        return sum(run.rounds for run in self.runs)

    @property
    def tested(self) -> int:
        """Positions tested."""
        return sum(run.positions_tested for run in self.runs)

    @property
    def accepted(self) -> int:
        """Proposals accepted."""
        return sum(run.accepted for run in self.runs)

    @property
    def check(self) -> TheoryCheck:
        """All runs against theory."""
        return TheoryCheck.combined([run.check for run in self.runs])

    def markdown(self) -> str:
        """One row of the table. Under `block` theory speaks of lengths, elsewhere of positions."""
        tested, rounds = max(self.tested, 1), max(self.rounds, 1)
        position, length = f"{self.check.expected / tested:.4f}", "-"
        if self.arm.rule is AcceptRule.BLOCK:
            position, length = "-", f"{self.check.expected / rounds:.4f}"
        return (
            f"| {self.temperature:.1f} | {self.arm.label} | {self.rounds} | {self.tested} "
            f"| {self.accepted / tested:.4f} | {position} "
            f"| {self.accepted / rounds:.4f} | {length} | {self.check.z + 0.0:.2f} |"
        )


def measure(
    target: LoadedModel,
    draft: LoadedModel,
    prompts: Sequence[str],
    tokens: int,
    seed: int,
    progress: Callable[[str], None],
) -> list[Row]:
    """Run every arm at every temperature."""
    rows = []
    for temperature in TEMPERATURES:
        for arm in ARMS:
            progress(f"{arm.label} at {temperature:.1f}")
            runs = []
            for number, prompt in enumerate(prompts):
                config = GenerationConfig(
                    sampling=SamplingConfig(temperature=temperature),
                    speculation=SpeculationConfig(
                        num_draft_tokens=NUM_DRAFT_TOKENS,
                        accept_rule=arm.rule,
                        draft_temperature=arm.draft_temperature,
                        diagnostics=True,
                    ),
                    max_tokens=tokens,
                    seed=seed + number,
                )
                statistics = generate(target, prompt, config, draft=draft).statistics
                if statistics is not None:
                    runs.append(statistics)
            rows.append(Row(temperature, arm, runs))
    return rows


def hardware() -> str:
    """Processor, cores and, where MLX runs on one, GPU."""
    cores = f"{os.cpu_count()} CPU cores"
    parts = [f"{_cpu_model()}, {cores}" if _cpu_model() else cores]
    if mx.default_device().type == mx.DeviceType.gpu:
        parts.append(f"GPU {mx.device_info().get('device_name', 'unknown')}")
    return ", ".join(parts)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        return names[0].partition(":")[2].strip() if names else platform.machine()
    asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return platform.processor()


def report(rows: Sequence[Row], prompts: Sequence[str], tokens: int, seed: int) -> str:
    """What goes between the markers."""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    precision = "float32" if on_cpu else "the precision of the model files"
    command = (
        f"python scripts/measure_acceptance.py --prompts {len(prompts)} --tokens {tokens} "
        f"--seed {seed}"
    )
    lines = [
        f"Printed by `{command}`",
        f"on {hardware()}, mlx {metadata.version('mlx')}, {precision}, with k = "
        f"{NUM_DRAFT_TOKENS}.",
        f"A row sums one run for each of these chat prompts, at most {tokens} new tokens each, "
        "with",
        f"the seeds {', '.join(str(seed + number) for number in range(len(prompts)))}:",
        "",
        *(f"{number}. {prompt}" for number, prompt in enumerate(prompts, start=1)),
        "",
        "Theory is the mean closed form of the rule over the tested positions; under `block` the",
        "mean over the rounds of the accepted length that it expects. z judges the row as a whole.",
        "",
        "| T | rule | rounds | positions tested | acceptance at a position | theory "
        "| accepted length of a round | theory | z |",
        "|---|---|---|---|---|---|---|---|---|",
        *(row.markdown() for row in rows),
    ]
    return "\n".join(lines)


def placed(page: str, text: str) -> str:
    """The page with the text between its markers. Raises `ValueError` without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} with {END} behind it")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=40, help="new tokens a prompt (40)")
    parser.add_argument(
        "--prompts",
        type=int,
        default=len(PROMPTS),
        choices=range(1, len(PROMPTS) + 1),
        help="how many of the prompts (all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first prompt (0)")
    parser.add_argument("--show", action="store_true", help="print instead of writing the page")
    options = parser.parse_args(arguments)
    if not default_pair.is_ready():
        print("error: the default pair is not set up: run `make pair`", file=sys.stderr)
        return 1
    target = load(str(default_pair.target_directory()))
    draft = load(str(default_pair.draft_directory()), role="draft")
    prompts = PROMPTS[: options.prompts]

    def progress(step: str) -> None:
        print(step, file=sys.stderr, flush=True)

    rows = measure(target, draft, prompts, options.tokens, options.seed, progress)
    text = report(rows, prompts, options.tokens, options.seed)
    if options.show:
        print(text)
    else:
        PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
        print(f"wrote {PAGE}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
