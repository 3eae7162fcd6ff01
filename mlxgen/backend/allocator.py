"""Another memory allocator under MLX on a Linux CPU.

MLX makes room for arrays on one thread and lets go of them on another. In the C library each of the
two waits there for the other's lock, hundreds of times a token, and sleeps meanwhile. TBB's
allocator, which comes with MKL (`mlxgen[cpu]`), has no lock between them: a plain step of the
default target takes 0.87 of its time with it (docs/cpu.md).

A process gets its allocator when it starts, so the command starts itself again, once, before it
has imported or read anything. `MLXGEN_ALLOCATOR=off` leaves it as it is. So does an LD_PRELOAD of
the user's own, which may name an allocator already.
"""

from __future__ import annotations

import os
import signal
import site
import sys
import sysconfig
from importlib import util
from pathlib import Path

VARIABLE = "MLXGEN_ALLOCATOR"
_PRELOAD, _FOLDERS = "LD_PRELOAD", "LD_LIBRARY_PATH"
_FOLDERS_BEFORE = "_MLXGEN_LD_LIBRARY_PATH"
"""From the first start to the second: what LD_LIBRARY_PATH was, or empty."""
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
"""They wait while the second interpreter starts, which would answer them with a traceback."""
_LIBRARIES = ("libtbbmalloc.so.2", "libtbbmalloc_proxy.so.2")
"""The allocator, and what puts it in the place of the C library's."""


def restart_with_allocator() -> None:
    """Start this process again with TBB's allocator, where MLX would gain from it.

    Returns where there is nothing to gain, and in the process that was started; there the
    environment is again what it was, so that other programs start without the allocator.
    """
    before = os.environ.pop(_FOLDERS_BEFORE, None)
    if before is not None:
        os.environ.pop(_PRELOAD, None)
        os.environ.pop(_FOLDERS, None)
        if before:
            os.environ[_FOLDERS] = before
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
        return
    words = sys.argv[1:]
    if _refusal() is not None or sys.orig_argv[len(sys.orig_argv) - len(words) :] != words:
        # Or this is a part of another program, which would start again with words of its own.
        return
    folders = os.environ.get(_FOLDERS, "")
    environment = os.environ | {
        # By name: a path in LD_PRELOAD ends at a blank.
        _PRELOAD: ":".join(_LIBRARIES),
        _FOLDERS: ":".join(filter(None, [str(_folder()), folders])),
        _FOLDERS_BEFORE: folders,
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    except OSError:
        # It runs without as well.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)


def allocator_in_use() -> str:
    """Whose memory allocator this process has, and why, in a few words."""
    if _is_loaded():
        return "TBB's"
    return f"the C library's ({_refusal() or 'the process was not started by the command'})"


def _refusal() -> str | None:
    """Why the allocator of this process stays as it is, or None."""
    if not sys.platform.startswith("linux") or not _runs_on_cpu():
        return "only the Linux CPU backend gains from another"
    if os.environ.get(VARIABLE, "").strip().lower() == "off":
        return f"{VARIABLE}=off"
    if os.environ.get(_PRELOAD):
        return f"{_PRELOAD} is set"
    if not sys.executable or _folder() is None:
        return "TBB's is not installed"
    return None


def _is_loaded() -> bool:
    try:
        return _LIBRARIES[-1] in Path("/proc/self/maps").read_text("utf-8", "surrogateescape")
    except OSError:
        return False


def _runs_on_cpu() -> bool:
    """Whether the MLX that is installed is the one for a CPU. Importing it would take a second."""
    package = util.find_spec("mlx")
    folders = package.submodule_search_locations if package else None
    return any(any(Path(folder).parent.glob("mlx_cpu-*.dist-info")) for folder in folders or ())


def _folder() -> Path | None:
    """Where pip has put the libraries, unless a list of folders cannot hold that path."""
    for prefix in (sysconfig.get_path("data"), site.getuserbase()):
        folder = Path(prefix) / "lib"
        if all((folder / library).is_file() for library in _LIBRARIES):
            return None if {":", ";"} & set(str(folder)) else folder
    return None
