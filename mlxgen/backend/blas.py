"""A faster matrix product for MLX on a Linux CPU.

MLX's CPU wheel multiplies float32 matrices with the reference BLAS, which is not blocked for
caches: five rows cost nearly five times as much as one, so verifying a block is no cheaper than
decoding it token by token. So MLX's calls of `cblas_sgemm` are pointed at another library's, after
a check that the two agree: Intel's MKL where it is installed (`mlxgen[cpu]` brings it on x86-64),
which reads a matrix for one to three rows as fast as memory allows; else the OpenBLAS that SciPy
brings under names of its own.

Either runs on one thread unless OMP_NUM_THREADS asks for more: its threads wait for each other, so
on busy cores every product waits for the slowest (docs/cpu.md).

`MLXGEN_BLAS=off` leaves MLX alone; `MLXGEN_BLAS=PATH` names another library with a `cblas_sgemm`
(or with `scipy_cblas_sgemm`, SciPy's name for it), whose number of threads is then its own affair.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxgen.backend.imported_calls import import_slots, redirect
from mlxgen.errors import OptionError

VARIABLE = "MLXGEN_BLAS"
THREADS_VARIABLE = "OMP_NUM_THREADS"
_MLX_LIBRARY = "libmlx.so"
_FUNCTION = "cblas_sgemm"
_SCIPY_FUNCTION = "scipy_cblas_sgemm"
_TOLERANCE = 1e-4
_MKL_SEQUENTIAL, _MKL_INTEL, _MKL_32_BIT_INTEGERS = 1, 0, 0
"""Of mkl_service.h: MKL_THREADING_SEQUENTIAL, MKL_THREADING_INTEL, MKL_INTERFACE_LP64."""


@dataclass(frozen=True)
class BlasChoice:
    """Whether MLX multiplies with another BLAS now, and which or why not, in a few words."""

    is_replaced: bool
    detail: str


_chosen: BlasChoice | None = None


def use_fast_blas() -> BlasChoice:
    """Give MLX's CPU backend a faster float32 matrix product, once per process.

    Does nothing on a GPU, off Linux, or where anything is not as expected. Raises `OptionError`
    when MLXGEN_BLAS names a library that cannot be used.
    """
    global _chosen
    if _chosen is None:
        _chosen = _choose(os.environ.get(VARIABLE, "").strip())
    return _chosen


def _choose(setting: str) -> BlasChoice:
    if mx.default_device().type != mx.DeviceType.cpu or not sys.platform.startswith("linux"):
        return BlasChoice(False, "MLX's own (only the Linux CPU backend needs another)")
    if setting.lower() == "off":
        return BlasChoice(False, f"MLX's own ({VARIABLE}=off)")
    try:
        slots = import_slots(_MLX_LIBRARY, _FUNCTION)
    except (OSError, ValueError, struct.error) as error:
        return BlasChoice(False, f"MLX's own (its library cannot be read: {error})")
    if not slots:
        return BlasChoice(False, "MLX's own (its library does not import a replaceable one)")
    refused = "no library found"
    for product, name in [_named_library(setting)] if setting else _installed_libraries():
        address = ctypes.cast(product, ctypes.c_void_p).value
        assert address is not None, "a loaded function has an address"
        before = redirect(slots, address)
        if _multiplies_right():
            return BlasChoice(True, name)
        for slot, original in zip(slots, before, strict=True):
            redirect([slot], original)
        refused = f"{name} gave wrong products"
    if setting:
        raise OptionError(f"{VARIABLE}={setting}: its {_FUNCTION} gives wrong products")
    return BlasChoice(False, f"MLX's own ({refused})")


def _named_library(path: str) -> tuple[Any, str]:
    try:
        library = ctypes.CDLL(str(Path(path).expanduser()), mode=ctypes.RTLD_GLOBAL)
        is_scipys = hasattr(library, _SCIPY_FUNCTION)
        return library[_SCIPY_FUNCTION if is_scipys else _FUNCTION], path
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        raise OptionError(
            f"{VARIABLE} must be off or the path of a library with {_FUNCTION}: {error}"
        ) from error


def _installed_libraries() -> Iterator[tuple[Any, str]]:
    """Products for row-major single precision with 32-bit integers, and their names, best first."""
    yield from _mkl()
    yield from _scipy_openblas()


def _mkl() -> Iterator[tuple[Any, str]]:
    """MKL's product, from the package `mkl` of this Python."""
    try:
        package = metadata.distribution("mkl")
    except metadata.PackageNotFoundError:
        return
    for file in package.files or ():
        if not file.name.startswith("libmkl_rt.so"):
            continue
        threads = _threads()
        try:
            path = str(package.locate_file(file))
            if threads > 1:
                # MKL would load it at the first product, and end the process where it is missing.
                ctypes.CDLL(str(Path(path).with_name("libiomp5.so")), mode=ctypes.RTLD_GLOBAL)
            library = ctypes.CDLL(path)
            library.MKL_Set_Interface_Layer(_MKL_32_BIT_INTEGERS)
            library.MKL_Set_Threading_Layer(_MKL_SEQUENTIAL if threads == 1 else _MKL_INTEL)
            library.MKL_Set_Num_Threads(threads)
            product = library[_FUNCTION]
        except (AttributeError, OSError):
            continue
        yield product, f"MKL {package.version}, {_described(threads)}"


def _scipy_openblas() -> Iterator[tuple[Any, str]]:
    """SciPy's product."""
    package = util.find_spec("scipy")
    if package is None or package.origin is None:
        return
    folder = Path(package.origin).parent.parent / "scipy.libs"
    for file in sorted(folder.glob("libscipy_openblas-*.so")):
        try:
            library = ctypes.CDLL(str(file))
            product, set_threads = library[_SCIPY_FUNCTION], library.scipy_openblas_set_num_threads
            describe = library.scipy_openblas_get_config
        except (AttributeError, OSError):
            continue
        threads = _threads()
        set_threads(threads)
        describe.restype = ctypes.c_char_p
        version = " ".join(describe().decode("ascii", "replace").split()[:2])
        yield product, f"SciPy's {version}, {_described(threads)}"


def _described(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


def _threads() -> int:
    """OMP_NUM_THREADS as far as the process may use that many cores, 1 without it."""
    asked = os.environ.get(THREADS_VARIABLE, "").split(",")[0].strip()
    wanted = int(asked) if asked.isdecimal() else 1
    return max(1, min(wanted, len(os.sched_getaffinity(0))))


def _multiplies_right() -> bool:
    """Compare products of several shapes, transposed ones included, with NumPy's in float64."""
    generator = np.random.default_rng(0)
    for rows, inner, columns in ((1, 64, 48), (5, 96, 33), (33, 17, 5)):
        a = generator.standard_normal((rows, inner)).astype(np.float32)
        b = generator.standard_normal((inner, columns)).astype(np.float32)
        wanted = a.astype(np.float64) @ b.astype(np.float64)
        for product in (
            mx.array(a) @ mx.array(b),
            mx.array(a) @ mx.array(np.ascontiguousarray(b.T)).T,
            mx.array(np.ascontiguousarray(a.T)).T @ mx.array(b),
        ):
            if not np.allclose(np.array(product), wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
                return False
    return True
