"""Tests of scripts/distill_draft.py and the package beside it.

Each test's docstring names a wrong version that it rejects. Most need PyTorch, which mlxgen does
not depend on; the others run without it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from distill import phrases
from distill.config import (
    EMBEDDING,
    AffineFormat,
    CorpusSettings,
    DraftShape,
    LlamaConfig,
)
from distill.dequantise import dequantise_directory
from distill.export import export_draft
from distill.prompts import Prompt, Role, draw_prompt
from distill.schedule import LossWeights, Schedule
from distill_draft import main

_TRAINING_NEEDS = ("torch", "tokenizers", "safetensors")
try:
    import torch
    from distill import corpus, losses, rounding, training
    from distill.draft import Draft
    from distill.evaluation import compare, evaluate
    from distill.target import Target
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ModuleNotFoundError as missing:
    if missing.name not in _TRAINING_NEEDS:
        raise
    CAN_TRAIN = False
else:
    CAN_TRAIN = True
    # The models here are so small that more threads only wait for each other.
    torch.set_num_threads(1)

needs_torch = pytest.mark.skipif(
    not CAN_TRAIN, reason="training drafts needs more: pip install torch tokenizers safetensors"
)

Floats = npt.NDArray[np.float64]

TINY = LlamaConfig(
    vocab_size=500,
    hidden_size=64,
    mlp_size=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=16,
    rope_theta=10000.0,
    norm_epsilon=1e-5,
    max_positions=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
)
TINY_RUN = [
    "--device=cpu",
    *("--hidden-size=64", "--layers=1", "--heads=2", "--kv-heads=1", "--mlp-size=64"),
    *("--corpus-tokens=6144", "--rows-per-round=32", "--held-out-rows=8"),
    *("--long-row-tokens=96", "--short-row-tokens=64", "--long-share=0.5"),
    *("--batch-tokens=512", "--chunk-positions=100", "--learning-rate=1e-2", "--warmup-steps=4"),
    *("--log-every-steps=4", "--save-every-steps=5"),
]


def random_weights(config: LlamaConfig, seed: int) -> dict[str, mx.array]:
    """float16 weights, large enough for the predictions to depend on the tokens."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in config.weight_shapes().items():
        values = rng.standard_normal(shape)
        values = 1 + 0.1 * values if len(shape) == 1 else values / math.sqrt(shape[1])
        weights[name] = mx.array(2 * values if name == EMBEDDING else values, dtype=mx.float16)
    return weights


def write_model(directory: Path, config: LlamaConfig, weights: dict[str, mx.array]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    config.write(directory, "float16")
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    return directory


@pytest.fixture(scope="module")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of 2 layers with a tokenizer trained on the phrases."""
    directory = write_model(tmp_path_factory.mktemp("target"), TINY, random_weights(TINY, seed=1))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY.vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [*phrases.TOPIC_REQUESTS, *phrases.TOPICS, *([phrases.DEFAULT_SYSTEM] * 50)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def train_tiny(target: Path, out: Path, *more: str) -> dict[str, Any]:
    """Run the train command; returns its results."""
    assert main(["train", f"--target={target}", f"--out={out}", *TINY_RUN, *more]) == 0
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return results


# ---------------------------------------------------------------- rounding


def difficult_weights(group_size: int) -> npt.NDArray[np.float32]:
    """Random groups, and groups at the edges of the format, (rows, 2 * group_size)."""
    rng = np.random.default_rng(3)
    random = rng.standard_normal((40, 2 * group_size)) * np.logspace(-4, 1, 40)[:, None]
    shifted = rng.random((4, 2 * group_size)) + np.array([[-3.0], [-1.0], [0.0], [2.0]])
    constant = np.ones((3, 2 * group_size)) * np.array([[0.0], [0.25], [-7.0]])
    outlier = rng.standard_normal((2, 2 * group_size)) * 0.01
    outlier[:, 5] = (-4, 4)
    symmetric = np.linspace(-1, 1, 2 * group_size).reshape(2, -1).T.reshape(1, -1)
    symmetric[0, ::group_size], symmetric[0, 1::group_size] = -1, 1
    parts = [random, shifted, constant, outlier, symmetric]
    return np.concatenate(parts).astype(np.float32)


@needs_torch
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (4, 32), (2, 64), (8, 32)])
def test_rounding_gives_what_mlx_reads_back(bits: int, group_size: int) -> None:
    """Rejects rounding between minimum and maximum, and float32 scales or weights."""
    weights = difficult_weights(group_size)
    packed, scales, biases = mx.quantize(
        mx.array(weights, dtype=mx.float16), group_size=group_size, bits=bits
    )
    expected = np.array(
        mx.dequantize(
            packed,
            scales.astype(mx.float32),
            biases.astype(mx.float32),
            group_size=group_size,
            bits=bits,
        )
    )
    form = AffineFormat(bits, group_size)
    rounded = rounding.affine_round(torch.from_numpy(weights), form).numpy()
    np.testing.assert_array_equal(rounded, expected)

    groups = weights.reshape(-1, group_size)
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    step = np.maximum((high - low) / (2**bits - 1), 1e-7)
    between_ends = (np.rint((groups - low) / step) * step + low).reshape(weights.shape)
    assert not np.allclose(between_ends, expected, rtol=1e-3, atol=1e-5)


@needs_torch
def test_rounding_passes_gradients_straight_through() -> None:
    """Rejects rounding inside the graph, whose gradient is zero almost everywhere."""
    form = AffineFormat(4, 32)
    generator = torch.Generator().manual_seed(0)
    matrices = {
        name: torch.randn(rows, 64, generator=generator, requires_grad=True)
        for name, rows in (("a", 3), ("b", 5))
    }
    rounded = rounding.round_straight_through(matrices, form)
    for name, matrix in matrices.items():
        assert torch.equal(rounded[name], rounding.affine_round(matrix.detach(), form))
        assert not torch.equal(rounded[name], matrix)
        slope = torch.randn(matrix.shape, generator=generator)
        torch.autograd.backward(rounded[name], slope)
        assert matrix.grad is not None
        assert torch.equal(matrix.grad, slope)


# ---------------------------------------------------------------- loss


def softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max())
    shares: Floats = powers / powers.sum()
    return shares


def naive_loss(
    hidden: Floats,
    table: Floats,
    target_hidden: Floats,
    target_head: Floats,
    inverse_temperatures: Floats,
    weights: LossWeights,
) -> tuple[float, list[float]]:
    """head_loss in float64, position by position: the loss, and KL, overlap and agreement."""
    rows = []
    for h, target_h, heat in zip(hidden, target_hidden, inverse_temperatures, strict=True):
        z, target_z = table @ h, target_head @ target_h
        q, p = softmax(z), softmax(target_z)
        kl = sum(pi * math.log(pi / qi) for pi, qi in zip(p, q, strict=True))
        hot_q, hot_p = softmax(z * heat), softmax(target_z * heat)
        overlap = sum(min(pi, qi) for pi, qi in zip(hot_p, hot_q, strict=True))
        rows.append([kl, overlap, float(z.argmax() == target_z.argmax())])
    kl, overlap, agreement = np.mean(rows, axis=0).tolist()
    return weights.kl * kl + weights.tv * (1 - overlap), [kl, overlap, agreement]


def loss_inputs() -> dict[str, Floats]:
    """7 positions, 11 tokens, hidden sizes 4 and 5."""
    rng = np.random.default_rng(5)
    return {
        "hidden": rng.standard_normal((7, 4)),
        "table": rng.standard_normal((11, 4)),
        "target_hidden": rng.standard_normal((7, 5)),
        "target_head": rng.standard_normal((11, 5)),
        "inverse_temperatures": np.array([1, 1, 1 / 0.7, 1 / 0.7, 2.5, 2.5, 1 / 0.3]),
    }


@needs_torch
@pytest.mark.parametrize("weights", [LossWeights(1, 0), LossWeights(0, 1), LossWeights(0.3, 0.9)])
def test_loss_and_gradients_match_a_naive_computation(weights: LossWeights) -> None:
    """Rejects a total variation without its temperature, and a gradient without the share of
    the tokens that lack probability in the mass moved away.
    """
    inputs = loss_inputs()
    tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
    result = losses.head_loss(**tensors, weights=weights, chunk_positions=3)
    expected, statistics = naive_loss(**inputs, weights=weights)
    assert float(result.loss) == pytest.approx(expected, abs=1e-6)
    assert result.statistics.tolist() == pytest.approx(statistics, abs=1e-6)

    step = 1e-6
    for name, gradient in (("hidden", result.grad_hidden), ("table", result.grad_table)):
        slopes = np.empty_like(inputs[name])
        for index in np.ndindex(*slopes.shape):
            ends = []
            for shift in (step, -step):
                moved = inputs[name].copy()
                moved[index] += shift
                ends.append(naive_loss(**{**inputs, name: moved}, weights=weights)[0])
            slopes[index] = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(gradient.numpy(), slopes, atol=1e-8)


@needs_torch
def test_total_variation_is_one_minus_the_overlap() -> None:
    """Rejects an overlap of products: half the L1 distance is 1 - sum of min(p, q)."""
    rng = np.random.default_rng(6)
    z, target_z = rng.standard_normal((2, 9, 30)) * 3
    temperature = 0.7
    inverse = torch.full((9,), 1 / temperature, dtype=torch.float64)
    logits = torch.from_numpy(z), torch.from_numpy(target_z)
    _, statistics = losses.plain_logit_gradient(*logits, inverse, LossWeights(0, 1))
    evaluated = compare(*logits, temperature)
    for row in range(9):
        p, q = softmax(target_z[row] / temperature), softmax(z[row] / temperature)
        half_distance = abs(p - q).sum() / 2
        assert 1 - float(statistics[row, 1]) == pytest.approx(half_distance)
        assert 1 - float(evaluated["sum_min"][row]) == pytest.approx(half_distance)
        assert float(evaluated["sum_product"][row]) == pytest.approx(float(p @ q))
        assert float(evaluated["top_probability"][row]) == pytest.approx(float(p[q.argmax()]))


@needs_torch
def test_fused_loss_equals_the_plain_one() -> None:
    """On a GPU, else in Triton's interpreter. Rejects lanes beyond the vocabulary that count, and
    sums that are not brought down when a lane's maximum rises.
    """
    if find_spec("triton") is None:
        pytest.skip("the fused loss needs Triton")
    # Triton reads the variable when it is first imported, so another process has to.
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import test_distill; test_distill.compare_fused_loss()"],
        cwd=Path(__file__).parent,
        env={**os.environ, **interpreted},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def compare_fused_loss() -> None:
    """What test_fused_loss_equals_the_plain_one does in its own process."""
    from distill import fused_loss

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(2)
    # Rising, so that a lane's maximum does too.
    z, target_z = torch.randn(2, 6, 9001, generator=generator) + torch.linspace(0, 5, 9001)
    target_z[0] = z[0]
    target_z[1, z[1].argmax()] += 20
    inputs = (
        z.half().to(device),
        target_z.half().to(device),
        torch.tensor([1, 1, 1 / 0.7, 2.5, 2.5, 100.0], device=device),
        LossWeights(0.4, 0.8),
    )
    gradient, statistics = fused_loss.fused_logit_gradient(*inputs)
    plain_gradient, plain_statistics = losses.plain_logit_gradient(*inputs)
    torch.testing.assert_close(statistics, plain_statistics, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient.float(), plain_gradient, rtol=1e-2, atol=1e-5)
    assert statistics[:2, 2].tolist() == [1, 1]


def test_schedule_goes_from_kl_to_total_variation() -> None:
    """Rejects a KL divergence that goes away entirely, and rounding from the start."""
    schedule = Schedule(steps=1000, warmup_steps=100, learning_rate=2.0)
    assert schedule.loss_weights(350) == LossWeights(1, 0)
    middle = schedule.loss_weights(475)
    assert (middle.kl, middle.tv) == pytest.approx((0.55, 0.5))
    final = schedule.loss_weights(600)
    assert (final.kl, final.tv) == pytest.approx((0.1, 1))
    assert [schedule.rounds(step) for step in (0, 699, 700, 999)] == [False, False, True, True]
    assert schedule.rate(0) == pytest.approx(0.02, rel=1e-3)
    assert schedule.rate(500) == pytest.approx(1)
    assert 0 < schedule.rate(999) < 1e-4
    switched = Schedule(steps=10, tv_from_share=0.5, tv_full_share=0.5)
    assert [switched.loss_weights(step).tv for step in (4, 5)] == [0, 1]


# ---------------------------------------------------------------- corpus


def test_prompts_are_filled_in_and_held_out_topics_are_apart() -> None:
    """Rejects a placeholder that its list does not know, and a topic in both lists."""
    topics = [*phrases.TOPICS, *phrases.HELD_OUT_TOPICS]
    assert len(set(topics)) == len(topics)
    assert all(topic and len(topic) < 40 and ";" not in topic for topic in topics)
    rng = Random(0)
    prompts = [draw_prompt(rng, ["red kites", "tar pits"], 0.45) for _ in range(4000)]
    for prompt in prompts:
        for name in ("topic", "Topic", "other", "Other", "task", "sentence", "passage"):
            assert "{" + name + "}" not in prompt.text
        headers = prompt.text.count("<|im_start|>") - prompt.text.count("<|im_end|>")
        assert headers == (prompt.writer != Role.TEXT)
    shares = [np.mean([prompt.writer == role for prompt in prompts]) for role in Role]
    assert shares == pytest.approx([0, 0.43, 0.45, 0.12], abs=0.03)
    greedy = np.mean([prompt.temperature < 0.1 for prompt in prompts])
    assert greedy == pytest.approx(0.25, abs=0.03)
    for settings, lengths in (
        (CorpusSettings(), [512] + [256] * 8),
        (CorpusSettings(tokens=1), [256]),
        (CorpusSettings(36_000_000, 3072, 1024, 512, 0.26), [1024] * 3 + [512] * 17),
    ):
        assert settings.round_lengths() == lengths


@needs_torch
def test_rows_follow_their_prompts_and_take_turns(
    target_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejects headers in the wrong order or off by one, and roles on forced tokens."""
    target = Target(target_directory, "cpu")
    tokenizer = Tokenizer.from_file(str(target_directory / "tokenizer.json"))
    generator = torch.Generator().manual_seed(4)
    end_of_turn, letter = tokenizer.encode("<|im_end|>x").ids
    heats = []

    def sample(hidden: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """An end of turn one time in five, else the letter x."""
        heats.append(temperatures)
        ends = torch.rand(len(hidden), generator=generator) < 0.2
        return torch.where(ends, end_of_turn, letter)

    monkeypatch.setattr(target, "sample", sample)
    user, answer = "<|im_start|>user\n", "<|im_start|>assistant\n"
    prompts = [
        Prompt(user, Role.USER, 0.3),
        Prompt(f"{user}Hello.<|im_end|>\n{answer}", Role.ANSWER, 0.7),
        Prompt("Once", Role.TEXT, 1.0),
    ] * 4
    with torch.no_grad():
        part = corpus.RoundWriter(target, tokenizer).write(prompts, length=120, held_out=2)
    assert part.training_rows == 10
    torch.testing.assert_close(part.temperatures, torch.tensor([0.3, 0.7, 1.0] * 4))
    # Users' turns are written at temperature 1, the rest at the row's.
    assert heats[-1].tolist() == pytest.approx(
        [
            1.0 if role == Role.USER else prompt.temperature
            for role, prompt in zip(_writers(part, tokenizer), prompts, strict=True)
        ]
    )
    for row, prompt in enumerate(prompts):
        ids = part.tokens[row].tolist()
        roles = part.roles[row].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text.startswith(prompt.text)
        forced = len(tokenizer.encode(prompt.text).ids)
        assert set(roles[:forced]) == {Role.FORCED}
        assert roles[forced] == prompt.writer
        if prompt.writer == Role.TEXT:
            end = ids.index(tokenizer.token_to_id("<|im_end|>"))
            assert set(roles[forced : end + 1]) == {Role.TEXT}
            assert set(roles[end + 1 :]) == {Role.FORCED}
            continue
        turns = text.split("<|im_end|>\n")
        headers = [(user, answer)[(index % 2)] for index in range(len(turns))]
        for turn, header in zip(turns, headers, strict=True):
            assert turn.startswith(header) or header.startswith(turn)
        for token, role in zip(ids[forced:], roles[forced:], strict=True):
            free = tokenizer.decode([token], skip_special_tokens=False) in ("x", "<|im_end|>")
            assert free == (role != Role.FORCED)


def _writers(part: corpus.Round, tokenizer: Tokenizer) -> list[Role]:
    """Who would write the last token of each row if it were not forced."""
    writers = []
    for ids in part.tokens[:, :-1].tolist():
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if "<|im_start|>" not in text:
            writers.append(Role.TEXT)
            continue
        # A finished turn hands over at once, before its successor's header is there.
        finished = text.count("<|im_end|>")
        writers.append((Role.USER, Role.ANSWER)[finished % 2])
    return writers


@needs_torch
def test_held_out_rows_get_held_out_topics_and_no_training(
    target_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejects batches that reach into the held-out rows, and held-out topics in other rows."""
    target = Target(target_directory, "cpu")
    tokenizer = Tokenizer.from_file(str(target_directory / "tokenizer.json"))
    asked = []

    def draw(rng: Random, topics: tuple[str, ...], request_share: float) -> Prompt:
        asked.append(topics)
        return draw_prompt(rng, topics, request_share)

    monkeypatch.setattr(corpus, "draw_prompt", draw)
    settings = CorpusSettings(
        tokens=400,
        rows_per_round=10,
        long_row_tokens=20,
        short_row_tokens=10,
        long_share=0.5,
        held_out_rows=3,
    )
    rounds = corpus.write_corpus(target, tokenizer, settings, Random(0), lambda line: None)
    assert [tuple(part.tokens.shape) for part in rounds] == [(10, 20), (10, 10), (10, 10)]
    assert asked == ([phrases.TOPICS] * 7 + [phrases.HELD_OUT_TOPICS] * 3) * 3

    batches = corpus.Batches(rounds, batch_tokens=20, seed=1)
    assert batches.per_epoch == 7 + 3 + 3
    epochs = [
        [(part.tokens.shape[1], rows.tolist()) for part, rows in map(batches.__getitem__, steps)]
        for steps in (range(13), range(13, 26))
    ]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(row for length, rows in epoch if length == 20 for row in rows) == [*range(7)]
        assert all(row < 7 for _, rows in epoch for row in rows)
    part, rows = corpus.Batches(rounds, batch_tokens=20, seed=1)[20]
    assert (part.tokens.shape[1], rows.tolist()) == epochs[1][20 - 13]
    with pytest.raises(ValueError, match="enough rows"):
        corpus.Batches(rounds, batch_tokens=1000, seed=1)


@needs_torch
def test_the_targets_own_words_come_first() -> None:
    """Rejects a choice by each token's own role instead of that of the token after it."""
    roles = torch.tensor([[0, 0, 2, 2, 0, 1], [0, 3, 3, 3, 0, 0]], dtype=torch.uint8)
    temperatures = torch.tensor([0.7, 0.01])
    generator = torch.Generator().manual_seed(0)
    indices, inverse = training.choose_positions(roles, temperatures, 0.5, generator)
    by_index = dict(zip(indices.tolist(), inverse.tolist(), strict=True))
    expected = {1: 1 / 0.7, 2: 1 / 0.7, 4: 1.0, 6: 2.5, 7: 2.5, 8: 2.5}
    assert by_index == pytest.approx(expected)


@needs_torch
def test_evaluation_is_over_the_targets_own_words_in_held_out_rows(target_directory: Path) -> None:
    """Rejects the states at the target's words instead of those before them, other rows, and
    figures at a temperature over rows written at another.
    """
    target = Target(target_directory, "cpu")
    draft = Draft.random(TINY.draft(DraftShape(64, 1, 2, 1, 64)), 0, "cpu")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(TINY.vocab_size, (6, 9), generator=generator)
    states = torch.randn(6, 9, TINY.hidden_size, generator=generator)
    roles = torch.randint(4, (6, 9), generator=generator).to(torch.uint8)
    temperatures = torch.tensor([0.7, 1.0, 0.7, 1.0, 0.7, 0.01])
    with torch.no_grad():
        draft.weights[EMBEDDING].copy_(target.embedding)
        hidden, table = draft.forward(tokens, torch.float32)
        states[5] = hidden[5]  # perfect agreement in the greedy row
        logits, target_logits = (hidden @ table.T).numpy(), (states @ target.head.T).numpy()
    part = corpus.Round(tokens.int(), states, roles, temperatures, held_out=4)
    figures = evaluate(draft, target, [part, part], most_rounds=1, rounding=None)
    overlaps, agreement = np.full((2, 6, 8), np.nan)
    for row, column in np.ndindex(6, 8):
        if row >= 2 and roles[row, column + 1] >= Role.ANSWER:
            z, target_z = logits[row, column], target_logits[row, column]
            overlap = np.minimum(softmax(z / 0.7), softmax(target_z / 0.7)).sum()
            overlaps[row, column] = overlap
            agreement[row, column] = z.argmax() == target_z.argmax()
    assert figures["positions"] == (~np.isnan(overlaps)).sum()
    expected = {
        "sum_min at 0.7": np.nanmean(overlaps),
        "sum_min at 0.7, rows written at it": np.nanmean(overlaps[[2, 4]]),
        "agreement": np.nanmean(agreement),
        "agreement, greedy rows": np.nanmean(agreement[5]),
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-4)


# ---------------------------------------------------------------- models


def mlx_logits(directory: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    """mlx-lm's logits in float32, (length, vocabulary)."""
    mlx_lm = pytest.importorskip("mlx_lm.utils", reason="compared with mlx-lm")
    model, _ = mlx_lm.load_model(directory)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array([tokens]))[0])


@needs_torch
def test_stepping_the_target_equals_one_forward_pass(target_directory: Path) -> None:
    """Rejects heads grouped with the wrong key/value head, and angles off by a position."""
    target = Target(target_directory, "cpu")
    weights = load_file(str(target_directory / "model.safetensors"))
    tokens = torch.randint(TINY.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, table = Draft(TINY, weights, "cpu").forward(tokens, torch.float32)
        logits = whole[0] @ table.T
        target.start(2, 12)
        stepped = torch.stack([target.step(tokens[:, i], i) for i in range(12)], dim=1)
    torch.testing.assert_close(stepped, whole, rtol=1e-4, atol=1e-4)
    expected = mlx_logits(target_directory, tokens[0].tolist())
    np.testing.assert_allclose(logits.numpy(), expected, atol=2e-3)


@needs_torch
def test_sampling_follows_the_temperature(target_directory: Path) -> None:
    """Rejects noise that is scaled along with the logits."""
    torch.manual_seed(0)
    target = Target(target_directory, "cpu")
    hidden = torch.randn(1, TINY.hidden_size).expand(20_000, -1)
    temperature = 0.5
    drawn = target.sample(hidden, torch.full((20_000,), temperature))
    p = ((hidden[0] @ target.head.T) / temperature).softmax(dim=-1)
    shares = torch.bincount(drawn, minlength=TINY.vocab_size) / len(drawn)
    assert float((shares - p).abs().sum()) / 2 < 0.05
    cold = target.sample(hidden[:50], torch.full((50,), 0.001))
    assert set(cold.tolist()) == {int(p.argmax())}


def test_export_quantises_as_mlx_lm_reads(tmp_path: Path) -> None:
    """Rejects norms that are packed, a config without its quantization, and bfloat16 scales."""
    weights = random_weights(TINY, seed=2)
    source = write_model(tmp_path / "draft", TINY, weights)
    (source / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    size = export_draft(source, source, out, AffineFormat(4, 64))
    assert size == (out / "model.safetensors").stat().st_size
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    stored = mx.load(str(out / "model.safetensors"))
    assert isinstance(stored, dict)
    for name, array in weights.items():
        layer = name.removesuffix(".weight")
        if array.ndim == 1:
            assert mx.array_equal(stored[name], array)
            continue
        scales, biases = stored[f"{layer}.scales"], stored[f"{layer}.biases"]
        assert scales.dtype == biases.dtype == mx.float16
        read = mx.dequantize(stored[name], scales, biases, group_size=64, bits=4)
        # The end of a range that is nearer to zero can lie a step beyond the codes.
        steps = np.repeat(np.abs(np.array(scales)), 64, axis=1)
        assert (np.abs(np.array(read) - np.array(array)) < 1.5 * steps).all()
    assert mlx_logits(out, [1, 2, 3]).shape == (3, TINY.vocab_size)
    with pytest.raises(ValueError, match="group size 128"):
        export_draft(source, source, out, AffineFormat(4, 128))


@pytest.mark.parametrize("dtype_name", ["bfloat16", "float32"])
def test_dequantise_reads_each_layer_in_its_own_format(tmp_path: Path, dtype_name: str) -> None:
    """Rejects the common format for a layer that has its own."""
    weights = random_weights(TINY, seed=3)
    packed: dict[str, mx.array] = {}
    expected: dict[str, mx.array] = {}
    for name, array in weights.items():
        layer = name.removesuffix(".weight")
        if array.ndim == 1:
            packed[name] = expected[name] = array
            continue
        bits = 8 if name == EMBEDDING else 4
        parts = mx.quantize(array, group_size=32, bits=bits)
        packed[name], packed[f"{layer}.scales"], packed[f"{layer}.biases"] = parts
        scales, biases = parts[1].astype(mx.float32), parts[2].astype(mx.float32)
        expected[name] = mx.dequantize(parts[0], scales, biases, group_size=32, bits=bits)
    source = write_model(tmp_path / "packed", TINY, packed)
    (source / "tokenizer.json").write_text("{}")
    raw = json.loads((source / "config.json").read_text())
    common = {"group_size": 32, "bits": 4, "mode": "affine"}
    raw["quantization"] = {**common, "model.embed_tokens": {**common, "bits": 8}}
    (source / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="dequantise it first"):
        LlamaConfig.read(source)

    out = tmp_path / "out"
    command = ["dequantise", f"--model={source}", f"--out={out}", f"--dtype={dtype_name}"]
    assert main(command) == 0
    assert LlamaConfig.read(out) == TINY
    stored = mx.load(str(out / "model.safetensors"))
    assert isinstance(stored, dict)
    assert stored.keys() == expected.keys()
    for name, array in expected.items():
        assert str(stored[name].dtype).endswith(dtype_name)
        assert mx.array_equal(stored[name], array.astype(stored[name].dtype))
    with pytest.raises(ValueError, match="names no quantization"):
        dequantise_directory(out, tmp_path / "again", dtype_name)


def test_models_that_would_be_computed_wrongly_are_refused(tmp_path: Path) -> None:
    """Rejects reading only the sizes of a config."""
    TINY.write(tmp_path, "float32")
    assert LlamaConfig.read(tmp_path) == TINY
    raw = json.loads((tmp_path / "config.json").read_text())
    for key, value in (
        ("model_type", "qwen2"),
        ("tie_word_embeddings", False),
        ("rope_scaling", {"factor": 2.0}),
        ("attention_bias", True),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
        with pytest.raises(ValueError, match=key):
            LlamaConfig.read(tmp_path)
    with pytest.raises(ValueError, match="at most the target's"):
        TINY.draft(DraftShape())


@needs_torch
def test_a_wider_draft_is_the_same_function_and_learns_with_all_its_units() -> None:
    """Rejects new units that write already, and units whose weights never get a gradient."""
    narrow = Draft.random(TINY, 3, "cpu")
    wide = narrow.with_wider_mlp(2 * TINY.mlp_size, 4)
    tokens = torch.randint(TINY.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    outputs = [draft.forward(tokens, torch.float32)[0] for draft in (narrow, wide)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    outputs[1].square().mean().backward()
    gradient = wide.weights["model.layers.0.mlp.down_proj.weight"].grad
    assert gradient is not None and (gradient[:, TINY.mlp_size :].abs().amax(dim=0) > 0).all()
    with pytest.raises(ValueError, match="cannot widen"):
        wide.with_wider_mlp(TINY.mlp_size, 4)


# ---------------------------------------------------------------- whole runs


@needs_torch
def test_a_short_run_learns_and_exports(
    target_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejects a gradient of the wrong sign, training without rounding, and an export that is not
    the rounded draft.
    """
    run = tmp_path / "run"
    forward, roundings = Draft.forward, []

    def watched(
        self: Draft, tokens: torch.Tensor, dtype: torch.dtype, form: AffineFormat | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        roundings.append(form)
        return forward(self, tokens, dtype, form)

    monkeypatch.setattr(Draft, "forward", watched)
    results = train_tiny(target_directory, run, "--steps=40", "--tv-from-share=0.5")
    assert roundings[:40] == [None] * 28 + [AffineFormat(4, 64)] * 12
    logged = results["training"]["logged"]
    in_kl_phase = [entry for entry in logged if entry["step"] <= 20]
    assert in_kl_phase[-1]["loss"] < 0.8 * in_kl_phase[0]["loss"]
    assert logged[-1]["overlap"] > logged[0]["overlap"] + 0.02
    for label in ("rounded", "unrounded"):
        figures = results["held-out"][label]
        assert figures["positions"] > 100
        assert 0 < figures["sum_min at 1.0"] < 1
        assert 0 < figures["sum_product at 0.7"] < 1
        assert 0 <= figures["agreement"] <= 1
        assert "agreement, greedy rows" in figures
    assert results["held-out"]["rounded"] != results["held-out"]["unrounded"]

    out = tmp_path / "draft"
    command = ["export", f"--draft={run}", f"--tokenizer={target_directory}", f"--out={out}"]
    assert main(command) == 0
    tokens = list(range(5, 30))
    exported = mlx_logits(out, tokens)
    draft = Draft(LlamaConfig.read(run), load_file(str(run / "model.safetensors")), "cpu")
    outputs = {}
    for form in (AffineFormat(), None):
        with torch.no_grad():
            hidden, table = draft.forward(torch.tensor([tokens]), torch.float32, form)
            outputs[form] = (hidden[0] @ table.T).numpy()
    np.testing.assert_allclose(exported, outputs[AffineFormat()], atol=2e-3)
    assert not np.allclose(exported, outputs[None], atol=2e-2)


@needs_torch
def test_resuming_continues_at_its_step(
    target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupted run ends with the very weights of an uninterrupted one. Rejects a resumption
    without the step, the optimiser's moments, the float32 weights or the place in the batches.
    """
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_tiny(target_directory, whole, "--steps=12")
    first = train_tiny(target_directory, broken, "--steps=12", "--stop-at-step=7")
    assert (first["training"]["first_step"], first["training"]["next_step"]) == (0, 7)
    second = train_tiny(target_directory, broken, "--steps=12", f"--init={broken}")
    assert (second["training"]["first_step"], second["training"]["next_step"]) == (7, 12)
    expected = load_file(str(whole / "training_state.safetensors"))
    resumed = load_file(str(broken / "training_state.safetensors"))
    assert expected.keys() == resumed.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, resumed[name]), name
    assert not list(broken.glob("*.partial"))

    done = ["train", f"--target={target_directory}", f"--out={broken}", f"--init={broken}"]
    capsys.readouterr()
    assert main([*done, *TINY_RUN, "--steps=12"]) == 2
    assert "has 12 steps already" in capsys.readouterr().err

    fresh = train_tiny(
        target_directory, tmp_path / "next", "--steps=2", f"--init={whole}", "--new-schedule"
    )
    assert (fresh["training"]["first_step"], fresh["training"]["next_step"]) == (0, 2)
    wider = [f"--init={whole}", "--new-schedule", "--widen-mlp-to=192", "--steps=1"]
    train_tiny(target_directory, tmp_path / "wider", *wider)
    assert LlamaConfig.read(tmp_path / "wider").mlp_size == 192
    for refused in (["--widen-mlp-to=192"], [f"--init={whole}", "--widen-mlp-to=192"]):
        other = ["train", f"--target={target_directory}", f"--out={tmp_path / 'x'}", *TINY_RUN]
        assert main([*other, *refused]) == 2
        assert "--widen-mlp-to needs" in capsys.readouterr().err
    before = load_file(str(whole / "model.safetensors"))[EMBEDDING].float()
    after = load_file(str(tmp_path / "next" / "model.safetensors"))[EMBEDDING].float()
    assert 0 < float((after - before).abs().max()) < 0.1
