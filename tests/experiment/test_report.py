"""Document, tables, CSV, picture and page of a comparison."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise

import pytest

from mlxgen.errors import InputError
from mlxgen.report import svg
from mlxgen.report.experiment import Report, read_report
from mlxgen.report.experiment_page import page
from mlxgen.report.experiment_picture import WIDTH_PX, picture
from mlxgen.report.experiment_tables import (
    acceptance_table,
    bound_lines,
    csv_text,
    speed_table,
    verdict_lines,
    warnings_of,
)
from tests.experiment.experiments import experiment, record, records, report

SVG = "{http://www.w3.org/2000/svg}"
ODD = "stochastic,k=16,temp=1.0,draft-temp=0.5,top-p=0.9,lookup,name=<a & b> of a very long name"


@pytest.fixture(scope="module")
def whole() -> Report:
    return report(experiment(specs=[ODD, "block,k=auto"]))


def test_document_is_strict_json_and_reads_back(whole: Report) -> None:
    text = json.dumps(whole.document(), allow_nan=False)
    assert read_report(json.loads(text)) == whole
    assert read_report(json.loads(text)).document() == whole.document()


@pytest.mark.parametrize("document", [None, [], {}, {"format": "other"}])
def test_another_document_is_refused(document: object) -> None:
    with pytest.raises(InputError, match="not the document"):
        read_report(document)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cannot be read"):
        read_report({"format": "mlxgen compare 1"})


def test_what_depends_on_the_clock_stands_under_timing() -> None:
    planned = experiment()
    runs = records(planned)
    slower = [replace(run, decode_ms=run.decode_ms * 3, prefill_ms=9.0) for run in runs]
    first, second = (without_timing(report(planned, r).document()) for r in (runs, slower))
    assert first == second
    assert "tokens_per_s" not in json.dumps(first)


def without_timing(value: object) -> object:
    if isinstance(value, dict):
        return {key: without_timing(item) for key, item in value.items() if key != "timing"}
    return [without_timing(item) for item in value] if isinstance(value, list) else value


def test_tables_have_a_row_for_each_arm_and_line_up(whole: Report) -> None:
    acceptance, speed = acceptance_table(whole), speed_table(whole)
    assert len(acceptance.rows) == 5 and len(speed.rows) == 6
    assert acceptance.rows[1][:6] == ("stochastic", "stochastic", "156", "0.5000", "0.5000", "0.00")
    assert acceptance.notes[1].startswith("block: theory speaks of accepted lengths")
    assert speed.rows[0] == ("plain", "40.00", speed.rows[0][2], "5.0", "1.000", "-", "-")
    title, head, *rows = speed.lines()
    assert "95 %" in title and len({row.index("5.0") for row in rows}) == 1
    assert head.startswith("arm ") and "ratio to plain" in head
    assert speed.markdown()[1].startswith("|---|---:|")


def test_without_repetitions_acceptance_is_of_the_timed_runs() -> None:
    table = acceptance_table(report(experiment(theory_seeds=0)))
    assert table.rows[0][2:6] == ("312", "0.5000", "-", "-") and len(table.notes) == 1
    assert bound_lines(report(experiment(theory_seeds=0))) == []


def test_the_bound_comes_with_both_sums(whole: Report) -> None:
    assert bound_lines(whole)[0].startswith(
        "sum_min / sum_prod = 1.2500 (0.5769 / 0.4615 over 468 positions of sampler-match; "
    )


def test_sentences_say_what_cannot_be_told_apart() -> None:
    planned = experiment("stochastic", ["stochastic,name=again"])
    alike = [replace(run, decode_ms=600.0 + run.key.prompt) for run in records(planned)]
    assert verdict_lines(report(planned, alike)) == [
        "no difference shown: again against stochastic, 1.000 (1.000-1.000)",
        "the same text, token by token: stochastic, again",
    ]
    assert verdict_lines(report(planned))[0] == "every two arms can be told apart"
    (few, _) = verdict_lines(report(experiment("plain,block", prompts=2)))
    assert few == "no intervals: they need 5 prompts, and every arm has run 2"
    part = [record(planned, key) for key in planned.schedule()[:10]]
    assert verdict_lines(report(planned, part))[-1].startswith("incomplete: 10 of 36 runs")


def test_doubts_are_told() -> None:
    planned = experiment("plain,block")
    assert warnings_of(report(planned)) == []
    runs = [replace(run, expected=run.expected / 2) for run in records(planned)]
    assert "disagrees with theory" in warnings_of(report(planned, runs))[0]
    runs = [replace(run, text_sha256="x") if run.sum_min else run for run in records(planned)]
    assert "differ from the timed ones" in warnings_of(report(planned, runs))[0]


def test_csv_has_a_row_for_each_arm(whole: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(whole))))
    assert [row["arm"] for row in rows] == [arm.name for arm in whole.comparison.arms]
    assert rows[0]["rounds"] == "" and float(rows[0]["decode_tokens_per_s"]) == pytest.approx(40)
    assert float(rows[2]["ratio_to_first"]) == pytest.approx(20 / 15)
    assert rows[2]["verdict"] == "faster" and float(rows[2]["closed_form"]) == pytest.approx(0.5)


def test_picture_is_well_formed_and_self_contained(whole: Report) -> None:
    text = picture(whole)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and root.get("width") == str(WIDTH_PX)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|@import|url\(", text)
    assert "prefers-color-scheme:dark" in text
    shown = [node.text or "" for node in root.iter(f"{SVG}text")]
    for title in (
        "Acceptance against its closed form",
        "Tokens a second, decoding",
        "Acceptance by position in the block",
    ):
        assert title in shown
    assert "0.5000, closed form 0.5000" in shown
    assert any("1.33 times (" in text for text in shown)


def test_marks_stand_inside_the_picture_and_texts_do_not_leave_it(whole: Report) -> None:
    root = ElementTree.fromstring(picture(whole))
    height = float(root.get("height", 0))
    for node in root.iter():
        for name, most in (("x", WIDTH_PX), ("cx", WIDTH_PX), ("y", height), ("cy", height)):
            if node.get(name) is not None:
                assert 0 <= float(node.get(name, 0)) <= most
    for node in root.iter(f"{SVG}text"):
        x, width_px = float(node.get("x", 0)), 6.5 * len(node.text or "")
        anchor = node.get("text-anchor")
        start = x - {"start": 0, "middle": width_px / 2, "end": width_px}[anchor or "start"]
        assert start >= 0 and start + width_px <= WIDTH_PX + 1, node.text


def test_rows_of_a_panel_stand_apart(whole: Report) -> None:
    root = ElementTree.fromstring(picture(whole))
    bars = [
        (float(node.get("y", 0)), float(node.get("height", 0)))
        for node in root.iter(f"{SVG}rect")
        if (node.get("class") or "").startswith("bar")
    ]
    assert len(bars) == 6
    assert all(y + height < next_y for (y, height), (next_y, _) in pairwise(bars))


@pytest.mark.parametrize(
    "listed", ["plain", "block", "plain,block", "plain,sampler-match,stochastic,block,gumbel-match"]
)
@pytest.mark.parametrize("theory_seeds", [0, 1])
def test_picture_and_page_cope_with_what_is_missing(listed: str, theory_seeds: int) -> None:
    found = report(experiment(listed, prompts=2, seeds=1, theory_seeds=theory_seeds))
    ElementTree.fromstring(picture(found))
    assert page(found).count("<h2>") >= 2


def test_page_is_escaped_and_holds_picture_tables_and_command(whole: Report) -> None:
    text = page(whole)
    assert "&lt;a &amp; b&gt;" in text and "<a & b>" not in text
    assert text.count("<svg") == 1 and text.count("<table>") == 2
    assert "mlxgen compare -m big --draft-model small" in text
    assert "color-scheme: light dark" in text and "src=" not in text


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.41, 0.63, [0.45, 0.5, 0.55, 0.6]),
        (0, 120, [0, 20, 40, 60, 80, 100, 120]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    scale = svg.Scale(low, high, 0, 100)
    assert scale.ticks() == pytest.approx(ticks)
    assert scale(low) == 0 and scale(high) == 100 and scale(high + 5) == 100


def test_ranges_are_round_and_stay_within_bounds() -> None:
    assert svg.rounded_range([0.5], least_span=0.1, floor=0, ceiling=1) == pytest.approx(
        (0.44, 0.56), abs=0.011
    )
    assert svg.rounded_range([0.99, 1.0], least_span=0.2, floor=0, ceiling=1)[1] == 1
    assert svg.shortened("abcdef", 30, 12) == "abc…" and svg.shortened("abc", 30, 12) == "abc"
