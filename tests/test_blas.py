"""The replaced matrix product: same numbers, and undone or refused when anything is off."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
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


@on_linux_cpu
def test_it_is_used_without_being_asked_for() -> None:
    best = "MKL" if platform.machine() == "x86_64" else "SciPy's OpenBLAS"
    assert _run(CHOICE, None).stdout.startswith(f"True {best}")


@on_linux_cpu
def test_a_path_may_name_scipys_library() -> None:
    (file,) = (Path(scipy.__file__).parent.parent / "scipy.libs").glob("libscipy_openblas-*.so")
    assert _run(CHOICE, str(file)).stdout == f"True {file}\n"


@on_linux_cpu
def test_openblas_stands_in_where_mkl_is_not_installed() -> None:
    without = f"from mlxgen.backend import blas; blas._mkl = lambda: iter(()); {CHOICE}"
    assert _run(without, None).stdout.startswith("True SciPy's OpenBLAS")


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
def test_a_path_that_is_no_library_is_one_line_that_names_the_variable() -> None:
    done = _run(CHOICE, "/no/such/library.so")
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
