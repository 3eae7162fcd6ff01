"""A comparison as one self-contained page: the picture, the tables, and how to get it again."""

from __future__ import annotations

from html import escape

from mlxgen.report.experiment import Report
from mlxgen.report.experiment_picture import WIDTH_PX, picture
from mlxgen.report.experiment_tables import (
    TextTable,
    acceptance_table,
    bound_lines,
    speed_table,
    verdict_lines,
)

_STYLE = f"""
:root {{ color-scheme: light dark; }}
body {{ max-width: {WIDTH_PX}px; margin: 1.5rem auto; padding: 0 1rem; line-height: 1.5;
  font: 15px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif;
  background: #ffffff; color: #1b1f24; }}
svg {{ width: 100%; height: auto; }}
h1 {{ font-size: 1.3rem; }} h2 {{ font-size: 1rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 12px; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .45rem; border-bottom: 1px solid #dfe3e8; text-align: right;
  white-space: nowrap; }}
th, th.text, td.text {{ white-space: normal; }}
th.text, td.text {{ text-align: left; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #0d1117; color: #e8edf2; }}
  th, td {{ border-color: #2a313a; }}
}}
"""


def page(report: Report) -> str:
    """The whole HTML document."""
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    facts = f"{report.device}; {machine.processor}, {machine.cores} cores; {machine.system}"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<title>mlxgen compare</title>",
            f"<style>{_STYLE}</style>",
            "<h1>Acceptance and speed by arm</h1>",
            *_paragraphs(bound_lines(report)),
            picture(report),
            *_table(acceptance_table(report)),
            *_table(speed_table(report)),
            *_paragraphs(verdict_lines(report)),
            "<h2>How to get it again</h2>",
            f"<pre>{escape(report.command)}</pre>",
            f"<p>{escape(facts)}<br>{escape(versions)}</p>",
            "</html>",
            "",
        ]
    )


def _paragraphs(lines: list[str]) -> list[str]:
    return [f"<p>{escape(line)}</p>" for line in lines]


def _table(table: TextTable) -> list[str]:
    if not table.rows:
        return []
    marks = ["" if column.is_number else ' class="text"' for column in table.columns]
    titles = [column.title for column in table.columns]

    def row(cells: list[str], tag: str) -> str:
        filled = (
            f"<{tag}{mark}>{escape(cell)}</{tag}>" for cell, mark in zip(cells, marks, strict=True)
        )
        return f"<tr>{''.join(filled)}</tr>"

    body = [row(list(cells), "td") for cells in table.rows]
    notes = _paragraphs(list(table.notes))
    title = f"<h2>{escape(table.title)}</h2>"
    return [title, '<div class="wide"><table>', row(titles, "th"), *body, "</table></div>", *notes]
