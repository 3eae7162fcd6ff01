"""The shell version of the comparison, and the script that writes pages of results."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mlxgen.errors import InputError
from tests.experiment.experiments import experiment, report
from tests.fixtures.command import ROOT, environment
from tests.fixtures.model_directories import iid_table
from tests.fixtures.runs import ModelStore

SHELL = ROOT / "scripts" / "ab_acceptance.sh"
WRITER = ROOT / "scripts" / "write_benchmark_results.py"


def ab(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    python = Path(sys.executable)
    # Found by its name: MLXGEN is split at blanks, and a checkout may lie below one.
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    program = {"MLXGEN": f"{python.name} -m mlxgen", "PATH": path}
    return subprocess.run(
        [str(SHELL), *map(str, words)],
        env=environment({**program, **variables}),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_shell_version_runs_both_rules_with_its_seeds(models: ModelStore) -> None:
    target = models.table_directory(iid_table([1.0, 0.5, 0.2, 0.1, 0.0, -0.5]))
    draft = models.table_directory(iid_table([0.2, 0.9, 0.2, 0.1, 0.3, -0.5]))
    words = ("-m", target, "--draft-model", draft, "-p", "a", "--temp", 1, "-n", 8)
    run = ab(*words, SEEDS="7")
    assert run.returncode == 0, run.stderr
    rules = [line for line in run.stdout.splitlines() if "] rule=" in line and "rounds=" in line]
    assert [line.split(" (")[0].split(" rounds=")[0] for line in rules] == [
        f"seed=7 [Speculative acceptance] rule={rule}" for rule in ("sampler-match", "stochastic")
    ]
    assert run.stdout.count("closed_form_sum_min=") == 2


def test_shell_version_ends_with_the_first_failure() -> None:
    run = ab("-m", "./nowhere", "-p", "a")
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.count("-m ./nowhere: no such directory") == 1


def test_shell_version_is_short_and_can_be_run() -> None:
    assert os.access(SHELL, os.X_OK)
    assert len(SHELL.read_text(encoding="utf-8").splitlines()) < 40


def writer() -> ModuleType:
    """Import the script, which lies outside the package."""
    spec = importlib.util.spec_from_file_location("write_benchmark_results", WRITER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_of_results_names_hardware_versions_and_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "saved output.txt"
    document = report(experiment()).document()
    result.write_text(f"a table before it\n{json.dumps(document)}\n\n", encoding="utf-8")
    words = ["write", str(result), str(result), "--hardware", "A Box, 4 cores", "--note", "Idle."]
    words += ["--date", "2031-02-03", "--directory", str(tmp_path / "pages")]
    monkeypatch.setattr(sys, "argv", words)
    assert writer().main() == 0
    name = "chain-speculative-acceptance-a-box-4-cores-2031-02-03"
    files = {path.name for path in (tmp_path / "pages").iterdir()}
    assert files == {f"{name}.md", f"{name}-1.svg", f"{name}-2.svg"}
    page = (tmp_path / "pages" / f"{name}.md").read_text(encoding="utf-8")
    for expected in (
        "# Chain speculative acceptance: A Box, 4 cores, 2031-02-03",
        "Idle.",
        "mlxgen compare -m big --draft-model small\n",
        "- versions: mlx 1.2",
        "- computed on: CPU, a processor; host a processor, 4 cores, an OS",
        f"({name}-2.svg)",
        "| stochastic | stochastic | 156 | 0.5000 | 0.5000 | 0.00 |",
    ):
        assert expected in page
    assert page.index("sum_min / sum_prod") < page.index("tok/s")


@pytest.mark.parametrize("content", ["", "words\n", "{}\n", "[1]\n"])
def test_result_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=r"result\.json: "):
        writer().read_result(path)
    with pytest.raises(InputError, match=r"nowhere\.json: "):
        writer().read_result(tmp_path / "nowhere.json")


def test_name_of_a_page_has_no_odd_characters() -> None:
    date = datetime.date(2031, 2, 3)
    expected = "chain-speculative-acceptance-nvidia-h200-cuda-13-2031-02-03"
    assert writer().page_name("NVIDIA H200 (CUDA 13)", date) == expected
