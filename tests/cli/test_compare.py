"""`mlxgen compare` from end to end, on tiny models."""

from __future__ import annotations

import csv
import json
import random
import signal
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mlxgen import generation
from mlxgen.experiment import running
from tests.fixtures.command import (
    Outcome,
    command_line,
    environment,
    mlxgen_here,
)
from tests.fixtures.light_commands import Request, run_all
from tests.fixtures.model_directories import iid_table, write_table_model
from tests.fixtures.runs import ModelStore
from tests.fixtures.statistics import FloatArray, softmax

TARGET, DRAFT = [1.2, 0.7, 0.1, -0.3, -0.8, -1.5], [0.4, 0.9, 0.6, -0.9, 0.0, -1.0]
RULES = ("sampler-match", "stochastic", "block", "gumbel-match")
PROMPTS = ("abc", "bca", "cab", "fed", "d", "ef")


@pytest.fixture
def pair(models: ModelStore) -> tuple[Path, Path]:
    """Two tables whose rows are all alike, so that closed forms are the same at every position."""
    return models.table_directory(iid_table(TARGET)), models.table_directory(iid_table(DRAFT))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return path


def compare(pair: tuple[Path, Path], prompts: Path, *more: object, **options: Any) -> Outcome:
    words = ["compare", "-m", pair[0], "--draft-model", pair[1], "--prompts", prompts]
    return mlxgen_here(*words, *more, **options)


def without_timing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_timing(item) for key, item in value.items() if key != "timing"}
    return [without_timing(item) for item in value] if isinstance(value, list) else value


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {arm["name"]: arm for arm in document["arms"]}


# What is reported


def gumbel_form(p: FloatArray, q: FloatArray) -> float:
    """P(argmax agrees) under shared noise: sum over x of 1 / sum over y of the larger ratio."""
    return float(sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(len(p))))


def test_closed_forms_and_acceptance_on_exact_tables(
    pair: tuple[Path, Path], prompts: Path
) -> None:
    temperature = 1.2
    p, q = softmax(np.array(TARGET) / temperature), softmax(np.array(DRAFT) / temperature)
    sum_min, sum_prod, gumbel = np.minimum(p, q).sum(), (p * q).sum(), gumbel_form(p, q)
    words = ("--arms", ",".join(RULES), "-n", 36, "-t", temperature, "--json")
    document = compare(pair, prompts, *words).document
    arms = by_name(document)
    expected = {"sampler-match": sum_prod, "stochastic": sum_min, "gumbel-match": gumbel}
    for name, arm in arms.items():
        theory, acceptance = arm["theory"], arm["acceptance"]
        assert arm["rule"] == name
        assert theory["closed_form_sum_min"] == pytest.approx(sum_min, abs=1e-4)
        assert theory["closed_form_sum_prod"] == pytest.approx(sum_prod, abs=1e-4)
        assert theory["closed_form_gumbel"] == pytest.approx(gumbel, abs=1e-4)
        assert abs(theory["z"]) < 4 and theory["is_consistent"] and theory["repeats_timed"]
        # One seed, so the repeated runs are all runs.
        assert theory["positions_tested"] == acceptance["positions_tested"] > 100
        assert theory["acceptance"] == acceptance["per_position_acceptance"]
        if name in expected:
            a, tested = expected[name], theory["positions_tested"]
            assert theory["closed_form"] == pytest.approx(a, abs=1e-4)
            standard_error = (a * (1 - a) / tested) ** 0.5
            assert abs(acceptance["per_position_acceptance"] - a) < 4 * standard_error
            assert theory["standard_error"] == pytest.approx(standard_error, rel=1e-3)
    (bound,) = document["bounds"]
    assert bound["ratio"] == pytest.approx(sum_min / sum_prod, rel=1e-4)
    assert bound["arms"] == list(RULES)


def test_counts_of_an_arm_hang_together(pair: tuple[Path, Path], prompts: Path) -> None:
    run = compare(pair, prompts, "-n", 9, "--seeds", 2, "--json")
    document, arms = run.document, by_name(run.document)
    assert document["complete"] and document["settings"]["seeds"] == 2
    assert document["planned_runs"] == document["runs"] == 5 * 6 * 2 + 4 * 6
    assert arms["plain"]["rule"] == "plain" and arms["plain"]["tokens_per_forward"] == 1.0
    assert arms["plain"]["acceptance"] is None and arms["plain"]["theory"] is None
    for name in RULES:
        arm = arms[name]
        acceptance, tokens = arm["acceptance"], arm["tokens"]
        assert tokens == 12 * 9 and arm["theory"]["runs"] == 6
        # Each run begins with one plain token, and may end with one.
        rounds, accepted = acceptance["rounds"], acceptance["accepted"]
        plain_tokens = tokens - rounds - accepted
        assert 12 <= plain_tokens <= 24
        assert arm["tokens_per_forward"] == pytest.approx(tokens / (rounds + plain_tokens))
        assert acceptance["mean_accepted_len"] == pytest.approx(accepted / rounds)
        assert sum(acceptance["tested_by_offset"]) == acceptance["positions_tested"]
        assert sum(acceptance["accepted_by_offset"]) == accepted
        assert len(acceptance["tested_by_offset"]) == 3
    # Rules that match the target's own draws write what plain decoding writes.
    assert document["text_groups"] == [["plain", "sampler-match", "gumbel-match"]]


def test_two_identical_arms(pair: tuple[Path, Path], prompts: Path) -> None:
    words = ("--arm", "block", "--arm", "block,name=again", "-n", 12, "--json")
    document = compare(pair, prompts, *words).document
    first, second = document["arms"]
    assert document["text_groups"] == [["block", "again"]]
    assert first["acceptance"] == second["acceptance"] and first["theory"] == second["theory"]
    (timing,) = (found["timing"] for found in document["pairs"])
    covers = timing["interval"]["low"] <= 1 <= timing["interval"]["high"]
    assert (timing["verdict"] == "no difference shown") == covers
    assert 1 / 3 < timing["ratio"] < 3


def test_arms_with_settings_of_their_own(pair: tuple[Path, Path], prompts: Path) -> None:
    arms = [
        "stochastic,k=5,temp=1.5",
        "sampler-match,draft-temp=0",
        "block,k=auto",
        "sampler-match,lookup,k=0",
        "gumbel-match,lookup",
        "stochastic,temp=0",
    ]
    words = [word for spec in arms for word in ("--arm", spec)]
    found = by_name(compare(pair, prompts, *words, "-n", 10, "--json").document)
    assert list(found) == arms
    hot = found["stochastic,k=5,temp=1.5"]
    assert hot["settings"]["num_draft_tokens"] == 5 and hot["settings"]["temperature"] == 1.5
    assert len(hot["acceptance"]["tested_by_offset"]) == 5
    top = found["sampler-match,draft-temp=0"]["theory"]
    p, q = softmax(np.array(TARGET) / 0.7), np.array(DRAFT)
    assert top["closed_form"] == pytest.approx(p[q.argmax()], abs=1e-4)
    assert found["block,k=auto"]["settings"]["num_draft_tokens"] == "auto"
    assert found["stochastic,temp=0"]["rule"] == "greedy-argmax"
    assert found["gumbel-match,lookup"]["settings"]["prompt_lookup"]


def test_streams_of_a_run_for_people(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    run = compare(pair, prompts, "--arms", "plain,stochastic,block", "-n", 8)
    assert run.code == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith("sum_min / sum_prod = "), "it comes before any speed"
    assert any(line.startswith("arm ") and "closed form" in line for line in lines)
    assert any(line.startswith("arm ") and "ratio to plain" in line for line in lines)
    assert [line.split()[0] for line in lines if line.startswith(("stochastic ", "block "))] == [
        "stochastic",
        "block",
    ] * 2
    assert run.stderr.splitlines()[-1].endswith("runs to make")
    assert "\x1b" not in run.stderr + run.stdout, "no bar and no colour away from a terminal"


def test_a_terminal_gets_tables(pair: tuple[Path, Path], prompts: Path) -> None:
    run = compare(pair, prompts, "--arms", "plain,block", "-n", 8, is_terminal=True)
    assert run.code == 0, run.stderr
    assert "───" in run.stdout and "no difference shown" not in run.stderr


def test_files_are_written(pair: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"result.{name}" for name in ("csv", "svg", "html")}
    words = [word for name, path in files.items() for word in (f"--{name}", path)]
    run = compare(pair, prompts, "--arms", "plain,block", "-n", 8, *words, "--json")
    assert run.document["complete"]
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert [row["arm"] for row in rows] == ["plain", "block"]
    ElementTree.fromstring(files["svg"].read_text())
    assert "<svg" in files["html"].read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that only Linux has")
def test_a_file_that_cannot_be_written_costs_that_file_alone(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    svg = tmp_path / "result.svg"
    words = ["--csv", "/dev/full", "--svg", svg, "--json"]
    run = compare(pair, prompts, "--arms", "plain,block", "-n", 8, *words)
    assert run.code == 1 and json.loads(run.out)["complete"]
    told = run.stderr.splitlines()[-1]
    assert told == "mlxgen: error: cannot write /dev/full: No space left on device"
    ElementTree.fromstring(svg.read_text())


def test_the_command_is_told_without_where_results_go(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    words = ("--arms", "plain,block", "--arm", "stochastic,k=2", "-n", 4, "--num-prompts", 2)
    files = ("--csv", tmp_path / "x.csv", "--resume", tmp_path / "j.jsonl", "--json")
    document = compare(pair, prompts, *words, *files).document
    assert document["command"] == (
        f"mlxgen compare -m {pair[0]} --draft-model {pair[1]} --arms plain,block "
        f"--arm stochastic,k=2 --prompts {prompts} --num-prompts 2 -n 4"
    )
    assert document["settings"]["prompts"] == 2
    assert {found["timing"]["verdict"] for found in document["pairs"]} == {"no interval"}


# Interrupted and resumed


SMALL = ("--arms", "plain,stochastic,block", "--seeds", 2, "-n", 8, "--json")


def test_cut_at_random_it_ends_in_the_same_document(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.jsonl"
    whole = compare(pair, prompts, *SMALL, "--resume", journal)
    data = journal.read_bytes()
    draws = random.Random(1)
    for length in [0, data.index(b"\n") + 1, *(draws.randrange(len(data)) for _ in range(3))]:
        journal.write_bytes(data[:length])
        resumed = compare(pair, prompts, *SMALL, "--resume", journal)
        assert without_timing(resumed.document) == without_timing(whole.document)
        assert journal.read_bytes().count(b"\n") == data.count(b"\n")
    # Nothing is left to do, so no model is loaded, and the times are those of the journal.
    again = compare(pair, prompts, *SMALL, "--resume", journal)
    assert again.document == resumed.document
    assert "Loading" not in again.stderr and "holds 48 of 48 runs" in again.stderr


def test_interruption_keeps_what_is_done_and_says_how_to_go_on(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    journal, made = tmp_path / "journal.jsonl", 0
    generate = generation.generate

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made > 3 + 8:  # after the warm-up
            raise KeyboardInterrupt
        return generate(*arguments, **options)

    with mock.patch.object(running, "generate", interrupted):
        run = compare(pair, prompts, *SMALL, "--resume", journal)
    assert run.code == 130
    assert f"interrupted after 8 of 48 runs, which {journal} holds; the same command" in run.stderr
    document = run.document
    assert not document["complete"] and [arm["runs"] for arm in document["arms"]] == [2, 2, 2]
    resumed = compare(pair, prompts, *SMALL, "--resume", journal).document
    whole = compare(pair, prompts, *SMALL).document
    assert resumed["complete"] and without_timing(resumed) == without_timing(whole)


def test_interrupted_at_once_the_document_is_valid_still(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    svg = tmp_path / "x.svg"
    with mock.patch.object(running, "generate", side_effect=KeyboardInterrupt):
        run = compare(pair, prompts, *SMALL, "--svg", svg)
    assert run.code == 130 and run.document["prompts"] == 0 and not svg.exists()
    assert "--resume FILE would have kept them" in run.stderr


@pytest.mark.slow
def test_killed_at_random_it_ends_in_the_same_document(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    journal, draws = tmp_path / "journal.jsonl", random.Random(2)
    words: list[object] = ["compare", "-m", pair[0], "--draft-model", pair[1]]
    words += ["--prompts", prompts, *SMALL]
    done = -1
    for how in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
        process = subprocess.Popen(
            command_line(*words, "--resume", journal),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        wanted = done + draws.randrange(3, 12)
        deadline = time.monotonic() + 60
        while lines_of(journal) <= wanted:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(0.02 * draws.random())
        process.send_signal(how)
        out, err = process.communicate(timeout=60)
        assert process.returncode == (130 if how is signal.SIGINT else -how), err
        if how is signal.SIGINT:
            assert not json.loads(out)["complete"] and b"goes on from there" in err
        assert lines_of(journal) > done, "at most the run in flight is lost"
        done = lines_of(journal)
    resumed = mlxgen_here(*words, "--resume", journal).document
    whole = mlxgen_here(*words).document
    assert resumed["complete"] and without_timing(resumed) == without_timing(whole)


def lines_of(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


# Mistakes

M = ("-m", "{model}", "--draft-model", "{model}")
LIGHT: dict[tuple[str, ...], str] = {
    (*M, "--prompts", "{empty}"): "--prompts {empty} holds no prompt",
    (*M, "--prompts", "{broken}"): "--prompts {broken}, line 2: not JSON: ",
    (*M, "--prompts", "{tmp}/nowhere"): "--prompts {tmp}/nowhere: No such file",
    (*M, "--arms", "plain,typical"): "--arms does not know 'typical'",
    (*M, "--arms", "plain,plain"): "arm 'plain' is there twice",
    (*M, "--arm", "typical,k=2"): "arm 'typical,k=2': 'typical' is no rule",
    (*M, "--arm", "block", "--arm", "block,k=3"): "'block' and 'block,k=3' are one and the same",
    (*M, "--arm", "block,depth=3"): "arm 'block,depth=3': 'depth=3' is not known",
    (*M, "--arm", "block,k=x"): "k must be a whole number or auto",
    (*M, "-t", "0"): "at temperature 0 all rules are one and the same",
    (*M, "-t", "-1"): "--temp must be a finite number of at least 0",
    (*M, "--seeds", "0"): "--seeds must be at least 1",
    (*M, "--seeds", "2", "--theory-seeds", "3"): "--theory-seeds must be between 0 and",
    (*M, "--seed", "x"): "--seed must be a whole number",
    (*M, "--seed", "-1"): "--seed must be between 0 and",
    (*M, "--seed", "18446744073709551615"): "--seed 18446744073709551615 leaves no room",
    (*M, "-n", "1"): "--max-tokens must be at least 2",
    (*M, "--num-prompts", "41"): "--num-prompts must be between 1 and 40",
    (*M, "--num-draft-tokens", "x"): "--num-draft-tokens must be",
    (*M, "--csv", "{tmp}/no/x.csv"): "--csv {tmp}/no/x.csv: no such directory: {tmp}/no",
    (*M, "--svg", "{tmp}"): "--svg {tmp}: is a directory",
    (*M, "--resume", "{empty}.d/j"): "--resume {empty}.d/j: No such file or directory",
    (*M, "--resume", "{broken}"): "--resume {broken}: exists and is not a journal",
    ("-m", "{model}"): "arm 'sampler-match' needs --draft-model",
    ("-m", "./x", "--draft-model", "{model}"): "-m ./x: no such directory",
    ("-m", "{model}", "--draft-model", "./x"): "--draft-model ./x: no such directory",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    tmp = tmp_path_factory.mktemp("places")
    (tmp / "empty.txt").touch()
    (tmp / "broken.jsonl").write_text('"a"\n{"prompt": \n', encoding="utf-8")
    model = write_table_model(tmp / "model", iid_table(TARGET))
    found = {"tmp": tmp, "empty": tmp / "empty.txt", "broken": tmp / "broken.jsonl", "model": model}
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="module")
def outcomes(places: dict[str, str]) -> dict[tuple[str, ...], tuple[Outcome, list[str]]]:
    """All of them, run in one process, with the heavy modules that were loaded by then."""
    requests = [Request(("compare", *(word.format(**places) for word in words))) for words in LIGHT]
    return dict(zip(LIGHT, run_all(requests), strict=True))


@pytest.mark.parametrize("words", LIGHT, ids=" ".join)
def test_mistake_is_one_line_and_exit_2_without_loading_mlx(
    outcomes: dict[tuple[str, ...], tuple[Outcome, list[str]]],
    places: dict[str, str],
    words: tuple[str, ...],
) -> None:
    run, heavy = outcomes[words]
    assert run.code == 2, run.stderr
    assert run.stderr.count("\n") == 1, run.stderr
    assert LIGHT[words].format(**places) in run.error
    assert heavy == []


def test_resuming_another_comparison_is_refused_with_the_difference(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.jsonl"
    words = ("--arms", "plain,block", "--resume", journal)
    assert compare(pair, prompts, *words, "-n", 4).code == 0
    before = journal.read_bytes()
    run = compare(pair, prompts, *words, "-n", 5)
    assert run.code == 2 and "max_tokens is 4 there and 5 here" in run.error
    assert compare((pair[0], pair[0]), prompts, *words, "-n", 4).code == 2
    assert journal.read_bytes() == before


def test_prompt_that_cannot_be_encoded_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('"abc"\n{"id": "odd", "prompt": "XYZ"}\n', encoding="utf-8")
    run = compare(pair, path, "--arms", "plain,block")
    assert run.code == 2
    assert "prompt 'odd': the prompt holds nothing that this model's" in run.stderr.splitlines()[-1]
