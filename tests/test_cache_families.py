"""Speculation on every kind of cache: ids equal to plain decoding on each family of mlx-lm.

Targets and drafts are the tiny models of `tests.fixtures.model_families`. A draft is its target
with disturbed weights, so that some proposals are accepted and some are not.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache, trim_prompt_cache

from mlxgen.cache import cached_model, chunked, sliding, snapshots
from mlxgen.cache import caches as cache_ops
from mlxgen.cache.cached_model import CachedModel, as_ids
from mlxgen.cache.sliding import SlidingKVCache
from mlxgen.cache.snapshots import Snapshot, SnapshotLog
from mlxgen.config import CacheConfig, SamplingConfig
from mlxgen.errors import GenerationError, OptionError, PairError
from mlxgen.speculative.loop import Round
from tests.fixtures.model_families import FAMILIES, NOT_BUILT, VOCABULARY, WINDOW_TOKENS, build
from tests.fixtures.runs import Settings, Speculation

ROOT = Path(__file__).resolve().parent.parent
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)
TOKENS = 64
DISTURBANCE = 0.1

KINDS = {
    "trimmed": "qwen3",
    "window": "llama, sliding",
    "wider mask than window": "plamo3",
    "chunk": "llama4",
    "recurrent": "mamba",
    "both in a layer": "falcon_h1",
    "window and recurrent": "recurrent_gemma",
    "a cache of its own": "deepseek_v41",
    "ids as state": "longcat_flash_ngram",
}
"""A family for each way of rewinding, and for each way it could go wrong."""
REFUSED = {"phi3small": "adds its attention mask"}
"""Families that cannot be targets, and what the refusal says."""


@dataclass(frozen=True, kw_only=True)
class FamilySettings(Settings):
    """Settings for models whose arguments have no common form."""

    prompt: tuple[int, ...] = PROMPT
    k: int = 3

    def cached(self, model: Any, role: str) -> CachedModel:
        """A model with an empty cache."""
        filled_up = self.filled_up if role == "target" else range(0)
        return CachedModel(
            model, role=role, width=self.width, filled_up=filled_up, config=self.cache
        )


def greedy(**changes: Any) -> FamilySettings:
    """Temperature 0. The penalty keeps the text from running in circles."""
    return FamilySettings(
        sampling=SamplingConfig(repetition_penalty=1.5, repeat_last_n=16), **changes
    )


def sampled(target: Any) -> FamilySettings:
    """A temperature that suits the size of the model's logits."""
    logits = target(mx.array([PROMPT]))[0, -1]
    temperature = float(np.std(np.array(logits.astype(mx.float32)))) / 6
    return FamilySettings(
        sampling=SamplingConfig(temperature=temperature, repetition_penalty=1.5, repeat_last_n=16)
    )


@cache
def pair(name: str) -> tuple[Any, Any]:
    """A family's target and the draft for it."""
    return build(name), build(name, disturbance=DISTURBANCE)


def check_lengths(cached: CachedModel) -> None:
    """Every cache that counts its tokens holds as many as the model says."""
    offsets = {
        int(cache.offset)
        for cache in cache_ops.flattened(cached.caches)
        if hasattr(cache, "offset") and not cache.empty()
    }
    assert offsets <= {cached.cached_tokens}


def speculate(settings: FamilySettings, target: Any, draft: Any) -> Speculation:
    """A prefilled run whose caches are checked after every round."""
    runs: list[Speculation] = []

    def check(done: Round) -> None:
        run = runs[0]
        boundary = len(run.generator._history) - 1
        assert done.target_cache_tokens == boundary
        assert done.draft_cache_tokens is not None and run.draft is not None
        assert done.draft_cache_tokens + done.owed_tokens == boundary
        check_lengths(run.target)
        check_lengths(run.draft)

    runs.append(settings.speculative(target, draft, on_round=check))
    return runs[0]


def check_parity(settings: FamilySettings, target: Any, draft: Any, tokens: int = TOKENS) -> None:
    """Ids equal plain decoding, in a run with both acceptance and rejection."""
    run = speculate(settings, target, draft)
    assert run.ids(tokens) == settings.plain_ids(target, tokens)
    assert 0 < run.statistics.accepted < run.statistics.positions_tested


# The registry


def test_every_module_of_mlx_lm_is_built_or_said_not_to_be() -> None:
    folder = Path(mlx_lm.models.__path__[0])
    modules = {
        path.stem
        for path in folder.glob("*.py")
        if re.search(r"^class ModelArgs\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    built = {name.partition(",")[0] for name in FAMILIES}
    assert built | set(NOT_BUILT) == modules
    assert not built & set(NOT_BUILT)


def test_page_of_families_is_up_to_date() -> None:
    script = ROOT / "scripts" / "write_family_docs.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# Parity


@pytest.mark.parametrize("kind", KINDS)
def test_speculation_is_exact_on_every_kind_of_cache(kind: str) -> None:
    target, draft = pair(KINDS[kind])
    check_parity(greedy(), target, draft)
    check_parity(sampled(target), target, draft)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(KINDS.values())))
def test_speculation_is_exact_on_every_family(name: str) -> None:
    target, draft = build(name), build(name, disturbance=DISTURBANCE)
    if name in REFUSED:
        with pytest.raises(PairError, match=REFUSED[name]):
            greedy().speculative(target, draft)
        assert len(greedy().plain_ids(target, 8)) == 8
        return
    check_parity(greedy(), target, draft)
    check_parity(sampled(target), target, draft)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["window", "recurrent", "chunk", "trimmed"])
@pytest.mark.parametrize("draft", ["window", "recurrent", "both in a layer", "chunk"])
def test_target_and_draft_may_be_of_different_kinds(target: str, draft: str) -> None:
    """Four tokens can be drawn, so that models that know nothing of each other agree at times."""
    bias = tuple((token, -float("inf")) for token in range(4, VOCABULARY))
    settings = FamilySettings(sampling=SamplingConfig(temperature=2.0, logit_bias=bias))
    check_parity(settings, pair(KINDS[target])[0], pair(KINDS[draft])[1], 40)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 5, 12])
@pytest.mark.parametrize("kind", ["window", "chunk", "recurrent", "both in a layer"])
def test_any_draft_length_is_exact(kind: str, k: int) -> None:
    """More forwards in a round than snapshots are kept; drafts that cross chunks and windows."""
    target, draft = pair(KINDS[kind])
    check_parity(greedy(k=k), target, draft, 48)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["window", "chunk", "recurrent", "a cache of its own"])
@pytest.mark.parametrize("step", [1, 4, 9])
def test_any_prefill_step_gives_plain_ids(kind: str, step: int) -> None:
    target, draft = pair(KINDS[kind])
    prompt = tuple((7 * i) % VOCABULARY for i in range(30))
    settings = greedy(prompt=prompt, cache=CacheConfig(prefill_step_tokens=step))
    check_parity(settings, target, draft, 32)


def test_a_target_with_unequal_blocks_is_refused_and_may_draft() -> None:
    assert set(REFUSED) == {"phi3small"}
    target, draft = pair("phi3small")
    with pytest.raises(PairError, match="adds its attention mask"):
        greedy().speculative(target, draft)
    settings = greedy()
    run = settings.speculative(pair("qwen3")[0], draft)
    assert run.ids(32) == settings.plain_ids(pair("qwen3")[0], 32)


DYNAMIC = {
    "max_position_embeddings": 48,
    "rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 8.0},
}
"""Positions that turn by less the longer a text is that has outgrown 48 tokens."""


@pytest.mark.parametrize("filled_up", [range(0), range(2, 8)], ids=["", "filled up"])
@pytest.mark.parametrize("name", ["internlm2", "internlm3"])
def test_no_block_goes_where_positions_depend_on_its_end(name: str, filled_up: range) -> None:
    target = build(name, changes=DYNAMIC)
    draft = build(name, disturbance=DISTURBANCE, changes=DYNAMIC)
    settings = greedy(k=5, filled_up=filled_up)
    check_parity(settings, target, draft)
    run = speculate(settings, target, draft)
    run.ids(TOKENS)
    limit = run.target.equal_block_tokens
    assert limit is not None and limit <= 48
    lengths = [done.target_cache_tokens for done in run.rounds]
    assert limit - 8 < max(lengths) <= limit, "and up to there blocks are verified"


@pytest.mark.parametrize("name", ["internlm2", "internlm3"])
def test_parity_check_rejects_blocks_that_go_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_model, "equal_block_tokens", lambda model: None)
    target = build(name, changes=DYNAMIC)
    draft = build(name, disturbance=DISTURBANCE, changes=DYNAMIC)
    # Where the texts part is a matter of rounding, and so of the BLAS: after 47 to 82 tokens.
    with pytest.raises(AssertionError):
        check_parity(greedy(k=5), target, draft, 160)


# The checks can fail

Wrong = Callable[[pytest.MonkeyPatch], None]


def keeps_rejected_state(patch: pytest.MonkeyPatch) -> None:
    """Wrong: recurrent layers are left as they are, as when a trim does nothing."""

    def stay(log: SnapshotLog, caches: list[Any], length: int) -> tuple[int, mx.array]:
        return length, mx.zeros((0,), dtype=mx.int32)

    patch.setattr(SnapshotLog, "restore", stay)


def forgets_to_forward_again(patch: pytest.MonkeyPatch) -> None:
    """Wrong: the state before the round stands for the state after it."""
    patch.setattr(CachedModel, "_forward_again", lambda *_: None)


def shares_what_is_assigned_to(patch: pytest.MonkeyPatch) -> None:
    """Wrong: a snapshot holds the very list that the model goes on to fill."""
    patch.setattr(snapshots, "_copied", lambda value: copy.copy(value))


def trims_as_mlx_lm_does(patch: pytest.MonkeyPatch) -> None:
    """Wrong: the caches are mlx-lm's own, and it does not trim any once a window has wrapped."""

    def trim(caches: list[Any], length: int, role: str) -> None:
        trim_prompt_cache(caches, caches[0].offset - length)

    patch.setattr(cache_ops, "make_rewindable", lambda *_: None)
    patch.setattr(cache_ops, "_TRIMMABLE", (KVCache, RotatingKVCache))
    patch.setattr(cache_ops, "rewind", trim)


def replays_without_trimming(patch: pytest.MonkeyPatch) -> None:
    """Wrong: keys and values of rejected tokens stay in the layers that are trimmed."""
    patch.setattr(cache_ops, "rewind", lambda *_: None)


def masks_as_the_model_asks(patch: pytest.MonkeyPatch) -> None:
    """Wrong: a block sees more than its tokens would one by one."""
    patch.setattr(SlidingKVCache, "make_mask", RotatingKVCache.make_mask)


def keeps_no_reserve(patch: pytest.MonkeyPatch) -> None:
    """Wrong: a chunk is cut off while a rewind may still reach back over its beginning."""
    patch.setattr(chunked, "RESERVE_TOKENS", 0)
    patch.setattr(chunked, "_STEP_TOKENS", 1)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (keeps_rejected_state, "recurrent"),
        (keeps_rejected_state, "both in a layer"),
        (keeps_rejected_state, "ids as state"),
        (forgets_to_forward_again, "recurrent"),
        (shares_what_is_assigned_to, "recurrent"),
        (trims_as_mlx_lm_does, "window"),
        (replays_without_trimming, "both in a layer"),
        (masks_as_the_model_asks, "wider mask than window"),
        (keeps_no_reserve, "chunk"),
    ],
)
def test_parity_check_rejects_a_wrong_rewind(
    monkeypatch: pytest.MonkeyPatch, wrong: Wrong, kind: str
) -> None:
    target, draft = pair(KINDS[kind])
    settings = greedy(k=5)
    check_parity(settings, target, draft, 48)
    wrong(monkeypatch)
    with pytest.raises((AssertionError, GenerationError)):
        check_parity(settings, target, draft, 48)


# Rewinding by itself


def logits_after(cached: CachedModel, token: int) -> Any:
    """The model's logits after one more token."""
    return np.array(cached.forward(mx.array([token]))[0])


def fresh_logits(model: Any, prompt: Sequence[int], rest: Sequence[int]) -> Any:
    """The logits after a text, behind the prompt token by token, on mlx-lm's own caches."""
    cached = FamilySettings().cached(model, "target")
    cached.prefill(as_ids([*prompt]))
    for token in rest:
        logits = cached.forward(mx.array([token]))
    return np.array(logits[0])


def prefilled(model: Any, role: str) -> CachedModel:
    """A model that can be rewound and holds `PROMPT`."""
    cached = FamilySettings().cached(model, role)
    cached.make_rewindable()
    cached.prefill(as_ids([*PROMPT]))
    return cached


CONTINUATION = [7, 23, 42, 11, 60, 2, 35, 19, 50, 8]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [(4, 6), (1,) * 10])
def test_every_length_of_two_rounds_can_be_gone_back_to(kind: str, blocks: tuple[int, ...]) -> None:
    """Blocks as a target gets them and steps as a draft does."""
    model = pair(KINDS[kind])[0]
    for length in range(len(CONTINUATION) + 1):
        cached = prefilled(model, "target")
        start = 0
        for number, size in enumerate(blocks):
            cached.forward(mx.array(CONTINUATION[start : start + size]))
            start += size
            if number == 0:
                cached.rewind(len(PROMPT) + start)
        cached.rewind(len(PROMPT) + length)
        assert cached.cached_tokens == len(PROMPT) + length
        check_lengths(cached)
        expected = fresh_logits(model, PROMPT, [*CONTINUATION[:length], 33])
        assert np.allclose(logits_after(cached, 33), expected, rtol=1e-3, atol=1e-4), length


@pytest.mark.parametrize("kind", ["recurrent", "both in a layer"])
def test_what_no_snapshot_reaches_is_refused(kind: str) -> None:
    cached = prefilled(pair(KINDS[kind])[0], "draft")
    with pytest.raises(GenerationError, match="known nowhere else"):
        cached.rewind(len(PROMPT) - 1)
    for token in CONTINUATION:
        cached.forward(mx.array([token]))
        cached.rewind(cached.cached_tokens)
    reach = len(PROMPT) + len(CONTINUATION) - 2
    with pytest.raises(GenerationError, match=f"the draft model's .* from {reach} tokens on"):
        cached.rewind(reach - 1)
    with pytest.raises(GenerationError, match="cannot be rewound to"):
        cached.rewind(cached.cached_tokens + 1)
    cached.rewind(reach)
    assert cached.cached_tokens == reach


def test_a_trim_that_falls_short_ends_the_run() -> None:
    class Stubborn(KVCache):
        def trim(self, n: int) -> int:
            return 0

    class Boastful(KVCache):
        def trim(self, n: int) -> int:
            self.offset -= n
            return n + 1

    for cache_type in (Stubborn, Boastful):
        layer: Any = cache_type()
        entries = mx.zeros((1, 1, 6, 8))
        layer.update_and_fetch(entries, entries)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache_ops, "_TRIMMABLE", (cache_type,))
            with pytest.raises(GenerationError, match="the draft model's cache of layer 1"):
                cache_ops.rewind([KVCache(), layer], 4, "draft")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taken", [1, 2, 4, 7])
def test_closing_leaves_both_caches_at_the_last_token_taken(kind: str, taken: int) -> None:
    """Shown by going on, plainly from the target's caches and with the draft."""
    target, draft = pair(KINDS[kind])
    settings = greedy(k=4)
    plain = settings.plain_ids(target, 20)
    for goes_on_plainly in (True, False):
        run = settings.speculative(target, draft)
        tokens = run.generator.tokens(20)
        begun = [next(tokens).id for _ in range(taken)]
        tokens.close()
        assert begun == plain[:taken]
        boundary = len(PROMPT) + taken - 1
        assert run.target.cached_tokens == boundary
        assert run.draft is not None and run.draft.cached_tokens <= boundary
        if goes_on_plainly:
            assert np.allclose(
                logits_after(run.target, begun[-1]),
                fresh_logits(target, PROMPT[:-1], [PROMPT[-1], *begun]),
                rtol=1e-3,
                atol=1e-4,
            )
        else:
            assert begun + run.ids(20 - taken) == plain


class Interrupted:
    """A model that is interrupted after some forwards, its caches changed and nothing returned."""

    def __init__(self, model: Any, stop_at: int) -> None:
        self._model = model
        self._calls_left = stop_at
        self.layers = model.layers
        if hasattr(model, "make_cache"):
            self.make_cache = model.make_cache

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        self._calls_left -= 1
        logits: mx.array = self._model(ids, cache=cache)
        if self._calls_left == 0:
            raise KeyboardInterrupt
        return logits


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["window", "chunk", "recurrent", "both in a layer"])
@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("stop_at", [4, 5, 6, 7, 8])
def test_an_interrupt_in_a_forward_or_in_its_repetition_is_survived(
    kind: str, role: str, stop_at: int
) -> None:
    target, draft = pair(KINDS[kind])
    settings = greedy()
    plain = settings.plain_ids(target, 24)
    if role == "target":
        run = settings.speculative(Interrupted(target, stop_at), draft)
    else:
        run = settings.speculative(target, Interrupted(draft, stop_at))
    begun: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        for token in run.generator.tokens(24):
            begun.append(token.id)
    assert 0 < len(begun) < 24
    assert run.target.cached_tokens == len(PROMPT) + len(begun) - 1
    assert begun + run.ids(24 - len(begun)) == plain


@pytest.mark.parametrize("length", [45, 33, 20, 11])
def test_snapshots_of_long_rounds_are_few(length: int) -> None:
    model = pair("mamba")[0]
    cached = prefilled(model, "draft")
    for step in range(40):
        cached.forward(mx.array([step]))
        if step == 20:
            cached.rewind(cached.cached_tokens)
    log = cached._snapshots
    assert log is not None and len(log._snapshots) <= 6
    assert log.reach_tokens == len(PROMPT)
    cached.rewind(length)
    expected = fresh_logits(model, PROMPT, [*range(length - len(PROMPT)), 9])
    assert np.allclose(logits_after(cached, 9), expected, rtol=1e-3, atol=1e-4)


def test_a_snapshot_outlives_what_happens_to_the_cache() -> None:
    class Own:
        def __init__(self) -> None:
            self.rows = mx.zeros((3,))
            self.parts = [mx.ones((2,)), None]
            self.nested = {"a": (mx.array([5]), 1)}

    own = Own()
    snapshot = Snapshot.of([own], 0)
    for _ in range(2):
        own.rows[1] = 7
        own.parts[0] = None
        own.nested["a"] = (mx.array([6]), 2)
        own.new = True  # type: ignore[attr-defined]
        snapshot.restore([own])
        assert own.rows.tolist() == [0, 0, 0]
        assert own.parts[0] is not None and own.parts[0].tolist() == [1, 1]
        assert (own.nested["a"][0].item(), own.nested["a"][1]) == (5, 1)
        assert not hasattr(own, "new")


# The sliding window by itself


def entries(positions: list[int]) -> mx.array:
    """Keys that say their position: `[1, 1, n, 1]`."""
    return mx.array(positions, dtype=mx.float32).reshape(1, 1, -1, 1)


def seen(cache: Any, n: int, window: int | None, newest: int) -> list[set[int]]:
    """Append n tokens; the positions that each of them attends to."""
    mask = cache.make_mask(n, window_size=window, return_array=n > 1)
    positions = list(range(newest, newest + n))
    keys, values = cache.update_and_fetch(entries(positions), entries(positions))
    assert np.array_equal(keys, values)
    held = np.array(keys).reshape(-1).astype(int)
    if mask is None:
        return [set(held.tolist())] * n
    rows = np.broadcast_to(np.array(mask), (n, len(held)))
    return [set(held[row].tolist()) for row in rows]


@pytest.mark.parametrize("window", [None, 5, 8])
@pytest.mark.parametrize("prompt", [1, 3, 8, 20])
def test_window_shows_each_token_what_the_rotating_cache_shows(
    monkeypatch: pytest.MonkeyPatch, window: int | None, prompt: int
) -> None:
    """Against a rotating cache that is fed one token at a time and never rewound."""
    monkeypatch.setattr(sliding, "RESERVE_TOKENS", 12)
    monkeypatch.setattr(sliding, "_STEP_TOKENS", 4)
    rotating = RotatingKVCache(max_size=8)
    seen(rotating, prompt, window, 0)
    rotating_seen = {p: seen(rotating, 1, window, p)[0] for p in range(prompt, prompt + 80)}

    start = RotatingKVCache(max_size=8)
    seen(start, prompt, window, 0)
    cache = SlidingKVCache.from_rotating(start)
    draws = np.random.default_rng(prompt)
    newest = prompt
    while newest < prompt + 70:
        n = int(draws.integers(1, 7))
        for offset, positions in enumerate(seen(cache, n, window, newest)):
            assert positions == rotating_seen[newest + offset]
        dropped = int(draws.integers(0, n))
        assert cache.trim(dropped) == dropped
        newest += n - dropped
        assert cache.offset == newest
    assert cache.keys.shape[2] < 40, "memory stays bounded"
    back = cache.to_rotating()
    assert seen(back, 1, window, newest)[0] == rotating_seen[newest]


def test_window_trims_no_further_than_it_can_go_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliding, "RESERVE_TOKENS", 12)
    monkeypatch.setattr(sliding, "_STEP_TOKENS", 4)
    cache = SlidingKVCache(8)
    for position in range(60):
        seen(cache, 1, None, position)
    dropped = cache.trim(59)
    assert 12 <= dropped < 59
    assert seen(cache, 1, None, 60 - dropped)[0] == set(range(60 - dropped - 7, 61 - dropped))
    with pytest.raises(GenerationError, match="SlidingKVCache cannot be rewound"):
        cache_ops.rewind([cache], 3, "target")


def test_ring_that_keeps_its_first_tokens_is_refused_with_a_draft() -> None:
    ring = greedy(cache=CacheConfig(max_kv_size=16))
    with pytest.raises(PairError, match="has a RotatingKVCache that keeps"):
        ring.speculative(*pair("qwen3"))
    with pytest.raises(ValueError, match="no sliding window"):
        SlidingKVCache.from_rotating(RotatingKVCache(8, keep=4))


def test_chunk_that_has_been_cut_off_is_noticed() -> None:
    cache = ChunkedKVCache(8)
    for position in range(30):
        cache.maybe_trim_front()
        cache.update_and_fetch(entries([position]), entries([position]))
    with pytest.raises(GenerationError, match="has lost the beginning of the chunk"):
        cache_ops.rewind([cache], 23, "target")


# Options


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("start", [0, 12, 13, 14, 15, 30])
def test_quantised_target_and_draft_keep_parity(bits: int, start: int) -> None:
    """Starts in the prompt, at each place of a block, and behind several rounds."""
    cache = CacheConfig(kv_bits=bits, kv_group_size=32, quantized_kv_start=start)
    check_parity(greedy(cache=cache), *pair("qwen3"), 32)


@pytest.mark.parametrize("name", ["jamba", "qwen3_next", "lfm2", "nemotron_h", "deepseek_v2"])
@pytest.mark.parametrize("start", [0, 14])
def test_quantised_attention_beside_recurrent_layers_keeps_parity(name: str, start: int) -> None:
    cache = CacheConfig(kv_bits=4, kv_group_size=32, quantized_kv_start=start)
    check_parity(greedy(cache=cache), *pair(name), 32)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("window", "cannot quantise this model's RotatingKVCache"),
        ("chunk", "cannot quantise this model's ChunkedKVCache"),
        ("both in a layer", "cannot quantise this model's CacheList"),
        ("recurrent", "has no keys and values"),
        ("trimmed", "128.* does not fit the draft model"),
    ],
)
def test_caches_that_cannot_be_quantised_are_refused_in_one_line(kind: str, reason: str) -> None:
    group = 128 if kind == "trimmed" else 32
    settings = greedy(cache=CacheConfig(kv_bits=8, kv_group_size=group))
    with pytest.raises(OptionError, match=reason) as refusal:
        settings.cached(pair(KINDS[kind])[0], "draft")
    assert "\n" not in str(refusal.value) and "--kv-bits" in str(refusal.value)


def test_code_that_cannot_work_with_quantised_entries_is_refused_in_one_line() -> None:
    settings = greedy(cache=CacheConfig(kv_bits=8, kv_group_size=32))
    with pytest.raises(
        OptionError, match="code for the target model cannot work with it"
    ) as raised:
        settings.cached(pair("deepseek_v3")[0], "target")
    assert "\n" not in str(raised.value)


def test_a_device_without_quantised_products_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA MLX raises when it evaluates such a product, not when it is built."""
    evaluated: Any = mx.eval

    def missing(*arrays: Any) -> None:
        evaluated(*arrays)
        raise RuntimeError("[quantized_matmul] No implementation for problem shape: 1x2x32x2")

    settings = greedy(cache=CacheConfig(kv_bits=8, kv_group_size=32))
    model = pair("llama")[0]
    settings.cached(model, "target")
    monkeypatch.setattr(mx, "eval", missing)
    greedy().cached(model, "target")
    with pytest.raises(OptionError, match="MLX cannot multiply by such a cache") as raised:
        settings.cached(model, "target")
    assert "\n" not in str(raised.value) and "drop it" in str(raised.value)


def check_size_is_honoured(name: str, target: Any) -> None:
    """`--max-kv-size` bounds every cache that grows, or is refused."""
    settings = greedy(cache=CacheConfig(max_kv_size=12))
    if name in ("mamba", "mamba2", "rwkv7", "recurrent_gemma", "deepseek_v41"):
        with pytest.raises(OptionError, match="no cache that it limits"):
            settings.cached(target, "target")
        return
    cached = settings.cached(target, "target")
    cached.prefill(as_ids(list(PROMPT)))
    for token in range(30):
        mx.eval(cached.forward(mx.array([token])))
    rings: list[Any] = [
        each for each in cache_ops.flattened(cached.caches) if isinstance(each, RotatingKVCache)
    ]
    assert any(ring.keep == 4 for ring in rings)
    assert {ring.keys.shape[2] for ring in rings} <= {WINDOW_TOKENS, 12}
    assert not any(type(c) is KVCache for c in cache_ops.flattened(cached.caches))


@pytest.mark.parametrize("kind", KINDS)
def test_max_kv_size_is_honoured_or_refused(kind: str) -> None:
    check_size_is_honoured(KINDS[kind], pair(KINDS[kind])[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(KINDS.values())))
def test_cache_options_hold_or_are_refused_on_every_family(name: str) -> None:
    target, draft = build(name), build(name, disturbance=DISTURBANCE)
    check_size_is_honoured(name, target)
    if name in REFUSED:
        return
    cache = CacheConfig(kv_bits=4, kv_group_size=32, quantized_kv_start=14)
    try:
        greedy(cache=cache).cached(target, "target")
    except OptionError as refusal:
        assert "\n" not in str(refusal)
    else:
        check_parity(greedy(cache=cache), target, draft, 32)
