"""The journal: nothing finished is lost, nothing foreign is taken up or written over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxgen.errors import InputError
from mlxgen.experiment.journal import open_journal
from mlxgen.experiment.plan import Experiment
from mlxgen.experiment.records import RunRecord
from tests.experiment.experiments import experiment, records

PLANNED = experiment(prompts=2, seeds=1)
RUNS = records(PLANNED)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A journal that holds the first three runs."""
    path = tmp_path / "journal.jsonl"
    with open_journal(str(path), PLANNED) as opened:
        assert opened.records == []
        for run in RUNS[:3]:
            opened.append(run)
    return path


def held(path: Path, planned: Experiment = PLANNED) -> list[RunRecord]:
    with open_journal(str(path), planned) as opened:
        return opened.records


def test_runs_come_back_and_more_follow(journal: Path) -> None:
    with open_journal(str(journal), PLANNED) as opened:
        assert opened.records == RUNS[:3]
        opened.append(RUNS[3])
    assert held(journal) == RUNS[:4]
    assert len(journal.read_text().splitlines()) == 5


def test_a_run_is_in_the_file_before_the_next_one_starts(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with open_journal(str(path), PLANNED) as opened:
        for count, run in enumerate(RUNS, start=1):
            opened.append(run)
            assert path.read_bytes().count(b"\n") == count + 1


def test_cut_anywhere_it_keeps_the_whole_lines_and_goes_on(journal: Path) -> None:
    data = journal.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    near = {end + step for end in ends for step in (-2, -1, 0, 1) if end + step < len(data)}
    for length in sorted({*range(0, len(data), 173), *near}):
        journal.write_bytes(data[:length])
        whole = max(sum(end <= length for end in ends) - 1, 0)
        with open_journal(str(journal), PLANNED) as opened:
            assert opened.records == RUNS[:whole]
            opened.append(RUNS[whole])
        assert held(journal) == RUNS[: whole + 1]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (experiment(prompts=2, seeds=1, max_tokens=64), "max_tokens is 32 there and 64 here"),
        (experiment(prompts=3, seeds=1), "prompts count is 2 there and 3 here"),
        (experiment(prompts=2, seeds=2), "seeds is 1 there and 2 here"),
        (
            experiment(
                "plain,sampler-match,stochastic", ["block,k=5,name=block"], prompts=2, seeds=1
            ),
            "arms 4 num_draft_tokens is 3 there and 5 here",
        ),
        (experiment("plain,block", prompts=2, seeds=1), "arms is [{"),
    ],
)
def test_a_journal_of_another_experiment_is_refused(
    journal: Path, other: Experiment, difference: str
) -> None:
    before = journal.read_bytes()
    with pytest.raises(InputError, match="belongs to another comparison: ") as caught:
        held(journal, other)
    assert difference in str(caught.value) and "\n" not in str(caught.value)
    assert journal.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    ["notes", "notes\n", "{}\n", "[1]\n", '{"format": "another"}\n', "\n", '{"format": "mlxgen'],
)
def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    if content == '{"format": "mlxgen':
        assert held(path) == [], "this is how a journal begins"
        return
    with pytest.raises(InputError, match="exists and is not a journal of a comparison"):
        held(path)
    assert path.read_text() == content


@pytest.mark.parametrize(
    "line", ["{", "{}", "3", '{"phase": "speed"}', json.dumps({**RUNS[0].as_json(), "more": 1})]
)
def test_a_line_that_cannot_be_read_is_named(journal: Path, line: str) -> None:
    lines = journal.read_text().splitlines()
    lines[2] = line
    journal.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=f"--resume {journal}, line 3: not a run of a comparison"):
        held(journal)


def test_a_run_that_is_there_twice_counts_once(journal: Path) -> None:
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines, lines[1]]) + "\n")
    assert held(journal) == RUNS[:3]


def test_two_processes_do_not_write_to_one_journal(journal: Path) -> None:
    with (
        open_journal(str(journal), PLANNED),
        pytest.raises(InputError, match="another process is writing to it"),
        open_journal(str(journal), PLANNED),
    ):
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--resume .*nowhere.*: No such file or directory"):
        held(tmp_path / "nowhere" / "journal.jsonl")
    with pytest.raises(InputError, match="Is a directory"):
        held(tmp_path)
