"""`mlxgen generate`: from options to printed text, cheap checks first, models last."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlxgen.cli.logs import configure_logging
from mlxgen.cli.options import GenerateOptions, parse_seed, parse_template_args
from mlxgen.cli.pair import PairChoice, choose_pair, load_pair
from mlxgen.cli.prompt_length import check_prompt_length
from mlxgen.cli.prompt_source import asks_for_chat, read_prompt
from mlxgen.cli.streams import Mode, Streams
from mlxgen.config import MAX_KV_SIZE_WITH_DRAFT, GenerationConfig
from mlxgen.errors import ExitCode, GenerationError, InputError, OptionError
from mlxgen.models.checkpoint import Checkpoint
from mlxgen.models.drafter_kind import check_kind_option
from mlxgen.models.identity import fingerprint
from mlxgen.models.source import expand_home, resolve_adapter
from mlxgen.prompt_cache import PromptCache, check_options

if TYPE_CHECKING:
    from mlxgen.memory import Memory
    from mlxgen.models.loading import LoadedModel

_UNLIMITED = -1


@dataclass(frozen=True)
class _Plan:
    """A run whose options have been checked and whose models have not been loaded.

    prompt: None in a chat.
    """

    config: GenerationConfig
    prompt: str | None
    pair: PairChoice
    why_plain: str | None
    prompt_cache: PromptCache | None


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
        verifies_blocks=plan.why_plain is None,
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
    prompt_cache = _prompt_cache(options, config, pair)
    prompt = None
    if not asks_for_chat(options.prompt, options.file):
        prompt = read_prompt(options.prompt, options.file)
    elif options.json:
        raise OptionError(
            "--json prints one document, and a chat has many: pass -p TEXT or -f FILE"
        )
    return _Plan(config, prompt, pair, why_plain, prompt_cache)


def _prompt_cache(
    options: GenerateOptions, config: GenerationConfig, pair: PairChoice
) -> PromptCache | None:
    """The file of `--prompt-cache`, looked at but not read."""
    if options.prompt_cache is None:
        return None
    if not options.prompt_cache:
        raise OptionError("--prompt-cache needs a file")
    check_options(config.cache)
    adapter = None if options.adapter is None else resolve_adapter(options.adapter)
    file = PromptCache(
        # A link is followed, so that writing does not replace it.
        expand_home(options.prompt_cache).resolve(),
        options.prompt_cache,
        fingerprint(pair.target, adapter),
        None if pair.draft is None else fingerprint(pair.draft),
        config.cache,
    )
    file.check()
    return file


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
    config = replace(plan.config, extra_eos_ids=_extra_eos_ids(options.extra_eos_token, target))
    memory = None
    if plan.prompt_cache is not None:
        from mlxgen.memory import Memory

        memory = Memory(target, draft, config.cache)
        plan.prompt_cache.load(memory, target, draft)
    run = _one_shot if plan.prompt is not None else _chat
    exit_code = run(replace(plan, config=config), options, streams, target, draft, memory)
    if plan.prompt_cache is not None and memory is not None:
        try:
            plan.prompt_cache.save(memory, target, draft)
        except GenerationError as error:
            if exit_code is ExitCode.DONE:
                raise
            streams.warn(str(error))
    return exit_code


def _one_shot(
    plan: _Plan,
    options: GenerateOptions,
    streams: Streams,
    target: LoadedModel,
    draft: LoadedModel | None,
    memory: Memory | None,
) -> ExitCode:
    from mlxgen.cli.reply import print_run
    from mlxgen.generation import stream_generate
    from mlxgen.report.document import generation_document
    from mlxgen.text.prompt import encode_prompt

    prompt_ids = encode_prompt(
        target.tokenizer,
        plan.prompt or "",
        system=options.system,
        use_template=not options.no_chat_template,
        template_args=parse_template_args(options.chat_template_args),
    )
    checkpoint = plan.pair.target
    check_prompt_length(len(prompt_ids), checkpoint)
    limit = _max_tokens(options.max_tokens, len(prompt_ids), checkpoint, streams)
    config = replace(plan.config, max_tokens=limit)
    _note_draft_context(plan.pair, len(prompt_ids) + config.max_tokens, streams)
    _note_sampling(config, options, streams)
    stream = stream_generate(target, prompt_ids, config, draft=draft, memory=memory)
    if memory is not None:
        streams.note(
            f"Prompt cache: {memory.target.reused_tokens} of {len(prompt_ids)} prompt tokens "
            f"taken up"
        )
    decode = target.tokenizer.decode
    printed = print_run(stream, streams, config, shows_profile=options.profile, decode=decode)
    streams.document(
        generation_document(
            printed.result,
            config,
            models={
                "target": str(plan.pair.target.path),
                "draft": None if plan.pair.draft is None else str(plan.pair.draft.path),
            },
            why_inactive=plan.why_plain,
            lines=printed.lines,
            decode=decode,
        )
    )
    return ExitCode.DONE if printed.interruption is None else ExitCode.INTERRUPTED


def _chat(
    plan: _Plan,
    options: GenerateOptions,
    streams: Streams,
    target: LoadedModel,
    draft: LoadedModel | None,
    memory: Memory | None,
) -> ExitCode:
    from mlxgen.cli.chat import Chat
    from mlxgen.conversation import Conversation

    window = plan.pair.target.context_tokens
    limit = options.max_tokens if options.max_tokens >= 0 else window
    config = replace(plan.config, max_tokens=limit)
    conversation = Conversation(
        target,
        config,
        draft=draft,
        memory=memory,
        system=options.system,
        use_template=not options.no_chat_template,
        template_args=parse_template_args(options.chat_template_args),
    )
    _note_draft_context(plan.pair, window, streams)
    _note_sampling(config, options, streams)
    decode = target.tokenizer.decode
    return Chat(conversation, streams, config, shows_profile=options.profile, decode=decode).run()


def _note_sampling(config: GenerationConfig, options: GenerateOptions, streams: Streams) -> None:
    if not config.sampling.is_greedy:
        streams.note(f"Seed: {config.seed}")
    if options.verbose:
        streams.note(f"Filter order: {';'.join(config.sampling.order)}")


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
