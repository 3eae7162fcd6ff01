"""Which module may import which: one direction, as docs/architecture.md draws it.

Imports are read from the source, so those inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "mlxgen"

LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "backend": {"errors"},
    "sampling": {"config", "errors"},
    "cache": {"config", "errors", "sampling"},
    "drafters": {"cache", "config", "errors", "sampling"},
    "decoding": {"cache", "config", "errors", "sampling"},
    "speculative": {"cache", "config", "decoding", "drafters", "errors", "sampling"},
    "text": {"backend", "errors"},
    "models": {"backend", "config", "errors"},
    "memory": {"cache", "config", "errors", "models", "sampling"},
    "prompt_cache": {"cache", "config", "errors", "memory", "models"},
}
"""For each part of the package, the parts that it may import."""
LAYERS["generation"] = set(LAYERS)
for _use in ("audit", "conversation", "experiment"):
    LAYERS[_use] = {"generation", *LAYERS["generation"]}
for _upper in ("report", "cli"):
    LAYERS[_upper] = set(LAYERS)
LAYERS["__main__"] = {"backend", "cli"}

ARITHMETIC = {f"mlxgen.sampling.{module}" for module in ("elementary", "sums")}
PURE = {
    **dict.fromkeys(ARITHMETIC, ARITHMETIC),
    "mlxgen.sampling.filters": ARITHMETIC,
    "mlxgen.speculative.rules": ARITHMETIC,
    "mlxgen.speculative.closed_forms": ARITHMETIC,
}
"""Functions of arrays: beside the standard library and mlx.core they import these alone."""

ONLY_IN = {
    "typer": {"cli"},
    "rich": {"cli"},
    "mlx_lm": {"cache", "models"},
    "transformers": {"models", "text"},
    "huggingface_hub": {"models"},
}
"""Third-party packages that some parts alone may import."""

MAY_IMPORT_ROOT = {"cli", "report"}
"""Parts that may import mlxgen itself, for its version."""

WITHOUT_ENVIRONMENT = set(LAYERS) - {"backend", "cli", "experiment", "models", "__main__"}
"""Parts that are told everything by their arguments, and so never import os."""


@dataclass(frozen=True)
class Import:
    """One imported module, by full name, and where."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def part_of(module: str) -> str:
    """The part of the package that a module belongs to: its second name, or "" for the root."""
    return [*module.split("."), ""][1]


def read_imports(root: Path) -> list[Import]:
    """All imports of the package below a root."""
    return [found for path in sorted((root / PACKAGE).rglob("*.py")) for found in _in(path, root)]


def _in(path: Path, root: Path) -> Iterator[Import]:
    parts = path.relative_to(root).with_suffix("").parts
    importer = ".".join(parts).removesuffix(".__init__")
    package = parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                is_module = _exists(root, full) or full == "mlx.core"
                yield Import(importer, full if is_module else source, node.lineno)


def _exists(root: Path, module: str) -> bool:
    path = root.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def violations(imports: list[Import]) -> list[str]:
    """What breaks the rules, one line each."""
    broken = []
    for found in imports:
        importer, imported = part_of(found.importer), part_of(found.imported)
        top = found.imported.split(".")[0]
        if top == PACKAGE and importer:
            if importer not in LAYERS:
                broken.append(f"{found}: the part {importer} has no place in LAYERS")
            elif not imported and importer not in MAY_IMPORT_ROOT:
                broken.append(f"{found}: the root offers every layer")
            elif imported and imported != importer and imported not in LAYERS[importer]:
                broken.append(f"{found}: {importer} lies below {imported}, or beside it")
        if importer not in ONLY_IN.get(top, {importer}):
            broken.append(f"{found}: only {sorted(ONLY_IN[top])} may import {top}")
        if top == "os" and importer in WITHOUT_ENVIRONMENT:
            broken.append(f"{found}: {importer} must not look at the environment")
        if found.importer in PURE and not (
            top in sys.stdlib_module_names
            or found.imported in {"__future__", "mlx.core", *PURE[found.importer]}
        ):
            broken.append(f"{found}: {found.importer} is pure")
        beyond_history = imported == "sampling" and found.imported != "mlxgen.sampling.history"
        if importer == "cache" and beyond_history:
            broken.append(f"{found}: a cache needs no more of sampling than the history")
    return broken


def test_imports_go_one_way() -> None:
    imports = read_imports(ROOT)
    assert len(imports) > 100
    assert violations(imports) == []


def test_every_part_of_the_package_has_a_place() -> None:
    parts = {
        path.stem if path.is_file() else path.name
        for path in (ROOT / PACKAGE).iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert parts - {"__init__"} <= set(LAYERS)


def test_layers_have_no_cycle() -> None:
    placed: set[str] = set()
    waiting = dict(LAYERS)
    while waiting:
        ready = {part for part, below in waiting.items() if below <= placed}
        assert ready, f"these import each other: {sorted(waiting)}"
        placed |= ready
        waiting = {part: below for part, below in waiting.items() if part not in ready}


def test_importing_the_package_imports_nothing_else_of_it() -> None:
    """`mlxgen --help` must not wait for MLX, so the root's names load on first use."""
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        assert all(name.split(".")[0] in sys.stdlib_module_names for name in names)


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("errors", "from mlxgen.config import MAX_SEED", "errors lies below config"),
        ("config", "import mlxgen.sampling.chain", "config lies below sampling"),
        ("sampling/chain", "from mlxgen import cache", "sampling lies below cache"),
        ("sampling/chain", "from ..drafters import proposal", "sampling lies below drafters"),
        ("cache/caches", "from mlxgen.sampling.chain import draw", "no more of sampling than"),
        ("drafters/draft_model", "import mlxgen.speculative.rules", "drafters lies below spec"),
        ("decoding/plain", "from mlxgen.drafters.proposal import Drafter", "or beside it"),
        ("speculative/loop", "from mlxgen.models import loading", "or beside it"),
        ("generation", "from mlxgen.report import lines", "generation lies below report"),
        ("report/lines", "def late():\n    from mlxgen.cli import app", "report lies below cli"),
        ("report/lines", "import rich.table", "may import rich"),
        ("generation", "import typer", "may import typer"),
        ("speculative/loop", "import os", "must not look at the environment"),
        ("speculative/rules", "import numpy as np", "rules is pure"),
        ("speculative/closed_forms", "from mlxgen.config import AcceptRule", "forms is pure"),
        ("sampling/filters", "from mlxgen.sampling.history import History", "filters is pure"),
        ("generation", "from mlxgen import SamplingConfig", "the root offers every layer"),
        ("newcomer/module", "from mlxgen.errors import MlxgenError", "no place in LAYERS"),
    ],
)
def test_checker_rejects_a_wrong_import(
    tmp_path: Path, module: str, source: str, reason: str
) -> None:
    for part in ("cache", "sampling", "drafters", "models", "report", "cli"):
        (tmp_path / PACKAGE / part).mkdir(parents=True)
    for name in ("drafters/proposal", "models/loading", "report/lines", "cli/app"):
        (tmp_path / PACKAGE / name).with_suffix(".py").touch()
    path = (tmp_path / PACKAGE / module).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(source + "\n", encoding="utf-8")
    found = violations(read_imports(tmp_path))
    assert len(found) == 1 and reason in found[0], found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("errors", "from enum import IntEnum"),
        ("sampling/filters", "import mlx.core as mx\nfrom mlxgen.sampling.sums import total"),
        ("sampling/chain", "from . import filters\nfrom ..errors import OptionError"),
        ("cache/caches", "from mlxgen.sampling.history import IntArray"),
        ("cli/app", "import typer\nfrom mlxgen import __version__, generation\nimport os"),
    ],
)
def test_checker_allows_what_is_right(tmp_path: Path, module: str, source: str) -> None:
    path = (tmp_path / PACKAGE / module).with_suffix(".py")
    path.parent.mkdir(parents=True)
    path.write_text(source + "\n", encoding="utf-8")
    (tmp_path / PACKAGE / "generation.py").touch()
    assert violations(read_imports(tmp_path)) == []
