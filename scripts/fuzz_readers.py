"""Run the command on random damage, and print every case that ends as no command should.

    python scripts/fuzz_readers.py arguments --minutes 10 --seed 1
    python scripts/fuzz_readers.py models --minutes 10 --seed 1 --keep failures
    python scripts/fuzz_readers.py files --case 812 --seed 1 --keep failures

arguments: random command lines. models: damaged model directories and adapters. files: damaged
prompts, prompt sets, journals and prompt caches. Every case must end within ten seconds and 6 GB
with a documented exit code, no traceback, and one line for an error. A case follows from the seed
and its number, and --case repeats it; --keep copies the directory of each failing
case, with its command line and what it printed. Exit 0 when nothing was found, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from random import Random

from fuzzing.child import Case, Ended, complaint, in_child, run_case
from fuzzing.command_lines import command_line
from fuzzing.model_files import model_directory
from fuzzing.read_files import read_file
from fuzzing.valid import write_valid_files

KINDS: dict[str, Callable[[Random, Path], Case]] = {
    "arguments": command_line,
    "models": model_directory,
    "files": read_file,
}
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def import_what_was_used(names: Iterable[str]) -> None:
    """Import the modules that a child needed, so that the next ones have them from the start."""
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def in_copy(case: Case, base: Path, directory: Path) -> Ended:
    """Run a case in a copy of the valid files, with its own in their place."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(base, directory)
    for name, data in case.files:
        (directory / name).write_bytes(data)
    return run_case(case, directory)


def fuzz(kind: str, seed: int, numbers: Iterable[int], minutes: float, keep: Path | None) -> int:
    """Run cases until the time is over; returns how many failed."""
    ends_s = time.monotonic() + 60 * minutes
    codes: Counter[int] = Counter()
    failures: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        base, directory = Path(scratch) / "base", Path(scratch) / "case"
        base.mkdir()

        def prepare() -> int:
            write_valid_files(base)
            return 0

        if in_child(prepare, base) != 0:
            raise RuntimeError((base / "stderr").read_text(encoding="utf-8"))
        import_what_was_used((base / "modules").read_text(encoding="utf-8").split())
        for number in numbers:
            if time.monotonic() > ends_s:
                break
            case = KINDS[kind](Random(f"{kind} {seed} {number}"), base)
            ended = in_copy(case, base, directory)
            codes[ended.code] += 1
            wrong = complaint(case, ended)
            if wrong is None:
                continue
            failures[wrong] += 1
            print(f"case {number}: {wrong}\n  {case.words}", flush=True)
            print(f"  python scripts/fuzz_readers.py {kind} --seed {seed} --case {number}")
            print(
                "  " + ended.err[-600:].decode("utf-8", "replace").replace("\n", "\n  "), flush=True
            )
            if keep is not None:
                place = keep / f"{kind}-{seed}-{number}"
                shutil.copytree(directory, place, dirs_exist_ok=True)
                (place / "words.json").write_text(json.dumps(case.words), encoding="utf-8")
    print(f"{kind}, seed {seed}: {codes.total()} cases, exit codes {dict(sorted(codes.items()))}")
    for wrong, times in failures.most_common():
        print(f"  {times} x {wrong}")
    return failures.total()


def main() -> int:
    """Parse, fuzz, report; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--cases", type=int, help="stop after so many")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where failing cases are kept")
    given = parser.parse_args()
    # No case may reach the Hub or the default pair; some modules look when they are imported.
    os.environ |= {"HF_HUB_OFFLINE": "1", "MLXGEN_CACHE": "/nonexistent"}
    numbers: Iterable[int] = count()
    if given.case is not None:
        numbers = [given.case]
    elif given.cases is not None:
        numbers = range(given.cases)
    return 1 if fuzz(given.kind, given.seed, numbers, given.minutes, given.keep) else 0


if __name__ == "__main__":
    sys.exit(main())
