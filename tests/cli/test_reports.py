"""Log-probabilities, strict JSON, and the log."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.command import Outcome, mlxgen_here, mlxgen_process
from tests.fixtures.model_directories import Vocabulary, iid_table
from tests.fixtures.runs import ModelStore

RULES = ["sampler-match", "stochastic", "block", "gumbel-match"]


@pytest.fixture
def target(models: ModelStore) -> Path:
    return models.llama_directory(1, head_scale=3.0)


@pytest.fixture
def draft(models: ModelStore) -> Path:
    return models.llama_directory(1, head_scale=3.0, disturbance=0.1)


def generate(target: Path, *more: object) -> Outcome:
    return mlxgen_here("generate", "-m", target, "-p", "words", "-n", 25, "--seed", 2, *more)


def assert_same_log_probabilities(found: list[Any], expected: list[Any]) -> None:
    """Within 1e-4, and the same best tokens save for ties that rounding may turn."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["id"] == theirs["id"] and ours["token"] == theirs["token"]
        assert ours["logprob"] == pytest.approx(theirs["logprob"], abs=1e-4)
        values = [alternative["logprob"] for alternative in ours["top"]]
        assert values == sorted(values, reverse=True) and len(values) == 3
        assert values == pytest.approx([other["logprob"] for other in theirs["top"]], abs=1e-4)


@pytest.mark.parametrize(
    "options", [[], ["--temp", 1.3], ["--temp", 1, "--top-k", 3, "--repetition-penalty", 1.5]]
)
@pytest.mark.parametrize("k", [1, 5])
def test_log_probabilities_are_the_same_with_and_without_a_draft(
    target: Path, draft: Path, options: list[object], k: int
) -> None:
    words = ["--json", "--logprobs", 3, *options]
    plain = generate(target, *words).document
    more = ["--draft-model", draft, "--num-draft-tokens", k]
    speculative = generate(target, *words, *more).document
    assert [entry["id"] for entry in plain["logprobs"]] == plain["token_ids"]
    assert_same_log_probabilities(speculative["logprobs"], plain["logprobs"])


@pytest.mark.parametrize("rule", RULES)
def test_log_probabilities_are_the_models_own_before_temperature_and_filters(
    models: ModelStore, rule: str
) -> None:
    law = [0.5, 0.25, 0.125, 0.125]
    target = models.table_directory(iid_table([math.log(p) for p in law]))
    words = ["generate", "-m", target, "--draft-model", target, "-p", "a", "-n", 20, "--json"]
    words += ["--temp", 2, "--top-k", 2, "--logprobs", 9, "--accept-rule", rule]
    document = mlxgen_here(*words, "--logit-bias", "0:1").document
    assert {entry["id"] for entry in document["logprobs"]} == {0, 1}
    for entry in document["logprobs"]:
        assert entry["logprob"] == pytest.approx(math.log(law[entry["id"]]), abs=1e-5)
        # More alternatives than tokens were asked for: all of them, best first.
        top = [(other["id"], other["logprob"]) for other in entry["top"]]
        assert [token for token, _ in top][:2] == [0, 1] and len(top) == 4
        assert [value for _, value in top] == pytest.approx([math.log(p) for p in law], abs=1e-5)


def test_log_probability_lines_name_each_token(target: Path) -> None:
    run = generate(target, "--logprobs", 2)
    lines = run.lines("[Logprobs] ")
    assert len(lines) == 25
    pattern = (
        r'\[Logprobs\] id=\d+ token="." logprob=-\d+\.\d{4} top=".":-\d+\.\d{4} ".":-\d+\.\d{4}'
    )
    assert all(re.fullmatch(pattern, line) for line in lines)
    assert generate(target).lines("[Logprobs] ") == []


def test_numbers_that_json_lacks_are_null(target: Path, draft: Path) -> None:
    options = ["--logit-bias", "3:-inf", "--logit-bias", "5:1.5", "--temp", 1, "--accept-diag"]
    run = generate(target, "--draft-model", draft, "--json", "--logprobs", 2, *options)
    document = run.document  # refuses NaN and Infinity
    assert document["sampling"]["logit_bias"] == {"3": None, "5": 1.5}
    assert 3 not in document["token_ids"]
    with pytest.raises(ValueError, match="not strict JSON"):
        _ = Outcome(0, b'{"a": -Infinity}\n', b"").document


def test_document_says_what_ran(target: Path, draft: Path) -> None:
    run = generate(target, "--draft-model", draft, "--json", "--temp", 0.9, "--num-draft-tokens", 2)
    document = run.document
    assert document["models"] == {"target": str(target), "draft": str(draft)}
    section = document["speculative"]
    assert section["active"] is True and section["lossless"] is True
    assert section["num_draft_tokens"] == 2 and section["rule"] == "sampler-match"
    assert document["seed"] == 2 and document["sampling"]["temperature"] == 0.9
    assert document["timing"]["decode_ms"] > 0 and document["timing"]["prefill_ms"] > 0
    plain = generate(target, "--json").document
    assert plain["speculative"] == {"active": False, "why_inactive": "no draft model"}


def test_document_of_text_outside_ascii_is_utf8_or_escaped(models: ModelStore) -> None:
    vocabulary = Vocabulary("a", ("é", "日"))
    target = models.table_directory(iid_table([0.0, 0.0, 5.0]), vocabulary=vocabulary)
    words = ["generate", "-m", target, "-p", "a", "-n", 2, "--json"]
    run = mlxgen_here(*words)
    assert "日日" in run.stdout and run.document["text"] == "日日"
    escaped = mlxgen_here(*words, encoding="latin-1")
    assert escaped.out.isascii() and json.loads(escaped.out)["text"] == "日日"


ACTIVE = "speculative acceptance rule active"
FINISHED = "speculative decode finished"


LOGGED = ["--temp", 1, "--accept-rule", "stochastic", "--quiet"]


@pytest.mark.parametrize(
    ("variables", "logs"),
    [
        ({"MLXGEN_LOG": "info"}, True),
        ({"MLXGEN_LOG": " DEBUG "}, True),
        ({"RUST_LOG": "info"}, True),
        ({"RUST_LOG": "warn,mlxcel=info"}, True),
        ({"MLXGEN_LOG": "warn", "RUST_LOG": "info"}, False),
        ({"MLXGEN_LOG": "", "RUST_LOG": "info"}, True),
        ({"RUST_LOG": "error"}, False),
        ({"MLXGEN_LOG": "nonsense"}, False),
        ({}, False),
    ],
)
def test_log_is_on_when_one_of_two_variables_says_so(
    target: Path, draft: Path, variables: dict[str, str], logs: bool
) -> None:
    words = ["generate", "-m", target, "--draft-model", draft, "-p", "words", "-n", 3, *LOGGED]
    run = mlxgen_here(*words, variables=variables)
    assert run.stderr.count(FINISHED) == logs
    assert FINISHED not in run.stdout


@pytest.mark.parametrize("variable", ["MLXGEN_LOG", "RUST_LOG"])
def test_log_of_a_process_tells_the_rule_once_and_the_end(
    target: Path, draft: Path, variable: str
) -> None:
    words = ["generate", "-m", target, "--draft-model", draft, "-p", "words", "-n", 12, *LOGGED]
    run = mlxgen_process(*words, variables={variable: "info"})
    assert run.code == 0 and ACTIVE not in run.stdout
    (active,) = (line for line in run.stderr.splitlines() if ACTIVE in line)
    assert 'rule="stochastic (modified rejection sampling)"' in active
    assert "distribution_preserving=true" in active
    (finished,) = (line for line in run.stderr.splitlines() if FINISHED in line)
    assert "rule=stochastic " in finished and "generated_tokens=12" in finished
    assert run.stderr.count("outcome first seen") >= 1


def test_plain_run_logs_nothing_of_speculation(target: Path) -> None:
    words = ["generate", "-m", target, "-p", "words", "-n", 3, "--quiet"]
    run = mlxgen_here(*words, variables={"MLXGEN_LOG": "info"})
    assert "speculative" not in run.stderr
