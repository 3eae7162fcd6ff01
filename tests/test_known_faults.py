"""docs/known-faults.md names tests that exist, for every fault that it lists."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "known-faults.md"
_ROW = re.compile(r"\| (?P<id>\d+) \| (?P<source>[^|]+) \| (?P<fault>[^|]+) \| (?P<held>[^|]*) \|")
_TEST = re.compile(r"`(?P<path>tests/[\w/]+\.py)::(?P<name>\w+)`")
_REASON = "does not apply: "
_FEWEST_WORDS = 5


@dataclass(frozen=True)
class Row:
    """A line of the table. tests: (path, name) of each; reason: why there is none."""

    id: int
    fault: str
    tests: tuple[tuple[str, str], ...]
    reason: str


def read_rows(page: str) -> list[Row]:
    """The rows of the table. Raises `ValueError` for a line that looks like one and is none."""
    rows = []
    for line in page.splitlines():
        if not re.match(r"\|\s*\d", line):
            continue
        row = _ROW.fullmatch(line)
        if row is None:
            raise ValueError(f"not a row: {line}")
        held = row["held"]
        tests = tuple((test["path"], test["name"]) for test in _TEST.finditer(held))
        rest = _TEST.sub("", held).strip(" ,")
        if rest and not rest.startswith(_REASON):
            raise ValueError(f"neither a test nor a reason: {rest}")
        rows.append(Row(int(row["id"]), row["fault"], tests, rest.removeprefix(_REASON)))
    return rows


@cache
def functions_of(path: str) -> frozenset[str]:
    """Names of the functions at the top of a file; none where there is no such file."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))


def complaints(page: str) -> list[str]:
    """What is wrong with a page, one line each."""
    rows = read_rows(page)
    ids = [row.id for row in rows]
    found = [f"{number} stands twice" for number in sorted(set(ids)) if ids.count(number) > 1]
    for row in rows:
        if not row.tests and len(row.reason.split()) < _FEWEST_WORDS:
            found.append(f"{row.id} has neither a test nor a reason")
        for path, name in row.tests:
            if not name.startswith("test_") or name not in functions_of(path):
                found.append(f"{row.id} names {path}::{name}, which does not exist")
    return found


def test_every_fault_is_held_by_a_test_that_exists_or_has_a_reason() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert complaints(page) == []
    assert len(read_rows(page)) > 80


HERE = "`tests/test_known_faults.py::{}`"
RIGHT = f"| 1 | a/b#2 | A fault | {HERE.format('test_the_check_rejects_a_wrong_table')} |"


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["| 1 | a#2 | A fault | `tests/test_loop.py::test_of_nothing` |"], "does not exist"),
        (["| 1 | a#2 | A fault | `tests/test_of_nothing.py::test_a` |"], "does not exist"),
        ([f"| 1 | a#2 | A fault | {HERE.format('read_rows')} |"], "does not exist"),
        (["| 1 | a#2 | A fault |  |"], "neither a test nor a reason"),
        (["| 1 | a#2 | A fault | does not apply: no |"], "neither a test nor a reason"),
        ([RIGHT, RIGHT], "1 stands twice"),
    ],
)
def test_the_check_rejects_a_wrong_table(lines: list[str], complaint: str) -> None:
    (found,) = complaints("\n".join(lines))
    assert complaint in found


@pytest.mark.parametrize(
    "line", ["| 1 | a#2 | A fault |", "| 1 | a#2 | A fault | looked at by hand |"]
)
def test_a_line_that_cannot_be_read_is_no_row_that_is_missed(line: str) -> None:
    with pytest.raises(ValueError, match=r"not a row|neither a test nor a reason"):
        complaints(line)


def test_the_check_allows_what_is_right() -> None:
    reason = "| 2 | a#3 | Another | does not apply: there is no such thing in this program |"
    assert complaints(f"{RIGHT}\n{reason}") == []
