"""One run: the target writes a corpus, the draft learns from it and is measured."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from .checkpoint import TrainingState, load_draft, load_state
from .config import AffineFormat, CorpusSettings, DraftShape, LlamaConfig, TrainingSettings
from .corpus import Round, write_corpus
from .draft import Draft, project_embedding
from .evaluation import evaluate
from .schedule import Schedule
from .target import Target
from .training import train

_SAMPLE_POSITIONS = 60_000  # whose states shape the first embedding


@dataclass(frozen=True)
class RunOptions:
    """Directories, device and settings of a run.

    init: an earlier run's out, to go on from; with new_schedule only its model is taken, and
    steps count from 0 again, its MLPs widened where widen_mlp_to says so. shape is of a draft made
    anew, without init.
    """

    target: Path
    out: Path
    device: str
    compiled: bool
    init: Path | None
    new_schedule: bool
    widen_mlp_to: int | None
    stop_at_step: int
    eval_rounds: int
    shape: DraftShape
    rounding: AffineFormat
    corpus: CorpusSettings
    schedule: Schedule
    training: TrainingSettings


def run(options: RunOptions) -> None:
    """Do it all; leaves a checkpoint and results.json in options.out."""
    begin = time.monotonic()

    def log(line: str) -> None:
        print(f"[{time.monotonic() - begin:.0f} s] {line}", flush=True)

    seed = options.training.seed
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    # What can be refused is refused before the long part.
    if options.widen_mlp_to is not None and (options.init is None or not options.new_schedule):
        raise ValueError("--widen-mlp-to needs the model of an --init and a --new-schedule")
    target_config = LlamaConfig.read(options.target)
    options.rounding.check(_draft_config(options, target_config))
    state = None
    if options.init is not None and not options.new_schedule:
        state = load_state(options.init)
        if state.step >= min(options.stop_at_step, options.schedule.steps):
            raise ValueError(f"{options.init} has {state.step} steps already; none are left")
    tokenizer_file = options.target / "tokenizer.json"
    if not tokenizer_file.exists():
        raise ValueError(f"there is no {tokenizer_file}")

    target = Target(options.target, options.device, options.compiled)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    rounds = write_corpus(target, tokenizer, options.corpus, Random(seed), log)
    draft = _make_draft(options, target, rounds, state)
    log(f"draft: {draft.parameter_count / 1e6:.2f}M parameters")

    summary = train(
        draft,
        target,
        rounds,
        options.schedule,
        options.training,
        options.rounding,
        options.stop_at_step,
        options.out,
        log,
        state,
    )
    results = {
        "corpus tokens": sum(part.tokens.numel() for part in rounds),
        "training": asdict(summary),
        "held-out": {
            label: evaluate(draft, target, rounds, options.eval_rounds, rounding)
            for label, rounding in (("rounded", options.rounding), ("unrounded", None))
        },
        "seconds": time.monotonic() - begin,
    }
    text = json.dumps(results, indent=1)
    (options.out / "results.json").write_text(text + "\n", encoding="utf-8")
    log(f"held-out figures: {json.dumps(results['held-out'])}")


def _draft_config(options: RunOptions, target: LlamaConfig) -> LlamaConfig:
    if options.init is None:
        return target.draft(options.shape)
    config = LlamaConfig.read(options.init)
    if config.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft in {options.init} knows {config.vocab_size} tokens, the target "
            f"{target.vocab_size}"
        )
    if options.widen_mlp_to is not None:
        if options.widen_mlp_to < config.mlp_size:
            raise ValueError(
                f"the MLPs in {options.init} have {config.mlp_size} units: they cannot widen to "
                f"{options.widen_mlp_to}"
            )
        return replace(config, mlp_size=options.widen_mlp_to)
    return config


def _make_draft(
    options: RunOptions, target: Target, rounds: list[Round], state: TrainingState | None
) -> Draft:
    config = _draft_config(options, target.config)
    if state is not None:
        return Draft(config, state.weights, options.device)
    if options.init is not None:
        draft = load_draft(options.init, options.device)
        if options.widen_mlp_to is not None:
            draft = draft.with_wider_mlp(options.widen_mlp_to, options.training.seed)
        return draft
    draft = Draft.random(config, options.training.seed, options.device)
    # A few rounds' later positions, thinned out.
    states = [part.hidden[::8, 40::7].flatten(0, 1)[:_SAMPLE_POSITIONS] for part in rounds[:4]]
    project_embedding(draft, target, torch.cat(states))
    return draft
