"""Every sampling option reaches the text, and with a draft exactly as without one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from mlxgen.cli.app import app
from tests.fixtures.command import Outcome, mlxgen_here
from tests.fixtures.model_directories import (
    Vocabulary,
    iid_table,
    successor_table,
    write_llama,
    write_table_model,
)
from tests.fixtures.runs import ModelStore

WARM = ("--temp", "1.1")
LOOPING = ("--logit-bias", "0:6", "--logit-bias", "1:6", "--logit-bias", "2:6")
"""Makes the text repeat three letters in ever the same order."""
PROMPT = "abcabcabcab the the the"
VOCABULARY = Vocabulary("abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ012345678.\n")

# Each option with options that it builds on: the run with both differs from the run with those.
OPTIONS: dict[str, list[tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "--temp": [((), WARM), (WARM, ("--temp", "0.4"))],
    "--top-k": [(WARM, ("--top-k", "3")), (WARM, ("--top-k", "1"))],
    "--top-p": [(WARM, ("--top-p", "0.5")), (WARM, ("--top-p", "0"))],
    "--min-p": [(WARM, ("--min-p", "0.3"))],
    "--typical-p": [(WARM, ("--typical-p", "0.4"))],
    "--top-n-sigma": [(WARM, ("--top-n-sigma", "0.8"))],
    "--xtc-probability": [(WARM, ("--xtc-probability", "0.7"))],
    "--xtc-threshold": [((*WARM, "--xtc-probability", "1"), ("--xtc-threshold", "0.3"))],
    "--repetition-penalty": [
        (WARM, ("--repetition-penalty", "1.8")),
        ((), ("--repetition-penalty", "1.8")),
    ],
    "--repeat-last-n": [
        ((*WARM, "--repetition-penalty", "1.8"), ("--repeat-last-n", "4")),
        (("--frequency-penalty", "1.5"), ("--repeat-last-n", "2")),
        (("--presence-penalty", "2.5"), ("--repeat-last-n", "0")),
    ],
    "--frequency-penalty": [
        (WARM, ("--frequency-penalty", "1")),
        ((), ("--frequency-penalty", "1.5")),
        (WARM, ("--frequency-penalty", "-0.5")),
    ],
    "--presence-penalty": [
        (WARM, ("--presence-penalty", "1.5")),
        ((), ("--presence-penalty", "2.5")),
    ],
    "--dry-multiplier": [
        (LOOPING, ("--dry-multiplier", "1")),
        ((*LOOPING, *WARM), ("--dry-multiplier", "2")),
    ],
    "--dry-base": [((*LOOPING, "--dry-multiplier", "0.3"), ("--dry-base", "6"))],
    "--dry-allowed-length": [
        ((*LOOPING, "--dry-multiplier", "1"), ("--dry-allowed-length", "5")),
    ],
    "--dry-penalty-last-n": [
        ((*LOOPING, "--dry-multiplier", "1"), ("--dry-penalty-last-n", "8")),
        ((*LOOPING, "--dry-multiplier", "1"), ("--dry-penalty-last-n", "0")),
    ],
    "--dry-sequence-breaker": [
        ((*LOOPING, "--dry-multiplier", "1"), ("--dry-sequence-breaker", "b")),
    ],
    "--logit-bias": [
        (WARM, ("--logit-bias", "3:6", "--logit-bias", "4:-inf")),
        ((), ("--logit-bias", "3:4")),
    ],
    "--seed": [(WARM, ("--seed", "6"))],
    "--samplers": [
        (
            (*WARM, "--top-p", "0.6", "--top-k", "6"),
            ("--samplers", "top_p;temperature;top_k"),
        ),
    ],
}
CASES = [
    pytest.param(base, more, id=" ".join([*base, *more]))
    for cases in OPTIONS.values()
    for base, more in cases
]
NO_CASE = {"--no-generation-config"}
"""Has tests of its own below."""


def sampling_options() -> set[str]:
    """The options in the Sampling panel of the help text, by their long names."""
    command: Any = typer.main.get_command(app)
    parameters = command.commands["generate"].params
    return {
        next(name for name in parameter.opts if name.startswith("--"))
        for parameter in parameters
        if getattr(parameter, "rich_help_panel", None) == "Sampling"
    }


def test_every_sampling_option_has_a_case() -> None:
    assert sampling_options() == {*OPTIONS, *NO_CASE}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose text repeats itself now and then, and a draft that agrees now and then."""
    root = tmp_path_factory.mktemp("pair")
    target = write_llama(root / "target", 4, head_scale=2.0, vocabulary=VOCABULARY)
    draft = write_llama(root / "draft", 4, head_scale=2.0, disturbance=0.15, vocabulary=VOCABULARY)
    return target, draft


@pytest.fixture(scope="module")
def ids(pair: tuple[Path, Path]) -> Any:
    """The ids of a run, remembered: `ids(options, is_speculative)`."""

    @cache
    def run(options: tuple[str, ...], is_speculative: bool) -> list[int]:
        words: list[object] = ["generate", "-m", pair[0], "-p", PROMPT, "-n", 40, "--json"]
        if is_speculative:
            words += ["--draft-model", pair[1], "--num-draft-tokens", 4]
        seed = [] if "--seed" in options else ["--seed", "5"]
        found = mlxgen_here(*words, *seed, *options).document
        if is_speculative:
            assert found["speculative"]["accepted"] > 0
        return list(found["token_ids"])

    return run


@pytest.mark.parametrize(("base", "more"), CASES)
def test_option_changes_speculative_text_exactly_as_it_changes_plain_text(
    ids: Any, base: tuple[str, ...], more: tuple[str, ...]
) -> None:
    plain = ids((*base, *more), False)
    assert plain != ids(base, False)
    assert ids((*base, *more), True) == plain
    assert ids(base, True) == ids(base, False)


@pytest.mark.parametrize("rule", ["stochastic", "block", "gumbel-match", "sampler-match"])
def test_banned_token_appears_under_no_rule(pair: tuple[Path, Path], rule: str) -> None:
    words = ["generate", "-m", pair[0], "--draft-model", pair[1], "-p", PROMPT, "-n", 60, "--json"]
    words += ["--temp", 1.5, "--accept-rule", rule, "--seed", 3]
    favourite = max(set(first := mlxgen_here(*words).ids), key=first.count)
    assert favourite not in mlxgen_here(*words, "--logit-bias", f"{favourite}:-inf").ids


def test_xtc_spares_newline_and_end_of_sequence(models: ModelStore) -> None:
    vocabulary = Vocabulary("ab\n", ("<eos>",), eos="<eos>")
    table = iid_table([2.0, 1.9, 1.8, 1.7])
    target = models.table_directory(table, vocabulary=vocabulary)
    options = ["--temp", 1, "--xtc-probability", 1, "--xtc-threshold", 0.1, "--seed", 1]
    run = mlxgen_here(
        *("generate", "-m", target, "-p", "a", "-n", 200, "--ignore-eos", "--json"), *options
    )
    # All four are top choices. The least likely stays by rule; a and b go, newline is spared.
    assert set(run.ids) == {2, 3}


SAMPLERS = (*WARM, "--top-p", "0.6", "--top-k", "6", "--min-p", "0.02")


@pytest.mark.parametrize(
    "order",
    [
        "temperature;top_k;top_p;min_p",
        "top_k;top_p;min_p;temperature",
        "min_p,top_p,top_k,temperature",
        " top_p ; temperature; min_p;top_k; ",
        "mlx-lm",
    ],
)
def test_order_of_filters_is_that_of_the_list_with_and_without_a_draft(
    ids: Any, order: str
) -> None:
    options = (*SAMPLERS, "--samplers", order)
    assert ids(options, True) == ids(options, False)


def test_orders_differ_where_it_matters_and_presets_are_lists(ids: Any) -> None:
    def text(order: str) -> Any:
        return ids((*SAMPLERS, "--samplers", order), False)

    assert text("temperature;top_p;top_k;min_p") != text("top_p;top_k;min_p;temperature")
    assert text("mlx-lm") == text("top_n_sigma;typical_p;top_p;min_p;xtc;top_k;temperature")
    assert text("top_n_sigma;typical_p;xtc;temperature;top_k;top_p;min_p") == ids(SAMPLERS, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temp", 0.5, "--samplers", "top_k"], "--temp is set but --samplers leaves out"),
        (["--temp", 1, "--top-k", 5, "--samplers", "temperature"], "--top-k is set but"),
        (["--temp", 1, "--min-p", 0.1, "--samplers", "top_k"], "--min-p is set but"),
        (["--temp", 1, "--xtc-probability", 0.5, "--samplers", "top_k"], "leaves out xtc"),
        (["--samplers", "heat"], "--samplers does not know 'heat'"),
        (["--samplers", "top_k;top_k"], "--samplers names a filter twice"),
    ],
)
def test_filter_list_that_drops_or_invents_a_filter_is_refused(
    pair: tuple[Path, Path], options: list[object], message: str
) -> None:
    run = mlxgen_here("generate", "-m", pair[0], "-p", "a", *options)
    assert run.code == 2 and message in run.error


def test_filter_that_is_off_may_be_left_out(pair: tuple[Path, Path]) -> None:
    options = ["--temp", 0.5, "--samplers", "temperature", "-n", 3]
    assert mlxgen_here("generate", "-m", pair[0], "-p", "a", *options).code == 0


RECOMMENDED = {"temperature": 0.9, "top_p": 0.8, "top_k": 5, "min_p": 0.4}


@pytest.fixture(scope="module")
def recommending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose generation_config.json recommends sampling values."""
    directory = tmp_path_factory.mktemp("recommending")
    write_llama(directory, 4, head_scale=2.0, vocabulary=VOCABULARY)
    content = json.dumps(RECOMMENDED)
    (directory / "generation_config.json").write_text(content, encoding="utf-8")
    return directory


def sampled(target: Path, *options: object) -> tuple[Outcome, tuple[float, float, int]]:
    """A run and the temperature, top_p and top_k that it used."""
    run = mlxgen_here(
        "generate", "-m", target, "-p", PROMPT, "-n", 20, "--seed", 1, "--json", *options
    )
    sampling = run.document["sampling"]
    return run, (sampling["temperature"], sampling["top_p"], sampling["top_k"])


@pytest.mark.parametrize(
    ("options", "values", "said"),
    [
        ([], (0.9, 0.8, 5), "temperature=0.9, top_p=0.8, top_k=5"),
        (["--temp", 0.3], (0.3, 0.8, 5), "top_p=0.8, top_k=5"),
        (["--temp", 0], (0, 0.8, 5), "top_p=0.8, top_k=5"),
        (["--top-p", 1, "--top-k", 0], (0.9, 1, 0), "temperature=0.9"),
        (["-t", 0.5, "--top-p", 0.5, "--top-k", 7], (0.5, 0.5, 7), None),
        (["--no-generation-config"], (0, 1, 0), None),
        (["--no-generation-config", "--temp", 1], (1, 1, 0), None),
    ],
)
def test_recommendations_hold_where_no_flag_was_given_and_are_said(
    recommending: Path,
    options: list[object],
    values: tuple[float, float, int],
    said: str | None,
) -> None:
    run, used = sampled(recommending, *options)
    assert used == values
    lines = run.lines("Sampling from the model's generation_config.json: ", stream="stderr")
    if said is None:
        assert lines == []
    else:
        (line,) = lines
        assert f": {said} (--no-generation-config turns this off)" in line


def test_recommended_values_act_like_flags(recommending: Path, pair: tuple[Path, Path]) -> None:
    by_file = sampled(recommending)[0].ids
    by_flag = sampled(pair[0], "--temp", 0.9, "--top-p", 0.8, "--top-k", 5)[0].ids
    assert by_file == by_flag
    speculative = sampled(recommending, "--draft-model", pair[1])[0].ids
    assert speculative == by_file


def test_recommendations_say_nothing_about_other_values(recommending: Path) -> None:
    assert sampled(recommending)[0].document["sampling"]["min_p"] == 0


def test_quiet_says_nothing_of_recommendations(recommending: Path) -> None:
    run = mlxgen_here("generate", "-m", recommending, "-p", "a", "-n", 2, "--quiet")
    assert "generation_config" not in run.stderr


def test_file_that_asks_for_no_sampling_stays_greedy(tmp_path: Path) -> None:
    target = write_llama(tmp_path, 4, vocabulary=VOCABULARY)
    content = json.dumps({"do_sample": False, "temperature": 0.9})
    (target / "generation_config.json").write_text(content, encoding="utf-8")
    assert sampled(target)[1] == (0, 1, 0)


@pytest.mark.parametrize("temperature", ["1e-6", "1e-39"])
def test_temperature_near_zero_behaves_like_zero(pair: tuple[Path, Path], temperature: str) -> None:
    words = ["generate", "-m", pair[0], "-p", PROMPT, "-n", 15, "--json"]
    greedy = mlxgen_here(*words).ids
    assert mlxgen_here(*words, "--temp", temperature).ids == greedy
    for rule in ("sampler-match", "stochastic"):
        more = ["--temp", temperature, "--draft-model", pair[1], "--accept-rule", rule]
        assert mlxgen_here(*words, *more).ids == greedy


def test_top_k_of_the_vocabulary_or_more_is_off(pair: tuple[Path, Path], ids: Any) -> None:
    assert ids((*WARM, "--top-k", "64"), False) == ids(WARM, False)
    assert ids((*WARM, "--top-k", "100000"), True) == ids(WARM, False)


def test_bias_on_a_padding_id_is_refused(tmp_path: Path) -> None:
    target = write_table_model(tmp_path, successor_table([1, 2, 0]), head_rows=8)
    run = mlxgen_here("generate", "-m", target, "-p", "a", "--logit-bias", "5:1")
    assert run.code == 2 and "--logit-bias 5:1: the vocabulary has ids 0 to 2" in run.error
