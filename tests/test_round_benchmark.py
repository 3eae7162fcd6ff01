"""The benchmark of rounds compares like with like: every arm attends to as long a text."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from tests.fixtures.command import ROOT
from tests.fixtures.runs import ModelStore

ROUNDS, BURSTS, K = 2, 4, 3
OWN_WITHOUT_FLOOR = ["plain T=0", "round T=0", "round T=0.7 top-p 0.9 block"]
FLOORS = ["floor", "floor as mlxgen runs it"]
ARMS = [*FLOORS, *OWN_WITHOUT_FLOOR, "mlx-lm plain T=0", "mlx-lm round T=0.7"]


@pytest.fixture
def benchmark_rounds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("benchmark_rounds")


class Recorder:
    """A model that notes how much its cache held and how much it took in at each call."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.held_tokens: list[int] = []
        self.taken_tokens: list[int] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.held_tokens.append(options["cache"][0].offset)
        self.taken_tokens.append(arguments[0].shape[1])
        return self._model(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def lengths_by_arm(
    module: ModuleType, models: ModelStore, chosen: list[str]
) -> dict[str, list[int]]:
    """How much the target's cache held when each burst began, the draft being the target itself."""
    model = models.llama(1)
    recorder = Recorder(model)
    bench = module.Bench(recorder, model, model.args.vocab_size, K)
    every_arm = {**module.ROUND_ARMS, **module.PLAIN_ARMS, **module.MLX_LM_ARMS}
    arms = module.made(every_arm, chosen, bench)
    prefix = len(module.PROMPT) - 1
    lengths: dict[str, list[int]] = {name: [] for name in arms}
    for _ in range(BURSTS):
        for name, burst in arms.items():
            recorder.held_tokens.clear()
            assert len(burst(ROUNDS)) == ROUNDS
            # The first burst takes in the prompt.
            lengths[name].append(min(n for n in recorder.held_tokens if n >= prefix))
    assert set(lengths) == set(chosen)
    return lengths


def test_all_arms_begin_a_burst_behind_the_same_length(
    benchmark_rounds: ModuleType, models: ModelStore
) -> None:
    lengths = lengths_by_arm(benchmark_rounds, models, ARMS)
    assert len(set(map(tuple, lengths.values()))) == 1
    grown = lengths["floor"]
    assert grown == sorted(set(grown))


def test_arms_that_keep_all_their_tokens_are_told_apart(
    benchmark_rounds: ModuleType, models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong benchmark: an arm whose draft is accepted gets ahead of one without a draft."""
    monkeypatch.setattr(benchmark_rounds, "_growth", lambda _: 10**6)
    lengths = lengths_by_arm(benchmark_rounds, models, OWN_WITHOUT_FLOOR)
    assert len(set(map(tuple, lengths.values()))) > 1


@pytest.mark.parametrize(
    ("arm", "width", "in_pieces"), [(FLOORS[0], 4, False), (FLOORS[1], 8, True)]
)
def test_the_floor_as_mlxgen_runs_it_is_filled_up_and_in_pieces(
    benchmark_rounds: ModuleType,
    models: ModelStore,
    monkeypatch: pytest.MonkeyPatch,
    arm: str,
    width: int,
    in_pieces: bool,
) -> None:
    entered = []

    @contextmanager
    def noted() -> Iterator[None]:
        entered.append(True)
        yield

    monkeypatch.setattr(benchmark_rounds, "lacks_block_attention", lambda: True)
    monkeypatch.setattr(benchmark_rounds, "lengths_to_fill_up", lambda model: range(4, 8))
    monkeypatch.setattr(benchmark_rounds, "short_attention", noted)
    model = models.llama(1)
    recorder = Recorder(model)
    bench = benchmark_rounds.Bench(recorder, model, model.args.vocab_size, K)
    burst = benchmark_rounds.ROUND_ARMS[arm](bench)
    recorder.taken_tokens.clear()
    burst(ROUNDS)
    assert set(recorder.taken_tokens) == {width}
    assert bool(entered) is in_pieces
