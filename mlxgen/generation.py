"""Generating text: a model, maybe a draft, a prompt and a configuration in; text and facts out.

import mlxgen
target = mlxgen.load("path/to/target")
draft = mlxgen.load("path/to/draft", role="draft")
config = mlxgen.GenerationConfig(sampling=mlxgen.SamplingConfig(temperature=0.7), seed=1)
result = mlxgen.generate(target, "Tell me about tea.", config, draft=draft)
print(result.text, result.statistics)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from mlxgen.cache.cached_model import CachedModel, as_ids
from mlxgen.config import MAX_KV_SIZE_WITH_DRAFT, GenerationConfig
from mlxgen.decoding.plain import PlainGenerator
from mlxgen.decoding.tokens import FinishReason, Token
from mlxgen.drafters.draft_model import DraftModel
from mlxgen.drafters.lookup_first import LookupFirst
from mlxgen.drafters.prompt_lookup import PromptLookup
from mlxgen.drafters.proposal import Drafter
from mlxgen.errors import GenerationError, InputError, OptionError
from mlxgen.memory import Memory, fresh_draft, fresh_target
from mlxgen.models.loading import LoadedModel
from mlxgen.models.vocabulary import compare_vocabularies
from mlxgen.sampling.chain import SamplerChain
from mlxgen.sampling.history import IntArray
from mlxgen.sampling.randomness import Randomness
from mlxgen.speculative.depth import AdaptiveDepth, DepthSummary, FixedDepth
from mlxgen.speculative.loop import Round, SpeculativeGenerator
from mlxgen.speculative.statistics import SpeculativeAcceptanceStats
from mlxgen.text.prompt import encode_prompt
from mlxgen.text.stop import StopStrings
from mlxgen.text.stream import TextStream


@dataclass(frozen=True)
class Generation:
    """A finished run.

    tokens: the emitted tokens; an end-of-sequence token is never among them, the one that
    completes a stop string is. text: ends before a stop string. statistics: None when no drafter
    was there. prefill_ms: until all prompt tokens but the last are in the caches; decode_ms: from
    there to the end, so that every token costs one share of it on every path. depth: what an
    adaptive draft length chose and why. reused_tokens: prompt tokens that were in the target's
    cache already.
    """

    text: str
    tokens: tuple[Token, ...]
    prompt_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None
    seed: int
    statistics: SpeculativeAcceptanceStats | None
    prefill_ms: float
    decode_ms: float
    depth: DepthSummary | None = None
    reused_tokens: int = 0

    @property
    def token_ids(self) -> list[int]:
        """Ids of the emitted tokens."""
        return [token.id for token in self.tokens]

    @property
    def decode_tokens_per_s(self) -> float:
        """Emitted tokens for each second of decoding."""
        return 1e3 * len(self.tokens) / self.decode_ms if self.decode_ms > 0 else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens put into the caches for each second of prefill."""
        taken_in = len(self.prompt_ids) - 1 - self.reused_tokens
        return 1e3 * taken_in / self.prefill_ms if self.prefill_ms > 0 else 0.0


@dataclass(frozen=True)
class TextPiece:
    """A piece of text as it becomes final. from_draft: an accepted proposal completed it."""

    text: str
    from_draft: bool


class GenerationStream:
    """A run in progress: iterate for its text, then read `result`.

    Leaving the iteration early (an exception, Ctrl-C, `close`) leaves both caches at the last
    token taken; `result` then tells what was generated so far.
    """

    def __init__(
        self,
        generator: PlainGenerator | SpeculativeGenerator,
        tokenizer: Any,
        prompt_ids: list[int],
        config: GenerationConfig,
        memory: Memory | None = None,
    ) -> None:
        self._generator = generator
        self._memory = memory
        self._reused_tokens = 0 if memory is None else memory.target.reused_tokens
        self._prompt_ids = prompt_ids
        self._config = config
        self._text_stream = TextStream(tokenizer)
        self._stops = StopStrings(config.stop)
        self._tokens: list[Token] = []
        self._text: list[str] = []
        self._is_complete = self._is_begun = False
        self._started_s = self._prefilled_s = self._ended_s = 0.0

    def __iter__(self) -> Generator[TextPiece, None, None]:
        return self.pieces(nullcontext())

    def pieces(
        self, delivering: AbstractContextManager[object]
    ) -> Generator[TextPiece, None, None]:
        """As iterating. delivering: entered once a token while it is counted, its text is made and
        the consumer holds it, so that a context can keep interrupts away meanwhile."""
        if self._is_begun:
            raise GenerationError("a stream can be read once: start another with stream_generate")
        self._is_begun = True
        self._started_s = self._prefilled_s = self._ended_s = time.perf_counter()
        try:
            self._generator.prefill(self._prompt_ids)
            self._prefilled_s = self._ended_s = time.perf_counter()
            # Closing the token iterator rewinds the caches now, not when it is collected.
            with closing(self._generator.tokens(self._config.max_tokens)) as tokens:
                try:
                    for token in tokens:
                        with delivering:
                            self._tokens.append(token)
                            text = self._text_stream.add(token.id)
                            yield from self._shown(self._stops.feed(text, token.from_draft))
                        if self._stops.matched is not None:
                            break
                    self._is_complete = True
                finally:
                    self._ended_s = time.perf_counter()
        finally:
            if self._memory is not None:
                self._memory.take_back(
                    as_ids([*self._prompt_ids, *(token.id for token in self._tokens)])
                )
        with delivering:
            yield from self.held_back()

    def held_back(self) -> Iterator[TextPiece]:
        """The text of tokens already generated that was withheld: an incomplete character, or the
        beginning of a stop string. Iterating to the end includes it; after an interruption ask."""
        last_mark = self._tokens[-1].from_draft if self._tokens else False
        yield from self._shown(self._stops.feed(self._text_stream.finish(), last_mark))
        if self._stops.matched is None:
            yield from self._shown(self._stops.flush())

    def _shown(self, pieces: list[tuple[str, bool]]) -> Iterator[TextPiece]:
        for text, mark in pieces:
            self._text.append(text)
            yield TextPiece(text, mark)

    @property
    def result(self) -> Generation:
        """The run as far as it got."""
        generator = self._generator
        if not self._is_complete:
            reason = FinishReason.INTERRUPTED
        elif self._stops.matched is not None:
            reason = FinishReason.STOP
        else:
            reason = generator.finish_reason
        statistics = depth = None
        if isinstance(generator, SpeculativeGenerator):
            statistics, depth = generator.statistics, generator.depth_summary
        return Generation(
            text="".join(self._text),
            tokens=tuple(self._tokens),
            prompt_ids=tuple(self._prompt_ids),
            finish_reason=reason,
            stop_string=self._stops.matched,
            seed=self._config.seed,
            statistics=statistics,
            prefill_ms=1e3 * (self._prefilled_s - self._started_s),
            decode_ms=1e3 * (self._ended_s - self._prefilled_s),
            depth=depth,
            reused_tokens=self._reused_tokens,
        )


def stream_generate(
    target: LoadedModel,
    prompt: str | Sequence[int],
    config: GenerationConfig,
    *,
    draft: LoadedModel | None = None,
    memory: Memory | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> GenerationStream:
    """Start a run; iterate over what comes back.

    prompt: text, put through the chat template where there is one, or token ids as they are.
    Without a draft, or with num_draft_tokens of 0, decoding is plain, unless prompt lookup is on.
    memory: caches of earlier runs on these models, which this run takes up and leaves behind.
    Raises `InputError` for an empty prompt or one with ids that the model cannot embed,
    `OptionError` for options that do not fit the model, `PairError` for a draft that does not fit
    the target.
    """
    prompt_ids = encode_prompt(target.tokenizer, prompt) if isinstance(prompt, str) else [*prompt]
    _check_prompt(prompt_ids, target)
    config = _within_positions(config, len(prompt_ids), target)
    generator = build_generator(
        target, config, draft=draft, memory=memory, prompt=prompt_ids, on_round=on_round
    )
    return GenerationStream(generator, target.tokenizer, prompt_ids, config, memory)


def generate(
    target: LoadedModel,
    prompt: str | Sequence[int],
    config: GenerationConfig,
    *,
    draft: LoadedModel | None = None,
    memory: Memory | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> Generation:
    """Run to the end. Arguments and errors as `stream_generate`."""
    stream = stream_generate(target, prompt, config, draft=draft, memory=memory, on_round=on_round)
    for _ in stream:
        pass
    return stream.result


def build_generator(
    target: LoadedModel,
    config: GenerationConfig,
    *,
    draft: LoadedModel | None = None,
    memory: Memory | None = None,
    prompt: Sequence[int] = (),
    on_round: Callable[[Round], None] | None = None,
) -> PlainGenerator | SpeculativeGenerator:
    """The decoding loop for a model or a pair.

    The caches are fresh, or those of a memory, which hold a prefix of the prompt then.
    """
    if memory is not None and memory.config != config.cache:
        raise ValueError("the memory was made with other cache options than this run has")
    width = target.drawable_ids
    eos_ids = target.eos_ids | frozenset(config.extra_eos_ids)
    chain = SamplerChain(
        config.sampling,
        width,
        protected=eos_ids | _newline_ids(target),
        breakers=_breaker_ids(target, config.dry_sequence_breakers),
    )
    randomness = Randomness(config.seed)
    ending = frozenset() if config.ignore_eos else eos_ids
    prompt_ids = as_ids([*prompt])
    if memory is None:
        cached_target = fresh_target(target, config.cache)
    else:
        cached_target = memory.target.lend(prompt_ids)
    drafter = _build_drafter(target, config, draft, chain, randomness, memory, prompt_ids)
    if drafter is None:
        return PlainGenerator(
            cached_target, chain, randomness, eos_ids=ending, logprobs=config.logprobs
        )
    if config.cache.max_kv_size is not None:
        raise OptionError(MAX_KV_SIZE_WITH_DRAFT)
    speculation = config.speculation
    return SpeculativeGenerator(
        cached_target,
        drafter,
        chain,
        randomness,
        depth=AdaptiveDepth()
        if speculation.adapts_depth
        else FixedDepth(speculation.num_draft_tokens),
        accept_rule=speculation.accept_rule,
        diagnostics=speculation.diagnostics,
        eos_ids=ending,
        logprobs=config.logprobs,
        on_round=on_round,
    )


def _build_drafter(
    target: LoadedModel,
    config: GenerationConfig,
    draft: LoadedModel | None,
    chain: SamplerChain,
    randomness: Randomness,
    memory: Memory | None,
    prompt_ids: IntArray,
) -> Drafter | None:
    speculation = config.speculation
    lookup = None
    if speculation.prompt_lookup is not None:
        lookup = PromptLookup(speculation.prompt_lookup, chain.width)
    if draft is None or not speculation.drafts_with_model:
        return lookup
    compare_vocabularies(target.vocabulary, draft.vocabulary)
    cached: CachedModel
    if memory is None or memory.draft is None:
        cached = fresh_draft(target, draft, config.cache)
    else:
        cached = memory.draft.lend(prompt_ids)
    draft_chain = chain
    if speculation.draft_temperature is not None:
        draft_chain = chain.with_config(config.sampling.for_draft(speculation.draft_temperature))
    windows = (draft.checkpoint.declared_context_tokens, draft.position_rows)
    context = min((window for window in windows if window is not None), default=None)
    model = DraftModel(cached, draft_chain, randomness, context_tokens=context)
    return model if lookup is None else LookupFirst(lookup, model)


def _check_prompt(prompt_ids: list[int], target: LoadedModel) -> None:
    if not prompt_ids:
        raise InputError("the prompt is empty: at least one token is needed")
    rows = target.embedding_rows
    smallest, largest = min(prompt_ids), max(prompt_ids)
    if smallest < 0 or (rows is not None and largest >= rows):
        raise InputError(
            f"the prompt holds token {smallest if smallest < 0 else largest}, and the model's "
            f"embedding has ids 0 to "
            f"{(rows or 0) - 1}: tokenizer and weights do not belong together"
        )


def _within_positions(
    config: GenerationConfig, prompt_tokens: int, target: LoadedModel
) -> GenerationConfig:
    """End the text where the model's table of positions does, if it has one."""
    rows = target.position_rows
    if rows is None:
        return config
    if prompt_tokens >= rows:
        raise InputError(
            f"the prompt has {prompt_tokens} tokens, and this model has learned the positions of "
            f"{rows} tokens, the reply's included: shorten it"
        )
    return replace(config, max_tokens=min(config.max_tokens, rows - prompt_tokens))


def _newline_ids(target: LoadedModel) -> frozenset[int]:
    # SentencePiece puts a space token in front of a newline that starts a text.
    last = [int(i) for i in target.tokenizer.encode("\n", add_special_tokens=False)][-1:]
    return frozenset(last) if target.tokenizer.decode(last) == "\n" else frozenset()


def _breaker_ids(target: LoadedModel, breakers: tuple[str, ...]) -> frozenset[int]:
    """Tokens whose text holds one of the strings."""
    if not breakers:
        return frozenset()
    decode = target.tokenizer.decode
    return frozenset(
        token_id
        for token_id in range(target.drawable_ids)
        if any(breaker in decode([token_id]) for breaker in breakers)
    )
