"""Fused functions say what the functions as written say.

They are meant for a GPU. On a CPU MLX builds them with a C++ compiler, so that the same check runs
where there is one.
"""

from __future__ import annotations

import shutil

import mlx.core as mx
import numpy as np
import pytest

from mlxgen.config import AcceptRule, SamplingConfig
from mlxgen.sampling import fusion
from mlxgen.sampling.chain import SamplerChain
from mlxgen.sampling.fusion import Arrays, fused
from mlxgen.sampling.randomness import Randomness, Stream, gumbel
from tests.fixtures.runs import ModelStore, Settings

needs_compiler = pytest.mark.skipif(
    not fusion.fuses() and shutil.which("g++") is None, reason="MLX compiles with g++ on a CPU"
)

CONFIGS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.7),
    SamplingConfig(temperature=0.7, top_p=0.9, min_p=0.02, top_k=40),
    SamplingConfig(temperature=1.2, typical_p=0.9, top_n_sigma=2.0, frequency_penalty=0.3),
    SamplingConfig(temperature=1.0, xtc_probability=0.5, logit_bias=((3, 2.0),)),
]


def emitted(
    models: ModelStore, config: SamplingConfig, rule: AcceptRule
) -> tuple[list[int], int, int]:
    settings = Settings(sampling=config, rule=rule, protected=(0,), diagnostics=True)
    run = settings.speculative(models.llama(1), models.llama(2))
    ids = run.ids(24)
    return ids, run.statistics.rounds, run.statistics.accepted


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rule", list(AcceptRule))
def test_a_fused_run_emits_the_same_text(
    models: ModelStore, config: SamplingConfig, rule: AcceptRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "fuses", lambda: False)
    as_written = emitted(models, config, rule)
    monkeypatch.setattr(fusion, "fuses", lambda: True)
    assert emitted(models, config, rule) == as_written


@needs_compiler
def test_fused_noise_and_draws_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Randomness(5).position_keys(Stream.TARGET, 7, 4)
    logits = mx.random.normal((4, 300), key=mx.random.key(2)).astype(mx.bfloat16)
    chain = SamplerChain(SamplingConfig(temperature=0.8, top_p=0.9), 300)
    found = []
    for is_fused in (False, True):
        monkeypatch.setattr(fusion, "fuses", lambda value=is_fused: value)
        noise = gumbel(keys, 300)
        drawn = chain.draw(logits, noise, chain.new_history([1]))
        found.append([np.array(array.astype(mx.float32)) for array in (noise, *drawn)])
    for written, compiled in zip(*found, strict=True):
        np.testing.assert_allclose(written, compiled, rtol=1e-5, atol=1e-6)
    assert found[0][1].tolist() == found[1][1].tolist()


@needs_compiler
def test_what_a_fused_function_finds_elsewhere_must_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wrong use: it keeps the first value, which is why all that varies is an argument."""
    monkeypatch.setattr(fusion, "fuses", lambda: True)
    outside = [mx.array([1.0])]

    def add(row: mx.array) -> Arrays:
        return (row + outside[0],)

    call = fused(add)
    assert call(mx.array([1.0]))[0].item() == 2
    outside[0] = mx.array([5.0])
    assert call(mx.array([1.0]))[0].item() == 2
