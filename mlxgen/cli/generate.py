"""`mlxgen generate`: from options to printed text, cheap checks first, models last."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlxgen.cli.logs import configure_logging
from mlxgen.cli.options import GenerateOptions, parse_seed, parse_template_args
from mlxgen.cli.pair import PairChoice, choose_pair, load_pair
from mlxgen.cli.prompt_source import read_prompt
from mlxgen.cli.streams import Mode, Streams
from mlxgen.config import MAX_KV_SIZE_WITH_DRAFT, GenerationConfig
from mlxgen.errors import ExitCode, InputError, OptionError
from mlxgen.models.checkpoint import Checkpoint
from mlxgen.models.drafter_kind import check_kind_option
from mlxgen.models.source import resolve_adapter

if TYPE_CHECKING:
    from mlxgen.models.loading import LoadedModel

_UNLIMITED = -1


@dataclass(frozen=True)
class _Plan:
    """A run whose options have been checked and whose models have not been loaded."""

    config: GenerationConfig
    prompt: str
    pair: PairChoice
    why_plain: str | None


def run_generate(options: GenerateOptions) -> ExitCode:
    """Run the command. Raises `MlxgenError`; an interruption is an exit code of its own."""
    if options.json and options.quiet:
        raise OptionError("--json and --quiet exclude each other; --json prints one document")
    mode = Mode.JSON if options.json else Mode.QUIET if options.quiet else Mode.DEFAULT
    streams = Streams(mode, show_draft=options.show_draft)
    configure_logging(os.environ)
    plan = _plan(options, streams)
    if options.show_draft and not streams.can_colour and mode is not Mode.JSON:
        streams.warn("--show-draft colours text on a terminal only; --json marks each token")

    # From here on MLX and mlx-lm are needed, which take their time to import.
    target, draft = load_pair(
        plan.pair,
        streams,
        adapter=options.adapter,
        trust_remote_code=options.trust_remote_code,
        verbose=options.verbose,
    )
    return _generate(plan, options, streams, target, draft)


def _plan(options: GenerateOptions, streams: Streams) -> _Plan:
    """Everything that can be refused without loading a model is refused here."""
    check_kind_option(options.draft_kind)
    config = GenerationConfig(
        sampling=options.sampling({}),
        speculation=options.speculation(os.environ, streams.warn),
        cache=options.cache(),
        max_tokens=max(options.max_tokens, 0),
        stop=tuple(options.stop),
        ignore_eos=options.ignore_eos,
        dry_sequence_breakers=tuple(options.dry_sequence_breaker),
        seed=parse_seed(options.seed),
        logprobs=options.logprobs,
    )
    parse_template_args(options.chat_template_args)
    pair = choose_pair(
        options.model, options.revision, options.draft_model, options.draft_block_size
    )
    if options.adapter is not None:
        resolve_adapter(options.adapter)
    why_plain = None
    if pair.draft is None:
        if (option := options.draft_only_option()) is not None:
            raise OptionError(f"{option} needs --draft-model")
        why_plain = "no draft model"
    elif not config.speculation.drafts_with_model:
        pair = replace(pair, draft=None)
        why_plain = "--num-draft-tokens is 0"
    if config.speculation.prompt_lookup is not None:
        why_plain = None
    if config.cache.max_kv_size is not None and why_plain is None:
        raise OptionError(MAX_KV_SIZE_WITH_DRAFT)
    recommended = {} if options.no_generation_config else pair.target.sampling_defaults()
    config = replace(config, sampling=options.sampling(recommended))
    _check_bias(config.sampling.logit_bias, pair.target.vocabulary_rows)
    effective = options.ungiven_recommendations(recommended)
    if effective:
        values = ", ".join(f"{name}={value:g}" for name, value in effective.items())
        streams.note(
            f"Sampling from the model's generation_config.json: {values} "
            f"(--no-generation-config turns this off)"
        )
    return _Plan(config, read_prompt(options.prompt, options.file), pair, why_plain)


def _check_bias(bias: tuple[tuple[int, float], ...], rows: int | None) -> None:
    for token, value in bias:
        if rows is not None and token >= rows:
            raise OptionError(
                f"--logit-bias {token}:{value:g}: the vocabulary has ids 0 to {rows - 1}"
            )


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
        max_tokens=_max_tokens(options.max_tokens, len(prompt_ids), plan.pair.target, streams),
    )
    _note_draft_context(plan.pair, len(prompt_ids) + config.max_tokens, streams)
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
        if config.speculation.prompt_lookup is not None:
            lines.append(report_lines.drafters_line(result.statistics))
    if result.depth is not None and options.profile:
        for line in report_lines.depth_lines(result):
            streams.note(line)
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
                "target": str(plan.pair.target.path),
                "draft": None if plan.pair.draft is None else str(plan.pair.draft.path),
            },
            why_inactive=plan.why_plain,
            lines=lines,
            decode=decode,
        )
    )
    return exit_code


def _note_draft_context(pair: PairChoice, text_tokens: int, streams: Streams) -> None:
    """Say so when the text may outgrow the draft's context window before the target's."""
    if pair.draft is None:
        return
    window = pair.draft.declared_context_tokens
    if window is not None and window < min(text_tokens, pair.target.context_tokens):
        streams.note(
            f"note: the draft's context window is {window} tokens; past it decoding goes on "
            f"without the draft model"
        )


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
