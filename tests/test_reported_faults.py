"""Faults that other speculative decoders were reported to have, where no other test looks for them.

docs/known-faults.md says which test of this repository looks for which fault.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import typer

from mlxgen.cli.app import app
from mlxgen.config import AcceptRule, SamplingConfig
from mlxgen.errors import NonFiniteError
from mlxgen.models import loading
from mlxgen.sampling.chain import SamplerChain, effective_token_distribution
from mlxgen.speculative.depth import AdaptiveDepth
from mlxgen.speculative.rules import verify_draft_tokens
from tests.fixtures.command import mlxgen_here
from tests.fixtures.model_directories import (
    Vocabulary,
    iid_table,
    successor_table,
    write_table_model,
)
from tests.fixtures.runs import ModelStore, Settings
from tests.test_depth import REGIMES, tokens_per_ms

RULES = [rule.value for rule in AcceptRule]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


# Filters apply to every verified position and to the bonus token.


LOGITS = [1.2, 1.0, 0.4, 0.0, -0.4, -0.9]
NUCLEUS = SamplingConfig(temperature=1.0, top_p=0.5)


def ids_outside(models: ModelStore, rule: AcceptRule, k: int, sampling: SamplingConfig) -> int:
    """How many of 200 tokens stand outside the nucleus of 0.5, which holds tokens 0 and 1."""
    target = models.table(iid_table(LOGITS))
    draft = models.table(iid_table(LOGITS[::-1]))
    settings = Settings(prompt=(0,), width=6, sampling=sampling, rule=rule, k=k)
    ids = settings.speculative(target, draft, draft_sampling=SamplingConfig(temperature=1.0))
    return sum(token > 1 for token in ids.ids(200))


@pytest.mark.parametrize("rule", AcceptRule)
@pytest.mark.parametrize("k", [1, 4])
def test_no_token_outside_the_nucleus(models: ModelStore, rule: AcceptRule, k: int) -> None:
    """From a draft that mostly proposes what lies outside."""
    assert ids_outside(models, rule, k, NUCLEUS) == 0


def test_the_check_notices_tokens_outside_the_nucleus(models: ModelStore) -> None:
    without = SamplingConfig(temperature=1.0)
    assert ids_outside(models, AcceptRule.STOCHASTIC, 4, without) > 20


# Half precision.


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_ratio_of_half_precision_logits_does_not_underflow(dtype: mx.Dtype) -> None:
    """Logits 20 apart: the ratio is 2e-9, and probabilities in float16 would make it 0 / 0."""
    chain = SamplerChain(SamplingConfig(temperature=1.0), 2)
    logits = mx.array([[20.0, 0.0], [20.0, 0.0]]).astype(dtype)
    p = effective_token_distribution(logits, chain, chain.new_history([0]), mx.array([1]))
    assert p.dtype == mx.float32 and 1e-9 < np.array(p)[0, 1] < 3e-9
    q = mx.array([[0.1, 0.9]])
    verdict = verify_draft_tokens(
        p, q, mx.array([1]), mx.array([0.5]), lambda offset: mx.ones((2,))
    )
    assert np.array(verdict.accepted) == 0 and np.array(verdict.next_id) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.0, 1), (1e-8, 1), (0.5, 1), (0.6, 2), (0.8, 2), (1.0, 4)]
)
def test_top_p_means_the_same_in_every_precision(dtype: mx.Dtype, top_p: float, kept: int) -> None:
    chain = SamplerChain(SamplingConfig(temperature=1.0, top_p=top_p), 4)
    logits = mx.log(mx.array([[0.51, 0.31, 0.13, 0.05]])).astype(dtype)
    row = effective_token_distribution(logits, chain, chain.new_history([0]))
    assert (np.array(row)[0] > 0).tolist() == [position < kept for position in range(4)]
    assert np.array(row).sum() == pytest.approx(1.0, abs=1e-5)


def test_min_p_works_at_any_width() -> None:
    width = 70_000
    logits = np.full((1, width), -5.0, dtype=np.float32)
    logits[0, [3, 60_001, 69_999]] = [2.0, 1.5, 1.2]
    chain = SamplerChain(SamplingConfig(temperature=1.0, min_p=0.5), width)
    row = effective_token_distribution(mx.array(logits), chain, chain.new_history([0]))
    # exp(-0.5) is above one half of the top, exp(-0.8) is below.
    assert np.flatnonzero(np.array(row)[0]).tolist() == [3, 60_001]


# A run that failed leaves nothing behind.


@pytest.mark.parametrize("rule", AcceptRule)
def test_a_failed_run_leaves_the_next_one_alone(models: ModelStore, rule: AcceptRule) -> None:
    settings = Settings(sampling=SamplingConfig(temperature=0.9), rule=rule)
    sound, damaged = models.llama(1), models.llama(1, nan_weight="lm_head.weight")
    before = settings.speculative_ids(sound, sound, 20)
    for pair in ((damaged, sound), (sound, damaged)):
        with pytest.raises(NonFiniteError):
            settings.speculative_ids(*pair, 20)
    assert settings.speculative_ids(sound, sound, 20) == before
    assert settings.plain_ids(sound, 20)


# Parity in single precision over many prompts.


@pytest.mark.slow
def test_greedy_ids_are_those_of_plain_decoding_on_fifty_prompts(models: ModelStore) -> None:
    target = models.llama(1)
    draft = models.llama(1, disturbance=0.1)
    prompts = np.random.default_rng(9).integers(0, 64, (50, 6)).tolist()
    for number, prompt in enumerate(prompts):
        settings = Settings(prompt=tuple(prompt))
        plain = settings.plain_ids(target, 12)
        for k in (1 + number % 8, 8 - number % 8):
            assert settings.but(k=k).speculative_ids(target, draft, 12) == plain, (prompt, k)


# Every end of sequence that anybody declares ends the text, at the same time.


ENDS = ("<a>", "<b>", "<tokenizer>", "<generation>", "<extra>")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("k", [0, 3])
def test_ends_of_sequence_of_all_sources_hold_at_once(tmp_path: Path, end: str, k: int) -> None:
    vocabulary = Vocabulary("abcd", ENDS, eos="<tokenizer>")
    ids = {token: position for position, token in enumerate(vocabulary.tokens)}
    target = write_table_model(
        tmp_path,
        successor_table([1, 2, 3, ids[end], *[0] * len(ENDS)]),
        vocabulary=vocabulary,
        eos_token_id=[ids["<a>"], ids["<b>"]],
    )
    (target / "generation_config.json").write_text(
        json.dumps({"eos_token_id": ids["<generation>"]}), encoding="utf-8"
    )
    words = ["generate", "-m", target, "-p", "a", "-n", 20, "--json"]
    words += ["--extra-eos-token", "<extra>"]
    words += ["--draft-model", target, "--num-draft-tokens", k] if k else []
    found = mlxgen_here(*words).document
    assert (found["text"], found["finish_reason"]) == ("bcd", "stop")


# Prompts and texts.


@pytest.mark.parametrize("draft", [False, True])
def test_an_empty_prompt_is_refused_and_white_space_is_a_prompt(
    models: ModelStore, draft: bool
) -> None:
    vocabulary = Vocabulary("abcdefgh \n")
    target = models.llama_directory(1, vocabulary=vocabulary)
    words: list[object] = ["generate", "-m", target, "-n", 8, "--json"]
    more: list[object] = ["--draft-model", target] if draft else []
    run = mlxgen_here(*words, *more, "-p", "")
    assert run.code == 2 and "the prompt is empty" in run.error
    for prompt in (" ", "\n", " \n "):
        assert mlxgen_here(*words, *more, "-p", prompt).ids == mlxgen_here(*words, "-p", prompt).ids


@pytest.mark.parametrize("options", [[], ["--temp", 1, "--seed", 4]])
def test_markers_of_thinking_are_there_with_and_without_a_draft(
    models: ModelStore, options: list[object]
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    vocabulary = Vocabulary("abcdef\n", ("<think>", "</think>"), chat_template=template)
    target = models.llama_directory(1, vocabulary=vocabulary, head_scale=2.0)
    draft = models.llama_directory(1, vocabulary=vocabulary, head_scale=2.0, disturbance=0.2)
    # Bias makes the markers part of the text.
    words: list[object] = ["generate", "-m", target, "-p", "ab", "-n", 40]
    words += ["--logit-bias", "7:2", "--logit-bias", "8:2", *options]
    plain = mlxgen_here(*words, "--json").document
    assert "<think>" in plain["text"] and "</think>" in plain["text"]
    assert plain["prompt_ids"][-1] == 7
    speculative = mlxgen_here(*words, "--draft-model", draft, "--json").document
    assert speculative["text"] == plain["text"]
    printed = mlxgen_here(*words, "--draft-model", draft, "--quiet")
    assert printed.stdout == plain["text"] + "\n"


# What is said.


def test_the_draft_whose_window_ends_first_is_told_and_the_text_stays(models: ModelStore) -> None:
    target = models.llama_directory(1)
    short = models.llama_directory(1, config={"max_position_embeddings": 32})
    words = ["generate", "-m", target, "-p", "abc", "-n", 80, "--json"]
    run = mlxgen_here(*words, "--draft-model", short)
    assert run.ids == mlxgen_here(*words).ids
    (note,) = run.lines("note: ", stream="stderr")
    assert "the draft's context window is 32 tokens" in note
    long = mlxgen_here(*words, "--draft-model", models.llama_directory(1, disturbance=0.1))
    assert long.lines("note: ", stream="stderr") == []


@pytest.mark.parametrize("how", ["same path", "trailing slash", "link", "other"])
def test_a_draft_that_is_the_target_is_loaded_once(
    models: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    target = models.llama_directory(1)
    (tmp_path / "link").symlink_to(target)
    shutil.copytree(target, tmp_path / "other")
    draft = {
        "same path": str(target),
        "trailing slash": f"{target}/",
        "link": str(tmp_path / "link"),
        "other": str(tmp_path / "other"),
    }[how]
    loads: list[Path] = []
    load: Any = loading.load_checkpoint

    def counted(checkpoint: Any, **options: Any) -> Any:
        loads.append(checkpoint.path)
        return load(checkpoint, **options)

    monkeypatch.setattr(loading, "load_checkpoint", counted)
    words = ["generate", "-m", target, "--draft-model", draft, "-p", "ab", "-n", 9, "--json"]
    run = mlxgen_here(*words)
    assert run.document["speculative"]["per_position_acceptance"] == 1
    assert len(loads) == (2 if how == "other" else 1)


def test_help_names_every_rule_and_that_it_is_lossless() -> None:
    command: Any = typer.main.get_command(app)
    (option,) = (
        parameter
        for parameter in command.commands["generate"].params
        if "--accept-rule" in parameter.opts
    )
    assert all(rule in option.help for rule in RULES) and "all are lossless" in option.help


@pytest.mark.parametrize(
    ("regime", "pays"),
    [
        ("draft as slow as target, linear", False),
        ("useless draft, linear", False),
        ("middling draft", True),
    ],
)
def test_a_draft_that_does_not_pay_is_predicted_not_to(regime: str, pays: bool) -> None:
    depth = AdaptiveDepth()
    tokens_per_ms(REGIMES[regime], depth, 0)
    summary = depth.summary()
    assert (summary.k > 0) == (summary.break_even is not None) == pays
    assert summary.predicted_speedup is not None
    assert (summary.predicted_speedup > 1.01) == pays
