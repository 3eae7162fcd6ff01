"""What a comparison runs on: the machine and the software, as far as the standard library knows."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_PACKAGES = ("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm", "mkl", "scipy")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """processor, cores and system of the host; versions: of what is installed, by package."""

    processor: str
    cores: int
    system: str
    versions: dict[str, str]


def this_machine(version: str) -> Machine:
    """version: this program's own."""
    versions = {"mlxgen": version, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Machine(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        system=f"{platform.system()} {platform.machine()}",
        versions=versions,
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    try:
        asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
        return done.stdout.strip() or platform.machine()
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or platform.machine()
