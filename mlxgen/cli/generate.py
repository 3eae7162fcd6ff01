"""`mlxgen generate`: from options to printed text, cheap checks first, models last."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from mlxgen.cli.logs import configure_logging
from mlxgen.cli.options import GenerateOptions, parse_seed, parse_template_args
from mlxgen.cli.prompt_source import read_prompt
from mlxgen.cli.streams import Mode, Streams
from mlxgen.config import GenerationConfig
from mlxgen.errors import ExitCode, InputError, ModelError, OptionError
from mlxgen.models import default_pair
from mlxgen.models.checkpoint import Checkpoint, read_checkpoint
from mlxgen.models.drafter_kind import (
    CLASSIC_LINE,
    DrafterKind,
    check_kind_option,
    refuse_special,
    resolve_kind,
)
from mlxgen.models.source import resolve_model

if TYPE_CHECKING:
    from mlxgen.models.loading import LoadedModel

_UNLIMITED = -1


@dataclass(frozen=True)
class _Plan:
    """A run whose options have been checked and whose models have not been loaded."""

    config: GenerationConfig
    prompt: str
    target: Checkpoint
    draft: Checkpoint | None
    kind: DrafterKind | None
    is_default_pair: bool


def run_generate(options: GenerateOptions) -> ExitCode:
    """Run the command. Raises `MlxgenError`; an interruption is an exit code of its own."""
    if options.json and options.quiet:
        raise OptionError("--json and --quiet exclude each other; --json prints one document")
    mode = Mode.JSON if options.json else Mode.QUIET if options.quiet else Mode.DEFAULT
    streams = Streams(mode, show_draft=options.show_draft)
    configure_logging(os.environ)
    if options.show_draft and not streams.can_colour and mode is not Mode.JSON:
        streams.warn("--show-draft colours text on a terminal only; --json marks each token")
    plan = _plan(options, streams)

    # From here on MLX and mlx-lm are needed, which take their time to import.
    target, draft = _load(plan, options, streams)
    return _generate(plan, options, streams, target, draft)


def _plan(options: GenerateOptions, streams: Streams) -> _Plan:
    """Everything that can be refused without loading a model is refused here."""
    check_kind_option(options.draft_kind)
    speculation = options.speculation(os.environ, streams.warn)
    cache = options.cache()
    options.sampling({})
    parse_template_args(options.chat_template_args)
    config = GenerationConfig(
        speculation=speculation,
        cache=cache,
        max_tokens=max(options.max_tokens, 0),
        stop=tuple(options.stop),
        ignore_eos=options.ignore_eos,
        dry_sequence_breakers=tuple(options.dry_sequence_breaker),
        seed=parse_seed(options.seed),
        logprobs=options.logprobs,
    )
    target_path, draft_path = _model_paths(options)
    is_default_pair = options.model is None
    if draft_path is None:
        if (option := options.draft_only_option()) is not None:
            raise OptionError(f"{option} needs --draft-model")
    elif cache.max_kv_size is not None and speculation.num_draft_tokens > 0:
        raise OptionError(
            "--max-kv-size keeps a rotating cache, which cannot be rewound after a rejected "
            "draft: drop it, or decode without a draft (--num-draft-tokens 0)"
        )
    target = read_checkpoint(target_path, "target")
    refuse_special(target, "-m")
    draft = kind = None
    if draft_path is not None:
        draft = read_checkpoint(draft_path, "draft")
        kind = resolve_kind(draft, options.draft_block_size)
        if speculation.num_draft_tokens == 0:
            draft = None
    recommended = {} if options.no_generation_config else target.sampling_defaults()
    sampling = options.sampling(recommended)
    _check_bias(config=sampling.logit_bias, rows=target.vocabulary_rows)
    effective = options.ungiven_recommendations(recommended)
    if effective:
        values = ", ".join(f"{name}={value:g}" for name, value in effective.items())
        streams.note(
            f"Sampling from the model's generation_config.json: {values} "
            f"(--no-generation-config turns this off)"
        )
    prompt = read_prompt(options.prompt, options.file)
    return _Plan(replace(config, sampling=sampling), prompt, target, draft, kind, is_default_pair)


def _model_paths(options: GenerateOptions) -> tuple[Path, Path | None]:
    if options.model is None:
        if options.revision is not None:
            raise OptionError("--revision needs -m with a hub id")
        if not default_pair.is_ready():
            raise ModelError(
                "no model given (-m), and the default pair is not set up: run `make pair` or "
                "`python scripts/fetch_default_pair.py` in a checkout of mlxgen, or pass -m"
            )
        target = default_pair.target_directory()
        draft: Path | None = default_pair.draft_directory()
    else:
        target = resolve_model(options.model, options.revision, "-m")
        draft = None
    if options.draft_model is not None:
        draft = resolve_model(options.draft_model, None, "--draft-model")
    return target, draft


def _check_bias(config: tuple[tuple[int, float], ...], rows: int | None) -> None:
    for token, value in config:
        if rows is not None and token >= rows:
            raise OptionError(
                f"--logit-bias {token}:{value:g}: the vocabulary has ids 0 to {rows - 1}"
            )


def _load(
    plan: _Plan, options: GenerateOptions, streams: Streams
) -> tuple[LoadedModel, LoadedModel | None]:
    from mlxgen.models.loading import load_checkpoint
    from mlxgen.models.vocabulary import compare_vocabularies

    if options.verbose:
        streams.note(_versions())
    if plan.is_default_pair:
        streams.note(
            f"Using the default pair: {default_pair.TARGET_NAME} with {default_pair.DRAFT_NAME} "
            f"(-m chooses another model)"
        )
    streams.note(f'Loading model from "{plan.target.path}"...')
    target = load_checkpoint(
        plan.target,
        adapter=options.adapter,
        trust_remote_code=options.trust_remote_code,
        warn=streams.warn,
    )
    draft = None
    if plan.draft is not None:
        streams.note(f'Loading draft model from "{plan.draft.path}"...')
        draft = load_checkpoint(
            plan.draft, trust_remote_code=options.trust_remote_code, warn=streams.warn
        )
        for note in compare_vocabularies(target.vocabulary, draft.vocabulary):
            streams.note(f"note: {note}")
        streams.note("Draft model loaded.")
    if plan.kind is not None and plan.draft is not None:
        streams.note(plan.kind.line)
        streams.note(CLASSIC_LINE)
    return target, draft


def _generate(
    plan: _Plan,
    options: GenerateOptions,
    streams: Streams,
    target: LoadedModel,
    draft: LoadedModel | None,
) -> ExitCode:
    import mlx.core as mx

    from mlxgen.generation import stream_generate
    from mlxgen.report import lines as report_lines
    from mlxgen.report.document import generation_document
    from mlxgen.text.prompt import encode_prompt

    prompt_ids = encode_prompt(
        target.tokenizer,
        plan.prompt,
        system=options.system,
        use_template=not options.no_chat_template,
        template_args=parse_template_args(options.chat_template_args),
    )
    config = replace(
        plan.config,
        extra_eos_ids=_extra_eos_ids(options.extra_eos_token, target),
        max_tokens=_max_tokens(options.max_tokens, len(prompt_ids), plan.target, streams),
    )
    if not config.sampling.is_greedy:
        streams.note(f"Seed: {config.seed}")
    if options.verbose:
        streams.note(f"Filter order: {';'.join(config.sampling.order)}")
    stream = stream_generate(target, prompt_ids, config, draft=draft)
    exit_code = ExitCode.DONE
    try:
        for piece in stream:
            streams.text(piece.text, piece.from_draft)
    except KeyboardInterrupt:
        exit_code = ExitCode.INTERRUPTED
        for piece in stream.held_back():
            streams.text(piece.text, piece.from_draft)
    streams.end_text()
    result = stream.result

    def decode(ids: list[int]) -> str:
        text: str = target.tokenizer.decode(ids)
        return text

    lines: list[str] = []
    if exit_code is ExitCode.INTERRUPTED:
        lines.append("[Interrupted]")
    if config.logprobs:
        lines.extend(report_lines.logprob_lines(result, decode))
    if options.profile:
        lines.extend(report_lines.profile_lines(result, mx.get_peak_memory()))
    else:
        lines.append(report_lines.generated_line(result))
    if result.statistics is not None:
        lines.extend(report_lines.speculation_lines(result.statistics))
    streams.statistics(lines)
    if result.statistics is not None and not result.statistics.check.is_consistent:
        streams.warn(
            "the run disagrees with theory (|z| > 4.9, a chance of one in a million): please "
            "report the command and the seed"
        )
    streams.document(
        generation_document(
            result,
            config,
            models={
                "target": str(plan.target.path),
                "draft": None if plan.draft is None else str(plan.draft.path),
            },
            why_inactive=None if draft is not None else _why_plain(plan),
            lines=lines,
            decode=decode,
        )
    )
    return exit_code


def _why_plain(plan: _Plan) -> str:
    if plan.kind is not None:
        return "--num-draft-tokens is 0"
    return "no draft model"


def _extra_eos_ids(tokens: list[str], target: LoadedModel) -> tuple[int, ...]:
    ids = []
    for token in tokens:
        token_id = target.token_id(token)
        if token_id is None:
            raise InputError(
                f"--extra-eos-token {token!r} is neither a token of this model nor one of its ids"
            )
        ids.append(token_id)
    return tuple(ids)


def _max_tokens(requested: int, prompt_tokens: int, target: Checkpoint, streams: Streams) -> int:
    if requested >= 0:
        return requested
    window = target.context_tokens
    if prompt_tokens >= window:
        streams.warn(
            f"the prompt has {prompt_tokens} tokens and the model's context window {window}"
        )
    limit = max(1, window - prompt_tokens)
    streams.note(
        f"Max tokens: unlimited ({_UNLIMITED}) -> {limit} (model context window {window}, prompt "
        f"{prompt_tokens})"
    )
    return limit


def _versions() -> str:
    names = ("mlxgen", "mlx", "mlx-lm", "transformers")
    known = []
    for name in names:
        try:
            known.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            known.append(f"{name} (not installed as a package)")
    return f"{', '.join(known)}; Python {platform.python_version()} on {platform.platform()}"
