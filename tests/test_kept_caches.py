"""Caches that outlive a run: a warm run emits the ids of a cold one, whatever it takes up."""

from __future__ import annotations

import json
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlxgen
from mlxgen.cache import kept as kept_module
from mlxgen.cache.cached_model import CachedModel, as_ids
from mlxgen.cache.kept import KeptCache, common_prefix_length
from mlxgen.cache.packing import pack, unpack
from mlxgen.config import AcceptRule, CacheConfig, GenerationConfig, SamplingConfig
from mlxgen.decoding.plain import PlainGenerator
from mlxgen.drafters.draft_model import DraftModel
from mlxgen.generation import Generation, generate
from mlxgen.memory import Memory
from mlxgen.models.loading import LoadedModel
from mlxgen.sampling.randomness import Randomness
from mlxgen.speculative.loop import SpeculativeGenerator
from tests.fixtures.model_families import VOCABULARY, build
from tests.fixtures.runs import ModelStore, Settings

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
QUESTION = [7, 0]
QUANTISED = CacheConfig(kv_bits=4, kv_group_size=32)


@pytest.fixture(scope="module")
def target(models: ModelStore) -> LoadedModel:
    return mlxgen.load(str(models.llama_directory(1, head_scale=6.0)))


@pytest.fixture(scope="module")
def draft(models: ModelStore) -> LoadedModel:
    """Agrees with the target now and then."""
    directory = models.llama_directory(1, head_scale=6.0, disturbance=0.1)
    return mlxgen.load(str(directory), role="draft")


def config(temperature: float = 0.0, **options: Any) -> GenerationConfig:
    sampling = SamplingConfig(temperature=temperature)
    return GenerationConfig(sampling=sampling, **{"max_tokens": 8, "seed": 3, **options})


def warm_and_cold(
    target: LoadedModel,
    prompt: list[int],
    config: GenerationConfig,
    memory: Memory,
    draft: LoadedModel | None = None,
) -> Generation:
    """A run with a memory, compared with one without."""
    warm = generate(target, prompt, config, draft=draft, memory=memory)
    assert warm.token_ids == generate(target, prompt, config, draft=draft).token_ids
    return warm


@pytest.mark.parametrize("n", range(1, 11))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("has_draft", [False, True])
def test_a_conversation_is_the_same_with_and_without_its_caches(
    target: LoadedModel, draft: LoadedModel, n: int, temperature: float, has_draft: bool
) -> None:
    helper = draft if has_draft else None
    memory = Memory(target, helper)
    prompt = PROMPT
    settings = config(temperature, max_tokens=n)
    for turn in range(3):
        run = warm_and_cold(target, prompt, settings, memory, helper)
        # All but the newest token of the turn before was there.
        expected = 0 if turn == 0 else len(prompt) - len(QUESTION) - 1
        assert run.reused_tokens == expected
        prompt = [*prompt, *run.token_ids, *QUESTION]


def test_the_same_prompt_again_forwards_its_last_token_alone(
    target: LoadedModel, draft: LoadedModel
) -> None:
    memory = Memory(target, draft)
    for turn in range(3):
        run = warm_and_cold(target, PROMPT, config(), memory, draft)
        assert run.reused_tokens == (len(PROMPT) - 1 if turn else 0)


@pytest.mark.parametrize(
    ("prompt", "reused"),
    [
        (PROMPT[:3], 2),
        ([*PROMPT[:5], 60, 61], 5),
        ([60, *PROMPT], 0),
        (PROMPT[:1], 0),
        ([*PROMPT, 60], len(PROMPT)),
    ],
)
def test_what_two_prompts_share_is_taken_up(
    target: LoadedModel, draft: LoadedModel, prompt: list[int], reused: int
) -> None:
    memory = Memory(target, draft)
    generate(target, PROMPT, config(), draft=draft, memory=memory)
    assert warm_and_cold(target, prompt, config(), memory, draft).reused_tokens == reused


def test_a_draft_that_comes_later_takes_in_the_whole_prompt(
    target: LoadedModel, draft: LoadedModel
) -> None:
    memory = Memory(target, draft)
    first = generate(target, PROMPT, config(), memory=memory)
    prompt = [*PROMPT, *first.token_ids, *QUESTION]
    assert memory.draft is not None and memory.draft.held is None
    run = warm_and_cold(target, prompt, config(), memory, draft)
    assert run.reused_tokens == len(prompt) - 3 and memory.draft.reused_tokens == 0
    # And without it again; what it holds then is behind, and still a beginning of the text.
    prompt = [*prompt, *run.token_ids, *QUESTION]
    run = warm_and_cold(target, prompt, config(), memory)
    prompt = [*prompt, *run.token_ids, *QUESTION]
    run = warm_and_cold(target, prompt, config(), memory, draft)
    assert 0 < memory.draft.reused_tokens < run.reused_tokens


def test_a_memory_for_other_cache_options_is_refused(target: LoadedModel) -> None:
    with pytest.raises(ValueError, match="other cache options"):
        generate(target, PROMPT, config(cache=QUANTISED), memory=Memory(target))


def test_a_prompt_that_is_refused_leaves_the_memory_alone(target: LoadedModel) -> None:
    memory = Memory(target)
    generate(target, PROMPT, config(), memory=memory)
    with pytest.raises(mlxgen.MlxgenError, match="token 99"):
        generate(target, [*PROMPT, 99], config(), memory=memory)
    assert generate(target, PROMPT, config(), memory=memory).reused_tokens == len(PROMPT) - 1


def test_common_prefix() -> None:
    for first, second, length in [
        ([], [], 0),
        ([1, 2], [], 0),
        ([1, 2], [1, 2], 2),
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2], [1, 2, 3], 2),
        ([5, 2], [1, 2], 0),
    ]:
        assert common_prefix_length(as_ids(first), as_ids(second)) == length


def test_the_check_rejects_a_prefix_that_is_one_token_too_long(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_too_many(first: Any, second: Any) -> int:
        return min(common_prefix_length(first, second) + 1, len(first), len(second))

    memory = Memory(target)
    generate(target, PROMPT, config(), memory=memory)
    monkeypatch.setattr(kept_module, "common_prefix_length", one_too_many)
    with pytest.raises(AssertionError):
        warm_and_cold(target, [*PROMPT[:4], 60, 61, 62], config(), memory)


# Quantised caches and rings


@pytest.mark.parametrize("has_draft", [False, True])
def test_a_cache_that_is_quantised_from_the_start_is_taken_up(
    target: LoadedModel, draft: LoadedModel, has_draft: bool
) -> None:
    helper = draft if has_draft else None
    memory = Memory(target, helper, QUANTISED)
    prompt = PROMPT
    for turn in range(3):
        run = warm_and_cold(target, prompt, config(cache=QUANTISED), memory, helper)
        assert (run.reused_tokens > 0) == (turn > 0)
        prompt = [*prompt, *run.token_ids, *QUESTION]


START = 40


def quantised_halfway(step: int) -> CacheConfig:
    return CacheConfig(
        kv_bits=2, kv_group_size=32, quantized_kv_start=START, prefill_step_tokens=step
    )


@pytest.mark.parametrize("step", [7, 2048])
def test_a_cache_is_taken_up_until_its_quantisation_starts(target: LoadedModel, step: int) -> None:
    """From then on a cold run, which takes in more at once, would have quantised elsewhere."""
    options = quantised_halfway(step)
    memory = Memory(target, None, options)
    prompt = PROMPT
    taken_up = []
    for _ in range(6):
        run = warm_and_cold(target, prompt, config(cache=options), memory)
        taken_up.append(run.reused_tokens > 0)
        prompt = [*prompt, *run.token_ids, *QUESTION]
    assert taken_up == [False, True, True, True, False, False]


def test_the_check_rejects_a_quantised_cache_taken_up_all_the_same(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeptCache, "_depends_on_chunks", lambda *_: False)
    with pytest.raises(AssertionError):
        test_a_cache_is_taken_up_until_its_quantisation_starts(target, 2048)


def test_a_ring_is_never_taken_up(target: LoadedModel) -> None:
    ring = CacheConfig(max_kv_size=16)
    memory = Memory(target, None, ring)
    prompt = PROMPT
    for _ in range(3):
        run = warm_and_cold(target, prompt, config(cache=ring), memory)
        assert run.reused_tokens == 0
        prompt = [*prompt, *run.token_ids, *QUESTION]


# Families with other caches


@cache
def family(name: str, *, is_draft: bool = False) -> Any:
    return build(name, disturbance=0.1 if is_draft else 0.0)


LONG_PROMPT = [(7 * i) % 64 for i in range(30)]
RUN_TOKENS = 16
TRIMMABLE = ["llama", "gemma3_text", "gpt_oss", "llama4", "deepseek_v3"]
"""Every kind of cache that can be rewound at will; windows of 8 tokens have wrapped."""
RECURRENT = ["mamba", "jamba", "recurrent_gemma", "baichuan_m1", "deepseek_v41"]
"""Layers whose state cannot be taken back further than a round."""


def cached(name: str, role: str) -> CachedModel:
    """A model of the family with empty caches."""
    model = family(name, is_draft=role == "draft")
    return CachedModel(model, role=role, width=VOCABULARY)


def plain_run(name: str, model: CachedModel, prompt: list[int], settings: Settings) -> list[int]:
    """The ids of a run without a draft."""
    generator = PlainGenerator(model, settings.chain(), Randomness(settings.seed))
    generator.prefill(prompt)
    return [token.id for token in generator.tokens(RUN_TOKENS)]


def family_run(
    name: str, kept: dict[str, KeptCache], prompt: list[int], temperature: float
) -> tuple[list[int], int]:
    """The ids of a run with a draft of the same family, and how many tokens it took up."""
    settings = Settings(sampling=SamplingConfig(temperature=temperature))
    lent = {role: one.lend(as_ids(prompt)) for role, one in kept.items()}
    reused = lent["target"].cached_tokens
    drafter = DraftModel(lent["draft"], settings.chain(), Randomness(settings.seed))
    generator = SpeculativeGenerator(
        lent["target"], drafter, settings.chain(), Randomness(settings.seed), num_draft_tokens=3
    )
    generator.prefill(prompt)
    ids = [token.id for token in generator.tokens(RUN_TOKENS)]
    cold = plain_run(name, cached(name, "target"), prompt, settings)
    assert ids == cold, "warm and speculative is cold and plain"
    for one in kept.values():
        one.take_back(as_ids([*prompt, *ids]))
    return ids, reused


def kept_family(name: str) -> dict[str, KeptCache]:
    """Nothing yet, of a target and a draft."""
    return {
        role: KeptCache(partial(cached, name, role), CacheConfig()) for role in ("target", "draft")
    }


def through_a_file(kept: KeptCache) -> None:
    """Replace what is kept by what its packed state gives back."""
    assert kept.held is not None
    arrays, description = pack(kept.held, kept.ids, "x")
    restored = kept.empty()
    ids = unpack(restored, CacheConfig(), arrays, json.loads(json.dumps(description)))
    assert ids.tolist() == kept.ids.tolist()
    kept.put(restored, ids)


@pytest.mark.parametrize("name", [*TRIMMABLE, *RECURRENT])
def test_families_go_on_from_their_caches(name: str) -> None:
    kept = kept_family(name)
    prompt = LONG_PROMPT
    for turn in range(3):
        ids, reused = family_run(name, kept, prompt, 0.9)
        assert reused == (len(prompt) - len(QUESTION) - 1 if turn else 0)
        if turn == 1:
            for one in kept.values():
                through_a_file(one)
        prompt = [*prompt, *ids, *QUESTION]


@pytest.mark.parametrize("name", [*TRIMMABLE, *RECURRENT])
def test_a_state_that_cannot_be_taken_back_so_far_is_given_up(name: str) -> None:
    kept = kept_family(name)
    ids, _ = family_run(name, kept, LONG_PROMPT, 0.0)
    fork = [*LONG_PROMPT, *ids[:2], (ids[2] + 1) % VOCABULARY, 61]
    _, reused = family_run(name, kept, fork, 0.0)
    assert reused == (len(LONG_PROMPT) + 2 if name in TRIMMABLE else 0)


def test_a_model_whose_state_depends_on_chunks_is_not_kept() -> None:
    kept = KeptCache(partial(cached, "phi3small", "target"), CacheConfig())
    ids = plain_run("phi3small", kept.lend(as_ids(LONG_PROMPT)), LONG_PROMPT, Settings())
    kept.take_back(as_ids([*LONG_PROMPT, *ids]))
    assert kept.held is None and not kept.is_keepable


def test_a_text_that_has_outgrown_a_dynamic_window_is_not_taken_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its keys depend on where the blocks ended that they came in."""
    scaling = {"type": "dynamic", "rope_type": "dynamic", "factor": 8.0}
    changes = {"max_position_embeddings": 40, "rope_scaling": scaling}
    model = build("internlm2", changes=changes)
    settings = Settings()

    def fresh() -> CachedModel:
        return CachedModel(model, role="target", width=VOCABULARY)

    def run(prompt: list[int]) -> tuple[list[int], int, list[int]]:
        lent = kept.lend(as_ids(prompt))
        reused = lent.cached_tokens
        ids = plain_run("internlm2", lent, prompt, settings)
        kept.take_back(as_ids([*prompt, *ids]))
        return ids, reused, plain_run("internlm2", fresh(), prompt, settings)

    kept = KeptCache(fresh, CacheConfig())
    first, _, _ = run(PROMPT)
    second, reused, cold = run(within := [*PROMPT, *first, *QUESTION])
    assert second == cold and reused == len(PROMPT) + RUN_TOKENS - 1
    third, reused, cold = run([*within, *second, *QUESTION])
    assert third == cold and reused == 0
    monkeypatch.setattr(KeptCache, "_depends_on_chunks", lambda *_: False)
    prompt = as_ids([*within, *second, *QUESTION, *third])
    lent, cold_model = kept.lend(prompt), fresh()
    held = lent.cached_tokens
    cold_model.prefill(prompt[:held])
    keys = [model.caches[0].keys[..., :held, :] for model in (lent, cold_model)]
    assert held > 0 and not mx.allclose(keys[0], keys[1], atol=1e-3).item(), "the check can fail"


# Packing


def test_packed_state_holds_nothing_behind_the_newest_token(target: LoadedModel) -> None:
    memory = Memory(target)
    generate(target, PROMPT, config(), memory=memory)
    assert memory.target.held is not None
    arrays, _ = pack(memory.target.held, memory.target.ids, "t")
    layers = [array for name, array in arrays.items() if name != "t.ids"]
    assert {array.shape[2] for array in layers} == {len(PROMPT) + 8 - 1}
    assert np.array(arrays["t.ids"]).tolist() == memory.target.ids.tolist()


def test_an_empty_state_fits_caches_that_will_be_quantised(target: LoadedModel) -> None:
    """A draft that never took anything in, beside a target with a quantised cache."""
    empty = CachedModel(target.model, role="draft", width=64, config=QUANTISED)
    arrays, description = pack(empty, as_ids([]), "x")
    restored = CachedModel(target.model, role="draft", width=64, config=QUANTISED)
    assert len(unpack(restored, QUANTISED, arrays, description)) == 0
    assert restored.cached_tokens == 0


def test_a_state_of_other_caches_is_refused(target: LoadedModel) -> None:
    memory = Memory(target)
    generate(target, PROMPT, config(), memory=memory)
    assert memory.target.held is not None
    arrays, description = pack(memory.target.held, memory.target.ids, "t")
    with pytest.raises(ValueError, match="other types"):
        unpack(kept_family("mamba")["target"].empty(), CacheConfig(), arrays, description)
    arrays["t.1.keys"] = arrays["t.1.keys"] + mx.array(1.0)
    with pytest.raises(ValueError, match="changed"):
        unpack(memory.target.empty(), CacheConfig(), arrays, description)


@pytest.mark.parametrize("rule", AcceptRule)
def test_every_rule_runs_on_kept_caches(
    target: LoadedModel, draft: LoadedModel, rule: AcceptRule
) -> None:
    speculation = mlxgen.SpeculationConfig(accept_rule=rule)
    settings = config(0.9, speculation=speculation)
    memory = Memory(target, draft)
    first = warm_and_cold(target, PROMPT, settings, memory, draft)
    warm_and_cold(target, [*PROMPT, *first.token_ids, *QUESTION], settings, memory, draft)
