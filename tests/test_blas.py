"""The replaced matrix product: same numbers, and undone or refused when anything is off."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import scipy

from mlxgen.backend import blas
from mlxgen.backend.imported_calls import import_slots

ROOT = Path(__file__).resolve().parent.parent
on_linux_cpu = pytest.mark.skipif(
    not sys.platform.startswith("linux") or mx.default_device().type != mx.DeviceType.cpu,
    reason="only the Linux CPU backend has its product replaced",
)


def _run(program: str, setting: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop(blas.VARIABLE, None)
    if setting is not None:
        environment[blas.VARIABLE] = setting
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )


CHOICE = "from mlxgen.backend.blas import use_fast_blas as f; print(f().is_replaced, f().detail)"


@on_linux_cpu
def test_products_agree_with_numpy_after_the_replacement() -> None:
    blas.use_fast_blas()
    generator = np.random.default_rng(3)
    for rows, inner, columns in ((1, 576, 1536), (5, 576, 1536), (130, 64, 7), (2, 3, 2)):
        a = generator.standard_normal((rows, inner)).astype(np.float32)
        b = generator.standard_normal((columns, inner)).astype(np.float32)
        product = np.array(mx.array(a) @ mx.array(b).T)
        wanted = a.astype(np.float64) @ b.T.astype(np.float64)
        np.testing.assert_allclose(product, wanted, rtol=1e-4, atol=1e-4)


@on_linux_cpu
def test_mlx_calls_the_product_through_a_slot_that_is_found() -> None:
    assert import_slots("libmlx.so", "cblas_sgemm")
    assert import_slots("libmlx.so", "no_such_function") == []
    assert import_slots("no_such_library.so", "cblas_sgemm") == []


@on_linux_cpu
def test_off_leaves_mlx_alone() -> None:
    assert _run(CHOICE, "off").stdout.startswith("False MLX's own")


def _mkl_files() -> list[Any]:
    try:
        return list(metadata.files("mkl") or ())
    except metadata.PackageNotFoundError:
        return []


@on_linux_cpu
@pytest.mark.skipif(platform.machine() != "x86_64", reason="MKL is for x86-64")
def test_the_cpu_extra_brings_mkl() -> None:
    assert any(file.name.startswith("libmkl_rt.so") for file in _mkl_files())


@on_linux_cpu
@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_used_without_being_asked_for(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(blas.THREADS_VARIABLE, str(threads))
    found = _run(CHOICE, None).stdout
    assert found.startswith("True MKL" if _mkl_files() else "True SciPy's OpenBLAS")
    assert f"{min(threads, len(os.sched_getaffinity(0)))} thread" in found


@on_linux_cpu
def test_a_path_may_name_scipys_library() -> None:
    (file,) = (Path(scipy.__file__).parent.parent / "scipy.libs").glob("libscipy_openblas-*.so")
    assert _run(CHOICE, str(file)).stdout == f"True {file}\n"


@on_linux_cpu
@pytest.mark.parametrize("hidden", ["package", "list of files", "library", "function", "threads'"])
def test_openblas_stands_in_where_mkl_cannot_be_used(
    hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Package:
        version = "0"

        def __init__(self, name: str) -> None:
            if hidden == "package":
                raise metadata.PackageNotFoundError(name)
            self.files = None if hidden == "list of files" else [Path("libmkl_rt.so.3")]

        def locate_file(self, file: Path) -> Path:
            return Path(mx.__file__) if hidden == "function" else Path("/nowhere") / file

    if hidden == "threads'":
        monkeypatch.setattr(blas, "_threads", lambda: 2)
    monkeypatch.setattr(metadata, "distribution", Package)
    first, *_ = [name for _, name in blas._installed_libraries()]
    assert first.startswith("SciPy's OpenBLAS")


@on_linux_cpu
def test_mlx_keeps_its_own_where_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_installed_libraries", lambda: iter(()))
    assert blas._choose("").detail == "MLX's own (no library found)"


@on_linux_cpu
def test_rows_of_one_product_are_those_of_narrow_ones_up_to_rounding() -> None:
    blas.use_fast_blas()
    generator = np.random.default_rng(5)
    a = mx.array(generator.standard_normal((9, 576)).astype(np.float32))
    b = mx.array(generator.standard_normal((1536, 576)).astype(np.float32)).T
    wide = np.array(a @ b)
    for rows in range(1, 9):
        np.testing.assert_allclose(np.array(a[:rows] @ b), wide[:rows], rtol=1e-4, atol=1e-4)


@on_linux_cpu
@pytest.mark.parametrize(
    ("asked", "cores", "threads"),
    [("", 4, 1), ("3", 4, 3), ("8", 4, 4), ("2,4", 4, 2), ("0", 4, 1), ("many", 4, 1), ("2", 1, 1)],
)
def test_threads_are_those_asked_for_that_the_process_may_use(
    asked: str, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(blas.THREADS_VARIABLE, asked)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert blas._threads() == threads


@on_linux_cpu
@pytest.mark.parametrize("path", ["/no/such/library.so", "libc.so.6"])
def test_a_path_without_a_product_is_one_line_that_names_the_variable(path: str) -> None:
    done = _run(CHOICE, path)
    assert done.returncode != 0
    assert "MLXGEN_BLAS must be off or the path of a library" in done.stderr.splitlines()[-1]


def _broken() -> Any:
    return ctypes.CFUNCTYPE(None)(lambda: None)


@on_linux_cpu
def test_a_wrong_product_is_found_out_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _broken()
    monkeypatch.setattr(blas, "_installed_libraries", lambda: iter([(broken, "a broken library")]))
    choice = blas._choose("")
    assert not choice.is_replaced and "a broken library gave wrong products" in choice.detail
    test_products_agree_with_numpy_after_the_replacement()


@on_linux_cpu
def test_the_next_library_is_tried_after_a_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, installed = _broken(), blas._installed_libraries
    monkeypatch.setattr(
        blas, "_installed_libraries", lambda: chain([(broken, "a broken library")], installed())
    )
    choice = blas._choose("")
    assert choice.is_replaced and "broken" not in choice.detail
    test_products_agree_with_numpy_after_the_replacement()
