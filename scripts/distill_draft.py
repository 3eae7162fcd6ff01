#!/usr/bin/env python3
"""Distil a small draft model for speculative decoding from a llama target.

The target writes its own corpus: answers to requests, whole conversations with the user's turns
too, and plain texts. The draft learns the target's next-token distribution at every position,
first by KL divergence, then mostly by total variation, which is one minus the rate at which
speculative sampling accepts the draft's tokens. The last part of training runs on weights rounded
as MLX's affine quantisation rounds them, so that the 4-bit model is the one that was trained.

Training needs PyTorch, which mlxgen does not, with tokenizers and safetensors:

    pip install torch tokenizers safetensors

and in practice a GPU. With Triton, which comes with PyTorch's builds for NVIDIA GPUs, the loss is
one fused kernel; otherwise plain PyTorch computes the same, with more memory. The other two
commands need MLX only. From the default pair to a new draft:

    python scripts/fetch_default_pair.py
    python scripts/distill_draft.py dequantise \\
        --model ~/.cache/mlxgen/smollm2-135m-instruct --out TARGET
    python scripts/distill_draft.py train --target TARGET --out RUN
    python scripts/distill_draft.py export --draft RUN --tokenizer TARGET --out DRAFT

TARGET can be any Hugging Face checkpoint in one file of a llama with tied embeddings and ChatML
turns, in bfloat16 or float32. Checkpoints go to RUN every --save-every-steps; after an
interruption, the same command with `--init RUN`, and without --new-schedule and --widen-mlp-to,
goes on at the last one. The corpus is not kept:
it is written again from --seed. One run trains one draft.

The published draft was trained on NVIDIA H200s in three runs, each on a fresh corpus, the second
with wider MLPs. They were ended by a clock; in steps and tokens they come to

    python scripts/distill_draft.py train --target TARGET --out RUN1 --mlp-size 768 --bits 5 \\
        --steps 12761 --learning-rate 2.2e-3 --corpus-tokens 27262976 --long-share 0.154
    python scripts/distill_draft.py train --target TARGET --out RUN2 --init RUN1 --new-schedule \\
        --widen-mlp-to 1280 --bits 5 --seed 20 --steps 38175 --warmup-steps 100 \\
        --learning-rate 1.8e-3 --tv-from-share 0.03 --tv-full-share 0.25 \\
        --round-from-share 0.45 --corpus-tokens 54525952 --long-share 0.154
    python scripts/distill_draft.py train --target TARGET --out RUN3 --init RUN2 --new-schedule \\
        --bits 5 --seed 50 --steps 15104 --warmup-steps 150 --learning-rate 5e-4 \\
        --tv-from-share 0 --tv-full-share 0 --round-from-share 0 --corpus-tokens 79691776 \\
        --long-share 0.158
    python scripts/distill_draft.py export --draft RUN3 --tokenizer TARGET --out DRAFT --bits 5

but the third drew its prompts in another way, and its final norm was scaled before the export (the
draft's README says how). The second one's corpus was written on two GPUs at once, with a seed each.
Training took 1,071 s in the second run and 403 in the third. GPU memory: two bytes times the
target's hidden size for each token of the corpus (92 GB for 80M tokens of SmolLM2-135M) and its
key/value cache for --rows-per-round rows (23 KB a token).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from distill.config import AffineFormat, CorpusSettings, DraftShape, TrainingSettings
from distill.schedule import Schedule


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = make_parser().parse_args(arguments)
    try:
        if options.command == "train":
            _train(options)
        elif options.command == "dequantise":
            _dequantise(options)
        else:
            _export(options)
    except (ValueError, OSError) as error:
        print(f"distill_draft: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"distill_draft: error: {error}; see --help", file=sys.stderr)
        return 2
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    dequantise = commands.add_parser(
        "dequantise", help="turn a quantised mlx-lm directory into a checkpoint to train from"
    )
    dequantise.add_argument("--model", type=Path, required=True, help="the mlx-lm directory")
    dequantise.add_argument("--out", type=Path, required=True, help="for the checkpoint")
    dequantise.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="bfloat16, the default, was the published draft's target; float32 loses nothing",
    )

    _add_train(commands.add_parser("train", help="write a corpus and train a draft on it"))

    export = commands.add_parser("export", help="quantise a trained draft for mlx-lm")
    export.add_argument("--draft", type=Path, required=True, help="the --out of a training run")
    export.add_argument(
        "--tokenizer", type=Path, required=True, help="directory of the target's tokenizer.json"
    )
    export.add_argument("--out", type=Path, required=True, help="for the mlx-lm directory")
    _add_format(export)
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, required=True, help="the target's checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="for checkpoints and results")
    parser.add_argument("--init", type=Path, help="go on from the checkpoint of this --out")
    parser.add_argument(
        "--new-schedule",
        action="store_true",
        help="take only the weights from --init and count steps from 0",
    )
    parser.add_argument(
        "--widen-mlp-to",
        type=int,
        metavar="N",
        help="with --init and --new-schedule: more units in the MLPs, the function unchanged",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: cuda)")
    parser.add_argument("--no-compile", action="store_true", help="no torch.compile on a GPU")
    _add(parser, "--seed", TrainingSettings.seed, "of corpus, batches and first weights")
    _add(parser, "--eval-rounds", 6, "rounds whose held-out rows are measured, at most")

    draft = parser.add_argument_group("draft", "its shape; with --init that is the checkpoint's")
    _add(draft, "--hidden-size", DraftShape.hidden_size, "a multiple of --group-size")
    _add(draft, "--layers", DraftShape.layers, "transformer blocks")
    _add(draft, "--heads", DraftShape.heads, "query heads")
    _add(draft, "--kv-heads", DraftShape.kv_heads, "key/value heads")
    _add(draft, "--mlp-size", DraftShape.mlp_size, "a multiple of --group-size")

    corpus = parser.add_argument_group("corpus")
    _add(corpus, "--corpus-tokens", CorpusSettings.tokens, "rounded to whole rounds")
    _add(corpus, "--rows-per-round", CorpusSettings.rows_per_round, "rows decoded in step")
    _add(corpus, "--long-row-tokens", CorpusSettings.long_row_tokens, "length of long rows")
    _add(corpus, "--short-row-tokens", CorpusSettings.short_row_tokens, "length of the others")
    _add(corpus, "--long-share", CorpusSettings.long_share, "share of tokens in long rows")
    _add(
        corpus,
        "--request-share",
        CorpusSettings.request_share,
        "share of rows that answer a request from the lists",
    )
    _add(corpus, "--held-out-rows", CorpusSettings.held_out_rows, "of each round, not trained on")

    schedule = parser.add_argument_group("schedule", "shares are of --steps")
    _add(schedule, "--steps", Schedule.steps, "planned length")
    schedule.add_argument("--stop-at-step", type=int, help="end early, with the schedule unchanged")
    _add(schedule, "--warmup-steps", Schedule.warmup_steps, "until the full learning rate")
    _add(schedule, "--learning-rate", Schedule.learning_rate, "at its peak")
    _add(schedule, "--tv-from-share", Schedule.tv_from_share, "when total variation comes in")
    _add(schedule, "--tv-full-share", Schedule.tv_full_share, "when it has its full weight")
    _add(schedule, "--round-from-share", Schedule.round_from_share, "when rounding sets in")

    training = parser.add_argument_group("training")
    _add(training, "--batch-tokens", TrainingSettings.batch_tokens, "tokens a step")
    _add(
        training,
        "--position-share",
        TrainingSettings.position_share,
        "share of a batch's positions in the loss, the target's own words first",
    )
    _add(
        training,
        "--chunk-positions",
        TrainingSettings.chunk_positions,
        "positions whose logits are in memory at a time",
    )
    _add(training, "--log-every-steps", TrainingSettings.log_every_steps, "steps a line")
    _add(training, "--save-every-steps", TrainingSettings.save_every_steps, "steps a checkpoint")
    _add_format(parser)


def _add_format(parser: argparse.ArgumentParser) -> None:
    form = parser.add_argument_group("quantisation", "MLX's affine one")
    _add(form, "--bits", AffineFormat.bits, "per weight", (2, 3, 4, 5, 6, 8))
    _add(form, "--group-size", AffineFormat.group_size, "weights a scale", (32, 64, 128))


def _add(
    group: argparse._ActionsContainer,
    flag: str,
    default: float,
    text: str,
    choices: tuple[int, ...] | None = None,
) -> None:
    """An option for a number of the default's type."""
    group.add_argument(
        flag,
        type=type(default),
        default=default,
        choices=choices,
        metavar=None if choices else "N" if isinstance(default, int) else "X",
        help=f"{text} (default: {default})",
    )


# PyTorch and MLX are imported by the commands that need them: no machine has to have both.


def _train(options: argparse.Namespace) -> None:
    from distill.run import RunOptions, run

    run(
        RunOptions(
            target=options.target,
            out=options.out,
            device=options.device,
            compiled=options.device == "cuda" and not options.no_compile,
            init=options.init,
            new_schedule=options.new_schedule,
            widen_mlp_to=options.widen_mlp_to,
            stop_at_step=options.steps if options.stop_at_step is None else options.stop_at_step,
            eval_rounds=options.eval_rounds,
            shape=DraftShape(
                hidden_size=options.hidden_size,
                layers=options.layers,
                heads=options.heads,
                kv_heads=options.kv_heads,
                mlp_size=options.mlp_size,
            ),
            rounding=AffineFormat(options.bits, options.group_size),
            corpus=CorpusSettings(
                tokens=options.corpus_tokens,
                rows_per_round=options.rows_per_round,
                long_row_tokens=options.long_row_tokens,
                short_row_tokens=options.short_row_tokens,
                long_share=options.long_share,
                request_share=options.request_share,
                held_out_rows=options.held_out_rows,
            ),
            schedule=Schedule(
                steps=options.steps,
                warmup_steps=options.warmup_steps,
                learning_rate=options.learning_rate,
                tv_from_share=options.tv_from_share,
                tv_full_share=options.tv_full_share,
                round_from_share=options.round_from_share,
            ),
            training=TrainingSettings(
                batch_tokens=options.batch_tokens,
                position_share=options.position_share,
                chunk_positions=options.chunk_positions,
                log_every_steps=options.log_every_steps,
                save_every_steps=options.save_every_steps,
                seed=options.seed,
            ),
        )
    )


def _dequantise(options: argparse.Namespace) -> None:
    from distill.dequantise import dequantise_directory

    packed = dequantise_directory(options.model, options.out, options.dtype)
    print(f"{packed} weights dequantised to {options.out}")


def _export(options: argparse.Namespace) -> None:
    from distill.export import export_draft

    size = export_draft(
        options.draft,
        options.tokenizer,
        options.out,
        AffineFormat(options.bits, options.group_size),
    )
    print(f"{size / 1e6:.1f} MB written to {options.out}")


if __name__ == "__main__":
    sys.exit(main())
