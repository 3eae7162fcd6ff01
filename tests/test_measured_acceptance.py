"""Acceptance on the default pair: closed forms over pinned text, and the script that measures."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxgen.cache.cached_model import CachedModel
from mlxgen.config import AcceptRule, SamplingConfig
from mlxgen.models import default_pair
from mlxgen.models.loading import LoadedModel, load
from mlxgen.sampling.chain import SamplerChain, probabilities
from mlxgen.speculative import closed_forms
from mlxgen.text.prompt import encode_prompt
from tests.fixtures.model_directories import iid_table
from tests.fixtures.runs import ModelStore
from tests.fixtures.statistics import FloatArray

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ROOT / "tests" / "fixtures" / "target_texts.json"
"""Text that the default target sampled, with the command that made it."""


# Closed forms of the default pair


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedModel, LoadedModel]:
    """Target and draft."""
    if not default_pair.is_ready():
        pytest.fail(f"{default_pair.target_directory()} is missing: run `make pair` first")
    target = load(str(default_pair.target_directory()))
    return target, load(str(default_pair.draft_directory()), role="draft")


def forms_along(
    pair: tuple[LoadedModel, LoadedModel], text: dict[str, Any]
) -> dict[str, FloatArray]:
    """Closed forms at every position of a pinned text, one forward a model."""
    target, draft = pair
    width = target.drawable_ids
    chain = SamplerChain(SamplingConfig(temperature=text["temperature"]), width)
    ids = [*encode_prompt(target.tokenizer, text["prompt"]), *text["token_ids"]]
    count = len(text["token_ids"])
    rows = []
    for model, role in ((target, "target"), (draft, "draft")):
        cached = CachedModel(model.model, role=role, width=width)
        logits = cached.forward(mx.array(ids[:-1], dtype=mx.int32))[-count:]
        rows.append(probabilities(chain.weights(logits, chain.new_history([])).rows))
    p, q = rows
    forms = {
        "sum_min": closed_forms.sum_min(p, q),
        "sum_prod": closed_forms.sum_prod(p, q),
        "gumbel": closed_forms.gumbel_overlap(p, q),
    }
    return {name: np.array(form).astype(np.float64) for name, form in forms.items()}


def stated(row: str) -> dict[float, float]:
    """A row of the draft's README, by temperature."""
    page = (default_pair.draft_directory() / "README.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith(f"| {row}"))
    one, seven_tenths = (float(cell) for cell in line.split("|")[2:4])
    return {1.0: one, 0.7: seven_tenths}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_closed_forms_of_the_default_pair_are_near_those_in_its_readme(
    pair: tuple[LoadedModel, LoadedModel], temperature: float
) -> None:
    """Five prompts, 757 and 800 positions of text sampled at the temperature: within 0.05.

    The standard error over positions is 0.013 at most, but positions of one text are alike, and
    both figures are means over few texts.
    """
    texts = json.loads(TEXTS.read_text(encoding="utf-8"))["texts"]
    along = [forms_along(pair, text) for text in texts if text["temperature"] == temperature]
    assert len(along) == 5
    for name, row in (("sum_min", "sum of min(p, q)"), ("sum_prod", "sum of p q")):
        values = np.concatenate([forms[name] for forms in along])
        assert len(values) > 600
        assert values.std() / math.sqrt(len(values)) < 0.0175
        assert abs(values.mean() - stated(row)[temperature]) < 0.05, (name, values.mean())


@pytest.mark.slow
def test_closed_forms_of_the_default_pair_keep_their_order(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    """At every position of a text: sum p q <= Gumbel form <= sum min(p, q), over 49,152 tokens."""
    texts = json.loads(TEXTS.read_text(encoding="utf-8"))["texts"]
    forms = forms_along(pair, texts[3])
    assert (forms["sum_prod"] <= forms["gumbel"] + 1e-5).all()
    assert (forms["gumbel"] <= forms["sum_min"] + 1e-5).all()
    distance = 1 - forms["sum_min"]
    assert (forms["gumbel"] >= (1 - distance) / (1 + distance) - 1e-5).all()


def test_pinned_texts_say_where_they_come_from() -> None:
    document = json.loads(TEXTS.read_text(encoding="utf-8"))
    assert document["made_by"].startswith("mlxgen generate ")
    for temperature in (0.7, 1.0):
        texts = [text for text in document["texts"] if text["temperature"] == temperature]
        assert [text["seed"] for text in texts] == [1, 2, 3, 4, 5]
        assert tuple(text["prompt"] for text in texts) == script().PROMPTS


# The script


def script() -> ModuleType:
    """Import the script, which lies outside the package."""
    name = "measure_acceptance"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


ROW = re.compile(
    r"\| (0\.7|1\.0) \| (`[a-z-]+`(?:, `--draft-temp 0`)?) \| (\d+) \| (\d+) \| (\d\.\d{4}) "
    r"\| (\d\.\d{4}|-) \| (\d\.\d{4}) \| (\d\.\d{4}|-) \| (-?\d+\.\d\d) \|"
)


@pytest.mark.slow
def test_the_table_has_what_the_runs_counted(models: ModelStore) -> None:
    measure = script()
    rng = np.random.default_rng(2)
    target, draft = (
        load(str(models.table_directory(iid_table(rng.normal(size=8).tolist())))) for _ in range(2)
    )
    seen: list[str] = []
    rows = measure.measure(target, draft, ["a", "b"], 20, 4, seen.append)
    text = measure.report(rows, ["a", "b"], 20, 4)
    assert "--prompts 2 --tokens 20 --seed 4" in text and "1. a\n2. b\n" in text
    assert re.search(r"\d+ CPU cores.*, mlx \d+\.\d+", text)
    table = [ROW.fullmatch(line) for line in text.splitlines()[-10:]]
    assert len(seen) == len(rows) == 10 and all(table)
    for row, found in zip(rows, table, strict=True):
        assert found is not None
        cells = found.groups()
        assert int(cells[2]) == sum(run.rounds for run in row.runs)
        assert int(cells[3]) == sum(run.positions_tested for run in row.runs)
        accepted = sum(run.accepted for run in row.runs)
        assert float(cells[4]) == pytest.approx(accepted / int(cells[3]), abs=1e-4)
        assert float(cells[6]) == pytest.approx(accepted / int(cells[2]), abs=1e-4)
        is_block = row.arm.rule is AcceptRule.BLOCK
        expected = sum(run.check.expected for run in row.runs)
        theory, count = (cells[7], cells[2]) if is_block else (cells[5], cells[3])
        assert float(theory) == pytest.approx(expected / int(count), abs=1e-4)
        assert (cells[5] == "-") == is_block and (cells[7] == "-") == (not is_block)
        assert abs(float(cells[8])) < 4.9


def test_the_table_goes_between_its_markers_and_replaces_what_was_there() -> None:
    measure = script()
    page = f"before\n{measure.BEGIN}\nold\n{measure.END}\nafter\n"
    once = measure.placed(page, "new")
    assert once == f"before\n{measure.BEGIN}\nnew\n{measure.END}\nafter\n"
    assert measure.placed(once, "new") == once
    for broken in ("no markers", measure.BEGIN, measure.END + measure.BEGIN):
        with pytest.raises(ValueError, match="measured:begin"):
            measure.placed(broken, "new")


def test_the_page_holds_a_table_that_a_run_printed() -> None:
    measure = script()
    page = measure.PAGE.read_text(encoding="utf-8")
    between = page.partition(measure.BEGIN)[2].partition(measure.END)[0]
    assert "Printed by `python scripts/measure_acceptance.py" in between
    assert re.search(r"mlx \d+\.\d+", between) and "CPU cores" in between
    rows = [match.groups() for line in between.splitlines() if (match := ROW.fullmatch(line))]
    labels = [arm.label for arm in measure.ARMS]
    assert [row[:2] for row in rows] == [(t, label) for t in ("0.7", "1.0") for label in labels]
    assert all(abs(float(row[8])) < 4.9 for row in rows)


def test_the_script_needs_the_default_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLXGEN_CACHE", str(tmp_path))
    assert script().main(["--show"]) == 1
    assert capsys.readouterr().err == "error: the default pair is not set up: run `make pair`\n"
