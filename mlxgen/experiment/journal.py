"""The journal of a comparison: a JSONL file that a killed process can go on from.

The first line tells which experiment it belongs to. Every other line is a finished run, on the
disk before the next run starts, so that at most the run in flight is lost.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlxgen.errors import InputError
from mlxgen.experiment.plan import Experiment
from mlxgen.experiment.records import RunRecord
from mlxgen.models.source import expand_home

_FORMAT = "mlxgen compare 1"


class Journal:
    """An open journal. records: the runs that it held when it was opened."""

    def __init__(self, stream: io.FileIO, records: list[RunRecord]) -> None:
        self._stream = stream
        self.records = records

    def append(self, record: RunRecord) -> None:
        """Add a run and wait until it is on the disk."""
        _write_line(self._stream, record.as_json())


@contextmanager
def open_journal(file: str, experiment: Experiment) -> Iterator[Journal]:
    """Start a journal, or go on with one.

    Raises `InputError` when the file is no journal, is one of another experiment, has a line that
    cannot be read, or is being written by another process. A last line that was cut short is
    dropped.
    """
    path = expand_home(file)
    try:
        stream = path.open("a+b", buffering=0)
    except OSError as error:
        raise InputError(f"--resume {file}: {error.strerror or error}") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"--resume {file}: another process is writing to it") from error
        except OSError:
            pass  # a file system without locks
        yield Journal(stream, _read(file, stream, experiment))


def _read(file: str, stream: io.FileIO, experiment: Experiment) -> list[RunRecord]:
    stream.seek(0)
    data = stream.read()
    header = {
        "format": _FORMAT,
        "fingerprint": experiment.fingerprint,
        "experiment": experiment.description(),
    }
    # Killed while it wrote its first line, or never written at all.
    if _encoded(header).startswith(data) and not data.endswith(b"\n"):
        stream.truncate(0)
        _write_line(stream, header)
        return []
    first, *lines = data.split(b"\n")
    _check_header(file, first, header)
    cut = lines.pop() if lines else b""
    planned = set(experiment.schedule())
    records: dict[object, RunRecord] = {}
    for number, line in enumerate(lines, start=2):
        try:
            record = RunRecord.from_json(json.loads(line))
            if record.key not in planned:
                raise ValueError("a run that is not planned")
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InputError(
                f"--resume {file}, line {number}: not a run of a comparison"
            ) from error
        records.setdefault(record.key, record)
    if cut:
        stream.truncate(len(data) - len(cut))
    return list(records.values())


def _check_header(file: str, line: bytes, expected: dict[str, Any]) -> None:
    try:
        found = json.loads(line)
        is_journal = found["format"] == _FORMAT
        fingerprint, described = found["fingerprint"], found["experiment"]
    except (KeyError, TypeError, ValueError, RecursionError):
        is_journal = False
    if not is_journal:
        raise InputError(f"--resume {file}: exists and is not a journal of a comparison")
    if fingerprint != expected["fingerprint"]:
        difference = _first_difference(described, expected["experiment"], "")
        raise InputError(f"--resume {file} belongs to another comparison: {difference}")


def _first_difference(there: Any, here: Any, place: str) -> str:
    """Where two JSON values part, for people."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*here, *(key for key in there if key not in here)]:
            if there.get(key) != here.get(key):
                return _first_difference(there.get(key), here.get(key), f"{place} {key}".strip())
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for index, (old, new) in enumerate(zip(there, here, strict=True), start=1):
            if old != new:
                return _first_difference(old, new, f"{place} {index}")
    return f"{place or 'the experiment'} is {_short(there)} there and {_short(here)} here"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _encoded(value: dict[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False).encode() + b"\n"


def _write_line(stream: io.FileIO, value: dict[str, Any]) -> None:
    line = _encoded(value)
    if stream.write(line) != len(line):
        raise OSError(f"{stream.name}: a line was cut short; is the disk full?")
    os.fsync(stream.fileno())
