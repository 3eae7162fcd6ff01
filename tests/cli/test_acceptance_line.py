"""The lines that scripts grep: what they say, where they go, and what asks for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from mlxgen.drafters.draft_model import DraftModel
from mlxgen.report.lines import acceptance_line
from mlxgen.speculative import selection
from mlxgen.speculative.statistics import SpeculativeAcceptanceStats
from tests.fixtures.command import ACCEPTANCE, DIAGNOSTIC, Outcome, mlxgen_here
from tests.fixtures.model_directories import Vocabulary, successor_table
from tests.fixtures.runs import ModelStore

LETTERS = Vocabulary("abcdefgh", ("<eos>",), eos="<eos>")
EOS = 8
RING = successor_table([1, 2, 3, 4, 5, 6, 7, 0, 0])
"""After each letter comes the next one, certainly; after h comes a."""
ENDING = successor_table([EOS, 2, 3, 4, 5, 6, 7, 0, 0])
"""As the ring, but after a the text ends."""
GENERATED = re.compile(r"\[Generated (\d+) tokens in \d+\.\d\ds = \d+\.\d\d tok/s\]")
KIND_LINES = [
    "Resolved drafter kind: dflash (block_size = 16, default)",
    "Drafter kind was auto-detected only; running the classic SpeculativeGenerator path (pass "
    "--draft-kind explicitly to select a kind-specific round loop).",
]
LABELS = {
    "greedy-argmax": "greedy target: accept iff the draft is the target's most likely token",
    "sampler-match": "sampler-match: accept iff the draft equals the target's own draw",
    "stochastic": "stochastic (modified rejection sampling)",
    "unknown": "no speculative round ran",
}


@pytest.fixture
def ring(models: ModelStore) -> Path:
    """The ring; as its own draft, every proposal is accepted."""
    return models.table_directory(RING, vocabulary=LETTERS)


@pytest.fixture
def ending(models: ModelStore) -> Path:
    return models.table_directory(ENDING, vocabulary=LETTERS)


def generate(
    target: Path,
    *more: object,
    draft: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Outcome:
    """Eleven tokens after "h" in blocks of four, with the target as its own draft."""
    words: list[object] = ["generate", "-m", target, "--draft-model", draft or target]
    words += ["-p", "h", "-n", 11, "--num-draft-tokens", 4, "--seed", 1]
    return mlxgen_here(*words, *more, variables=variables)


def rule_of(run: Outcome) -> str:
    rule: str = run.document["speculative"]["rule"]
    return rule


# The first token is the target's own, two rounds of four proposals and a bonus follow.
COUNTS = (
    "rounds=2 proposed=8 positions_tested=8 accepted=8 per_position_acceptance=1.0000 "
    "acceptance_rate=1.0000 mean_accepted_len=4.0000"
)
NO_COUNTS = (
    "rounds=0 proposed=0 positions_tested=0 accepted=0 per_position_acceptance=0.0000 "
    "acceptance_rate=0.0000 mean_accepted_len=0.0000"
)


def test_the_line_of_the_specification() -> None:
    stats = SpeculativeAcceptanceStats(
        selection.STOCHASTIC, rounds=153, proposed=612, positions_tested=195, accepted=46
    )
    assert acceptance_line(stats) == (
        "[Speculative acceptance] rule=stochastic rounds=153 proposed=612 positions_tested=195 "
        "accepted=46 per_position_acceptance=0.2359 acceptance_rate=0.0752 "
        "mean_accepted_len=0.3007 (stochastic (modified rejection sampling))"
    )


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("greedy-argmax", []),
        ("greedy-argmax", ["--accept-rule", "stochastic"]),
        ("greedy-argmax", ["--temp", 1, "--top-k", 1, "--accept-rule", "stochastic"]),
        ("sampler-match", ["--temp", 0.7]),
        ("sampler-match", ["--temp", 0.7, "--accept-rule", "sampler-match"]),
        ("stochastic", ["--temp", 0.7, "--accept-rule", "stochastic"]),
        ("block", ["--temp", 0.7, "--accept-rule", "block"]),
        ("gumbel-match", ["--temp", 0.7, "--accept-rule", "gumbel-match"]),
    ],
)
def test_acceptance_line_follows_the_text_on_stdout(
    ring: Path, rule: str, options: list[object]
) -> None:
    run = generate(ring, *options)
    text, generated, line = run.stdout.splitlines()
    assert text == "abcdefghabc"
    match = GENERATED.fullmatch(generated)
    assert match is not None and match[1] == "11"
    assert line.startswith(f"{ACCEPTANCE}rule={rule} {COUNTS} (") and line.endswith(")")
    if rule in LABELS:
        assert line == f"{ACCEPTANCE}rule={rule} {COUNTS} ({LABELS[rule]})"
    assert ACCEPTANCE not in run.stderr


def test_rejections_are_counted_where_they_happen(models: ModelStore, ring: Path) -> None:
    # After c the draft skips d. Rounds: bc accepted, e rejected; efgh accepted, a is the bonus;
    # b accepted, c the bonus, since the budget has room for one proposal.
    skipping = models.table_directory(
        successor_table([1, 2, 4, 4, 5, 6, 7, 0, 0]), vocabulary=LETTERS
    )
    run = generate(ring, draft=skipping)
    assert run.text == "abcdefghabc"
    (line,) = run.lines(ACCEPTANCE)
    assert line.startswith(
        f"{ACCEPTANCE}rule=greedy-argmax rounds=3 proposed=9 positions_tested=8 accepted=7 "
        "per_position_acceptance=0.8750 acceptance_rate=0.7778 mean_accepted_len=2.3333 ("
    )


@pytest.mark.parametrize("requested", ["stochastic", "block"])
def test_rule_that_needs_q_falls_back_by_name_when_the_drafter_has_none(
    ring: Path, monkeypatch: pytest.MonkeyPatch, requested: str
) -> None:
    monkeypatch.setattr(DraftModel, "reports_distribution", False)
    run = generate(ring, "--temp", 0.7, "--accept-rule", requested, "--accept-diag")
    (line,) = run.lines("[Speculative acceptance")
    assert line.startswith(
        f"{ACCEPTANCE}rule=sampler-match-no-proposal-distribution {COUNTS} (sampler-match"
    )


@pytest.mark.parametrize("rule", ["sampler-match", "stochastic"])
@pytest.mark.parametrize("diagnostics", ["--accept-diag", "--no-accept-diag"])
@pytest.mark.parametrize("case", ["one token", "no token", "end of sequence first"])
def test_run_without_a_round_has_an_unknown_rule_and_zeros(
    ring: Path, ending: Path, case: str, rule: str, diagnostics: str
) -> None:
    options = ["--temp", 0.7, "--accept-rule", rule, diagnostics]
    if case == "end of sequence first":
        run, text = generate(ending, *options, "-p", "a"), ""
    else:
        run = generate(ring, *options, "-n", 1 if case == "one token" else 0)
        text = "a" if case == "one token" else ""
    assert run.text == text
    (line,) = run.lines("[Speculative acceptance")
    assert line == f"{ACCEPTANCE}rule=unknown {NO_COUNTS} ({LABELS['unknown']})"


def test_run_without_a_draft_has_no_acceptance_line(ring: Path) -> None:
    run = mlxgen_here("generate", "-m", ring, "-p", "h", "-n", 3)
    text, generated = run.stdout.splitlines()
    assert text == "abc" and GENERATED.fullmatch(generated)


def test_quiet_leaves_the_text_and_one_newline_on_stdout(ring: Path) -> None:
    run = generate(ring, "--quiet", "--temp", 0.7, "--accept-diag")
    assert run.out == b"abcdefghabc\n"
    generated, line, *diagnostics = run.stderr.splitlines()
    assert GENERATED.fullmatch(generated)
    assert line == f"{ACCEPTANCE}rule=sampler-match {COUNTS} ({LABELS['sampler-match']})"
    assert all(line.startswith("[Speculative acceptance ") for line in diagnostics)


def test_json_is_one_document_and_its_lines_stand_on_stderr_too(ring: Path) -> None:
    run = generate(ring, "--json", "--temp", 0.7, "--accept-diag")
    lines = run.document["lines"]
    assert GENERATED.fullmatch(lines[0])
    assert lines[1] == f"{ACCEPTANCE}rule=sampler-match {COUNTS} ({LABELS['sampler-match']})"
    assert lines[2].startswith(DIAGNOSTIC)
    assert run.stderr.splitlines()[-len(lines) :] == lines
    assert run.document["text"] == "abcdefghabc"


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("1", "stochastic"),
        ("true", "stochastic"),
        (" YES ", "stochastic"),
        ("on", "stochastic"),
        ("On\t", "stochastic"),
        ("0", "sampler-match"),
        ("no", "sampler-match"),
        ("off", "sampler-match"),
        ("False", "sampler-match"),
        ("", "sampler-match"),
        ("  ", "sampler-match"),
        (None, "sampler-match"),
    ],
)
def test_environment_chooses_the_rule(ring: Path, value: str | None, rule: str) -> None:
    variables = {} if value is None else {"MLXCEL_SPECULATIVE_STOCHASTIC_ACCEPT": value}
    run = generate(ring, "--json", "--temp", 0.7, variables=variables)
    assert rule_of(run) == rule
    assert "warning" not in run.stderr


@pytest.mark.parametrize("value", ["maybe", "2", "stochastic", "yes please"])
@pytest.mark.parametrize("mode", ["--json", "--quiet"])
def test_nonsense_in_the_environment_warns_and_means_off(ring: Path, value: str, mode: str) -> None:
    variables = {"MLXCEL_SPECULATIVE_STOCHASTIC_ACCEPT": value}
    run = generate(ring, mode, "--temp", 0.7, variables=variables)
    (warning,) = run.lines("warning: ", stream="stderr")
    assert "MLXCEL_SPECULATIVE_STOCHASTIC_ACCEPT" in warning and repr(value) in warning
    assert "rule=sampler-match " in run.stderr


@pytest.mark.parametrize("rule", ["sampler-match", "stochastic", "block", "gumbel-match"])
@pytest.mark.parametrize("value", ["0", "1", "nonsense"])
def test_flag_wins_over_the_environment(ring: Path, rule: str, value: str) -> None:
    variables = {"MLXCEL_SPECULATIVE_STOCHASTIC_ACCEPT": value}
    run = generate(ring, "--json", "--temp", 0.7, "--accept-rule", rule, variables=variables)
    assert rule_of(run) == rule
    assert "warning" not in run.stderr


@pytest.mark.parametrize(
    ("value", "flag", "is_on"),
    [
        (None, None, False),
        ("1", None, True),
        ("true", None, True),
        (" ON ", None, True),
        ("0", None, False),
        ("off", None, False),
        ("", None, False),
        ("1", "--no-accept-diag", False),
        ("0", "--accept-diag", True),
        (None, "--accept-diag", True),
    ],
)
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_diagnostic_line_is_asked_for_by_environment_or_flag(
    ring: Path, value: str | None, flag: str | None, is_on: bool, temperature: float
) -> None:
    variables = {} if value is None else {"MLXCEL_SPECULATIVE_ACCEPT_DIAG": value}
    more = [] if flag is None else [flag]
    run = generate(ring, "--temp", temperature, *more, variables=variables)
    lines = run.lines(DIAGNOSTIC)
    assert len(lines) == is_on
    if is_on:
        assert lines[0].startswith(
            f"{DIAGNOSTIC}closed_form_sum_min=1.0000 closed_form_sum_prod=1.0000"
        )
        (check,) = run.lines("[Speculative acceptance check] ")
        assert "accepted=8 positions_tested=8 z=0.00 verdict=consistent" in check


def test_drafter_kind_lines_stand_on_stderr_after_loading(ring: Path, ending: Path) -> None:
    run = generate(ring, draft=ending)
    assert run.stderr.splitlines() == [
        f'Loading model from "{ring}"...',
        f'Loading draft model from "{ending}"...',
        "Draft model loaded.",
        *KIND_LINES,
    ]
    explicit = generate(ring, "--draft-block-size", 4, draft=ending)
    assert explicit.stderr.splitlines()[3:] == [
        "Resolved drafter kind: dflash (block_size = 4, explicit)",
        KIND_LINES[1],
    ]


def test_zero_draft_tokens_decode_plainly_and_say_why(ring: Path) -> None:
    run = generate(ring, "--num-draft-tokens", 0, "--json")
    assert run.document["speculative"] == {
        "active": False,
        "why_inactive": "--num-draft-tokens is 0",
    }
    assert run.document["text"] == "abcdefghabc"
    assert run.document["models"]["draft"] is None
    assert "draft" not in run.stderr.lower()


def test_profile_takes_the_place_of_the_generated_line(ring: Path) -> None:
    run = generate(ring, "--profile")
    text, *block, acceptance = run.stdout.splitlines()
    assert text == "abcdefghabc" and acceptance.startswith(ACCEPTANCE)
    assert block[0] == "[Profile Results]"
    names = [line.split(":")[0] for line in block[1:]]
    assert names == [
        "  Prompt tokens",
        "  Generated tokens",
        "  Prefill",
        "  Decode",
        "  Peak memory",
    ]
