"""The tiny models that other tests rely on are what they claim to be."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from tests.fixtures.model_directories import (
    SYMBOLS_64,
    LlamaShape,
    Vocabulary,
    iid_table,
    successor_table,
    write_llama,
    write_table_model,
)
from tests.fixtures.runs import ModelStore, Settings


@pytest.mark.parametrize("size", [2, 6, 64])
@pytest.mark.parametrize("padding", [0, 1, 16])
def test_table_model_gives_exactly_its_table(models: ModelStore, size: int, padding: int) -> None:
    table = np.random.default_rng(size).normal(scale=4, size=(size, size))
    model = models.table(table, head_rows=size + padding)
    ids = np.random.default_rng(1).integers(0, size, (1, 40))
    logits = np.array(model(mx.array(ids)))[0]
    assert logits.shape == (40, size + padding)
    np.testing.assert_allclose(logits[:, :size], table[ids[0]], atol=1e-5)
    np.testing.assert_allclose(logits[:, size:], 9.0, atol=1e-5)


def test_successor_table_walks_its_successors(models: ModelStore) -> None:
    model = models.table(successor_table([1, 2, 0]))
    settings = Settings(prompt=(0,), width=3)
    assert settings.plain_ids(model, 5) == [1, 2, 0, 1, 2]


def test_llama_text_depends_on_its_whole_history(models: ModelStore) -> None:
    model = models.llama(1)
    logits = np.array(model(mx.array([[1, 2, 3, 4], [5, 2, 3, 4]])))[:, -1]
    assert np.abs(logits[0] - logits[1]).max() > 1
    assert 15 < logits.std() < 25


def test_same_arguments_write_the_same_bytes(tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> bytes:
        return (write_llama(tmp_path / name, seed) / "model.safetensors").read_bytes()

    assert weights("first", 1) == weights("second", 1) != weights("third", 2)


def test_disturbed_llama_agrees_sometimes(models: ModelStore) -> None:
    ids = mx.random.randint(0, 64, (1, 200), key=mx.random.key(0))
    exact, disturbed = models.llama(1), models.llama(1, disturbance=0.1)
    agreement = mx.mean(mx.argmax(exact(ids), -1) == mx.argmax(disturbed(ids), -1)).item()
    assert isinstance(agreement, float) and 0.2 < agreement < 0.9


def test_text_and_ids_are_one_to_one(tmp_path: Path) -> None:
    tokenizer = mlx_lm.load(str(write_llama(tmp_path, 1)))[1]
    assert tokenizer.encode(SYMBOLS_64) == list(range(64))
    assert tokenizer.decode(list(range(64))) == SYMBOLS_64
    assert tokenizer.eos_token_ids == set()


def test_special_tokens_and_eos_ids_reach_mlx_lm(tmp_path: Path) -> None:
    vocabulary = Vocabulary(
        "abc \n",
        ("<bos>", "<eos>"),
        eos="<eos>",
        bos="<bos>",
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    write_table_model(
        tmp_path, iid_table([0.0] * 7), vocabulary=vocabulary, eos_token_id=[1, 2], head_rows=9
    )
    model, tokenizer = mlx_lm.load(str(tmp_path))[:2]
    assert model.args.vocab_size == 9
    assert tokenizer.eos_token_ids == {1, 2, 6}
    assert tokenizer.encode("a b\n") == [5, 0, 3, 1, 4]
    assert tokenizer.decode([0, 3, 1, 4]) == "a b\n"
    assert vocabulary.ids("a b\n") == [0, 3, 1, 4] and vocabulary.text([0, 6]) == "a"
    message = {"role": "user", "content": "cab"}
    assert tokenizer.apply_chat_template([message]) == [2, 0, 1]


def test_damaged_and_sliding_llamas_are_what_they_claim(models: ModelStore) -> None:
    ids = mx.array([[1, 2, 3]])
    damaged = models.llama(1, nan_weight="lm_head.weight")
    assert np.isnan(np.array(damaged(ids))[0, :, 0]).all()
    sliding = models.llama(1, shape=LlamaShape(layers=3), sliding_window=8)
    kinds = [type(cache).__name__ for cache in sliding.make_cache()]
    assert kinds == ["KVCache", "RotatingKVCache", "RotatingKVCache"]
