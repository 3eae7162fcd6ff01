"""Write a page of docs/benchmark_results from what `mlxgen compare --json` printed.

python scripts/write_benchmark_results.py cpu-0.7.json cpu-1.0.json --hardware "AMD EPYC, 2 cores"
python scripts/write_benchmark_results.py gpu.json --hardware "NVIDIA H200" --note "A remark."

A file is saved standard output: its last line is the document. Pages are named
chain-speculative-acceptance-<hardware>-<date>.md, with a picture for each file beside them. Every
number is of the files; nothing is measured here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any

from mlxgen.errors import InputError
from mlxgen.report.experiment import Report, read_report
from mlxgen.report.experiment_picture import picture
from mlxgen.report.experiment_tables import (
    acceptance_table,
    bound_lines,
    speed_table,
    verdict_lines,
    warnings_of,
)

DIRECTORY = Path(__file__).resolve().parent.parent / "docs" / "benchmark_results"


def read_result(path: Path) -> Report:
    """The report in a file's last line. Raises `InputError` naming the file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        document: Any = json.loads(next(line for line in reversed(lines) if line.strip()))
    except (OSError, ValueError, StopIteration) as error:
        raise InputError(f"{path}: no document of `mlxgen compare --json`: {error}") from error
    try:
        return read_report(document)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def page_name(hardware: str, date: datetime.date) -> str:
    """The page's name without its ending."""
    slug = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")
    return f"chain-speculative-acceptance-{slug}-{date.isoformat()}"


def page(
    reports: list[Report], hardware: str, date: datetime.date, notes: list[str], pictures: list[str]
) -> str:
    """The page in Markdown. pictures: a file name for each report."""
    lines = [
        f"# Chain speculative acceptance: {hardware}, {date.isoformat()}",
        "",
        "Written by `scripts/write_benchmark_results.py` from real runs of `mlxgen compare`, each "
        "with the command that makes it. How to read it: [compare.md](../compare.md).",
        "",
    ]
    for note in notes:
        lines += [note, ""]
    for report, name in zip(reports, pictures, strict=True):
        lines += _section(report, name)
    return "\n".join(lines)


def _section(report: Report, picture_name: str) -> list[str]:
    machine, settings = report.machine, report.settings
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    pair = " with ".join(f"`{name}`" for name in report.models.values())
    temperatures = sorted({arm.settings["temperature"] for arm in report.comparison.arms})
    heading = ", ".join(f"{temperature:g}" for temperature in temperatures)
    tables: list[str] = []
    for table in (acceptance_table(report), speed_table(report)):
        if table.rows:
            notes = [line for note in table.notes for line in (note, "")]
            tables += [f"{table.title}:", "", *table.markdown(), "", *notes]
    return [
        f"## {' with '.join(report.models.values())}, temperature {heading}",
        "",
        "```sh",
        report.command,
        "```",
        "",
        f"- models: {pair}",
        f"- computed on: {report.device}; host {machine.processor}, {machine.cores} cores, "
        f"{machine.system}",
        f"- versions: {versions}",
        f"- runs: {report.comparison.runs}, of {settings['prompts']} prompts, "
        f"{settings['seeds']} seeds each, at most {settings['max_tokens']} tokens",
        *(f"- {line}" for line in bound_lines(report)),
        "",
        f"![Acceptance and speed by arm]({picture_name})",
        "",
        *tables,
        *(f"- {line}" for line in [*verdict_lines(report), *warnings_of(report)]),
        "",
    ]


def main() -> int:
    """Write the page and its pictures; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--hardware", required=True, help="what the runs were made on, for people")
    parser.add_argument(
        "--date", type=datetime.date.fromisoformat, default=datetime.date.today(), help="YYYY-MM-DD"
    )
    parser.add_argument("--note", action="append", default=[], help="a paragraph; repeatable")
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    arguments = parser.parse_args()
    try:
        reports = [read_result(path) for path in arguments.results]
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    name = page_name(arguments.hardware, arguments.date)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    pictures = [f"{name}-{number}.svg" for number in range(1, len(reports) + 1)]
    for report, picture_name in zip(reports, pictures, strict=True):
        (arguments.directory / picture_name).write_text(picture(report), encoding="utf-8")
    path = arguments.directory / f"{name}.md"
    text = page(reports, arguments.hardware, arguments.date, arguments.note, pictures)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
