"""Every way out of a run leaves both caches at the last emitted token.

Proven by going on from them: plain decoding from the target's cache must give the ids of a run
that was never interrupted, and plain decoding from the draft's cache those of the draft itself.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest

import mlxgen
from mlxgen.cache.cached_model import CachedModel
from mlxgen.config import GenerationConfig, SamplingConfig, SpeculationConfig
from mlxgen.decoding.plain import PlainGenerator
from mlxgen.decoding.tokens import FinishReason, Token
from mlxgen.errors import GenerationError
from mlxgen.generation import generate, stream_generate
from mlxgen.memory import Memory
from mlxgen.models.loading import LoadedModel
from mlxgen.sampling.randomness import Randomness
from mlxgen.speculative.loop import Round
from tests.fixtures.runs import ModelStore, Settings, Speculation

K = 4
LENGTH = 40
TEMPERATURES = [0.0, 0.9]
FURTHER = 12


@dataclass(frozen=True)
class Pair:
    """A target, a draft that agrees with it now and then, and the ids of plain decoding."""

    target: Any
    draft: Any
    settings: Settings
    plain: list[int]

    def run(self, on_round: Callable[[Round], None] | None = None) -> Speculation:
        """A prefilled speculative run."""
        return self.settings.speculative(self.target, self.draft, on_round=on_round)

    def check(self, run: Speculation, begun: list[int]) -> None:
        """The caches are at the last of the tokens that were emitted, and hold what they must."""
        assert begun == self.plain[: len(begun)]
        text = [*self.settings.prompt, *begun]
        assert run.draft is not None
        assert run.target.cached_tokens == len(text) - 1
        assert run.draft.cached_tokens <= len(text) - 1
        for cached, model in ((run.target, self.target), (run.draft, self.draft)):
            assert [cache.offset for cache in cached.caches] == [cached.cached_tokens] * 2
            check_contents(cached, model, text)
            alone = self.settings.but(prompt=tuple(text), eos_ids=frozenset())
            assert go_on(cached, text, alone) == alone.plain_ids(model, FURTHER)


def go_on(cached: CachedModel, text: list[int], settings: Settings) -> list[int]:
    """Plain decoding from a cache that holds the beginning of a text."""
    generator = PlainGenerator(cached, settings.chain(), Randomness(settings.seed))
    generator.prefill(text)
    return [token.id for token in generator.tokens(FURTHER)]


def check_contents(cached: CachedModel, model: Any, text: list[int]) -> None:
    """The logits after the text, from the cache and from nothing; the cache is as before then."""
    length = cached.cached_tokens
    continued = cached.forward(mx.array(text[length:]))[-1]
    fresh = model(mx.array([text]))[0, -1, : cached.width]
    assert mx.allclose(continued, fresh, rtol=1e-3, atol=1e-2).item()
    cached.rewind(length)


@pytest.fixture(params=TEMPERATURES, ids=["greedy", "sampled"])
def pair(models: ModelStore, request: pytest.FixtureRequest) -> Pair:
    """Neither all proposals are accepted nor none."""
    target = models.llama(1, head_scale=6.0)
    draft = models.llama(1, head_scale=6.0, disturbance=0.1)
    settings = Settings(sampling=SamplingConfig(temperature=request.param), k=K)
    return Pair(target, draft, settings, settings.plain_ids(target, LENGTH))


def test_rounds_end_in_every_way(pair: Pair) -> None:
    run = pair.run()
    run.ids(LENGTH)
    assert {r.accepted == r.proposed for r in run.rounds} == {True, False}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 11])
def test_the_limit(pair: Pair, count: int) -> None:
    run = pair.run()
    begun = run.ids(count)
    assert len(begun) == count
    pair.check(run, begun)


@pytest.mark.parametrize("least", [3, 6, 7, 9, 11, 16])
def test_the_end_of_the_sequence(pair: Pair, least: int) -> None:
    end, position = next(
        (token, i)
        for i, token in enumerate(pair.plain)
        if i >= least and token not in pair.plain[:i]
    )
    settings = pair.settings.but(eos_ids=frozenset({end}))
    run = settings.speculative(pair.target, pair.draft)
    begun = run.ids(LENGTH)
    assert run.generator.finish_reason is FinishReason.STOP and len(begun) == position
    pair.check(run, begun)


@pytest.mark.parametrize("taken", range(1, 2 * (K + 1) + 1))
def test_a_closed_generator(pair: Pair, taken: int) -> None:
    """At every offset of the first blocks, whatever was computed ahead of the consumer."""
    run = pair.run()
    tokens = run.generator.tokens(LENGTH)
    begun = [next(tokens).id for _ in range(taken)]
    tokens.close()
    pair.check(run, begun)


@pytest.mark.parametrize("taken", [1, 2, 4, 5, 9, 10, 13])
def test_an_exception_of_the_consumer(pair: Pair, taken: int) -> None:
    run = pair.run()
    begun: list[int] = []

    def consume(tokens: Iterator[Token]) -> None:
        for token in tokens:
            begun.append(token.id)
            if len(begun) == taken:
                raise RuntimeError("consumer")

    with pytest.raises(RuntimeError, match="consumer"), closing(run.generator.tokens(LENGTH)) as it:
        consume(it)
    pair.check(run, begun)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_an_exception_of_the_observer(pair: Pair, at: int, error: type[BaseException]) -> None:
    seen: list[Round] = []

    def observe(committed: Round) -> None:
        seen.append(committed)
        if len(seen) == at:
            raise error

    run = pair.run(observe)
    begun: list[int] = []
    with pytest.raises(error):
        for token in run.generator.tokens(LENGTH):
            begun.append(token.id)
    assert len(begun) < LENGTH
    pair.check(run, begun)


def interrupt_in_a_layer(
    monkeypatch: pytest.MonkeyPatch, layers: list[Any], calls: int, *, is_late: bool
) -> None:
    """Ctrl-C in the given call of one of the layers, before it or after its keys are cached."""
    kind = type(layers[0])
    right: Any = kind.__call__
    own = {id(layer) for layer in layers}
    left = [calls]

    def interrupted(self: Any, *arguments: Any, **options: Any) -> Any:
        if id(self) not in own:
            return right(self, *arguments, **options)
        left[0] -= 1
        if left[0] == 0 and not is_late:
            raise KeyboardInterrupt
        result = right(self, *arguments, **options)
        if left[0] == 0:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(kind, "__call__", interrupted)


@pytest.mark.parametrize("interrupted", ["target", "draft"])
@pytest.mark.parametrize("draw", range(6))
def test_an_interrupt_inside_a_forward(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, interrupted: str, draw: int
) -> None:
    random_draw = random.Random(f"{interrupted} {draw}")
    run = pair.run()
    model = pair.target if interrupted == "target" else pair.draft
    begun: list[int] = []
    with monkeypatch.context() as patch:
        calls = random_draw.randrange(5, 25)
        interrupt_in_a_layer(patch, list(model.layers), calls, is_late=random_draw.random() < 0.5)
        with pytest.raises(KeyboardInterrupt):
            for token in run.generator.tokens(LENGTH):
                begun.append(token.id)
    assert len(begun) < LENGTH
    pair.check(run, begun)


def keeps_everything(cached: CachedModel, length: int) -> None:
    """Wrong: nothing is taken back."""


def goes_too_far(cached: CachedModel, length: int) -> None:
    """Wrong: one token too many is taken back from the layers."""
    right_rewind(cached, length - 1)
    cached._fed_tokens = length


def skips_the_last_layer(cached: CachedModel, length: int) -> None:
    """Wrong: as a trim that looks at the first layer alone."""
    kept = cached.caches
    cached.caches = kept[:1]
    right_rewind(cached, length)
    cached.caches = kept


right_rewind = CachedModel.rewind


@pytest.mark.parametrize("wrong", [keeps_everything, goes_too_far, skips_the_last_layer])
def test_the_check_rejects_a_wrong_rewind(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[CachedModel, int], None]
) -> None:
    run = pair.run()
    tokens = run.generator.tokens(LENGTH)
    begun = [next(tokens).id for _ in range(4)]
    with monkeypatch.context() as patch, pytest.raises((AssertionError, ValueError)):
        patch.setattr(CachedModel, "rewind", wrong)
        tokens.close()
        patch.setattr(CachedModel, "rewind", right_rewind)
        pair.check(run, begun)


# Whole runs, whose caches are kept for the next one


@dataclass(frozen=True)
class LoadedPair:
    """A pair as `mlxgen.load` gives it."""

    target: LoadedModel
    draft: LoadedModel

    def config(self, temperature: float, **options: Any) -> GenerationConfig:
        """A run of up to LENGTH tokens."""
        return GenerationConfig(
            sampling=SamplingConfig(temperature=temperature),
            speculation=SpeculationConfig(num_draft_tokens=K),
            **{"max_tokens": LENGTH, "seed": 7, **options},
        )


@pytest.fixture(scope="module")
def loaded(models: ModelStore) -> LoadedPair:
    target = models.llama_directory(1, head_scale=6.0)
    draft = models.llama_directory(1, head_scale=6.0, disturbance=0.1)
    return LoadedPair(mlxgen.load(str(target)), mlxgen.load(str(draft), role="draft"))


PROMPT = (3, 1, 4, 1, 5)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("first", [2, 4, 5, 7, 11, 12])
def test_a_stop_string(loaded: LoadedPair, temperature: float, first: int) -> None:
    """It is complete inside a block, so tokens behind it have been verified already."""
    config = loaded.config(temperature)
    plain = generate(loaded.target, PROMPT, config)
    stop = plain.text[first : first + 2]
    length = plain.text.index(stop) + 2
    memory = Memory(loaded.target, loaded.draft)
    stopping = loaded.config(temperature, stop=(stop,))
    run = generate(loaded.target, PROMPT, stopping, draft=loaded.draft, memory=memory)
    assert run.stop_string == stop and run.token_ids == plain.token_ids[:length]
    text = [*PROMPT, *run.token_ids]
    assert memory.target.ids.tolist() == text[:-1]
    rest = loaded.config(temperature, max_tokens=LENGTH - length)
    further = generate(loaded.target, text, rest, memory=memory)
    assert further.reused_tokens == len(text) - 1
    assert run.token_ids + further.token_ids == plain.token_ids


SOURCES = (str(Path(mlxgen.__file__).parent), "mlx_lm/models/cache.py")
"""Where Ctrl-C is tried: all of this package, and the caches of mlx-lm."""


class InterruptAtLine:
    """Raises KeyboardInterrupt at the n-th line that runs in `SOURCES`; 0 counts lines only."""

    def __init__(self, line: int) -> None:
        self._line = line
        self.lines = 0

    def __enter__(self) -> InterruptAtLine:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        path = frame.f_code.co_filename
        return self._step if path.startswith(SOURCES[0]) or path.endswith(SOURCES[1]) else None

    def _step(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._line:
                raise KeyboardInterrupt
        return self._step


def one_turn(
    loaded: LoadedPair, memory: Memory, prompt: list[int], config: GenerationConfig
) -> list[int]:
    """The ids of a run, up to the interruption if there is one."""
    stream = stream_generate(loaded.target, prompt, config, draft=loaded.draft, memory=memory)
    try:
        with closing(iter(stream)) as pieces:
            for _ in pieces:
                pass
    except KeyboardInterrupt:
        pass
    return stream.result.token_ids


@pytest.mark.parametrize("taken", [0, 1, 99])
def test_a_stream_is_read_once(loaded: LoadedPair, taken: int) -> None:
    config = GenerationConfig(max_tokens=12)
    stream = stream_generate(loaded.target, list(PROMPT), config, draft=loaded.draft)
    with closing(iter(stream)) as pieces:
        for _ in zip(range(taken + 1), pieces, strict=False):
            pass
    tokens = stream.result.token_ids
    with pytest.raises(GenerationError, match="read once"):
        next(iter(stream))
    assert stream.result.token_ids == tokens


def lines_of_a_turn(loaded: LoadedPair, config: GenerationConfig) -> int:
    with InterruptAtLine(0) as counter:
        one_turn(loaded, Memory(loaded.target, loaded.draft), list(PROMPT), config)
    return counter.lines


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_an_interrupt_at_any_line_spoils_no_later_run(
    loaded: LoadedPair, temperature: float
) -> None:
    """Also in the clean-up after a run: what was torn there is not used again."""
    config = loaded.config(temperature, max_tokens=12)
    plain = generate(loaded.target, PROMPT, config).token_ids
    total = lines_of_a_turn(loaded, config)
    assert total > 1000
    taken_up = 0
    draws = random.Random(temperature)
    for line in [*draws.sample(range(1, total), 12), *range(total - 6, total)]:
        memory = Memory(loaded.target, loaded.draft)
        begun: list[int] = []
        try:
            with InterruptAtLine(line):
                begun = one_turn(loaded, memory, list(PROMPT), config)
        except KeyboardInterrupt:  # before the run began, or in its clean-up
            begun = []
        assert begun == plain[: len(begun)], line
        text = [*PROMPT, *begun]
        rest = loaded.config(temperature, max_tokens=12 - len(begun) + FURTHER)
        further = generate(loaded.target, text, rest, draft=loaded.draft, memory=memory)
        assert further.token_ids == generate(loaded.target, text, rest).token_ids, line
        taken_up += further.reused_tokens > 0
    assert taken_up > 5, "most interruptions leave something to take up"
