"""Running the command on a case in a forked child, and what is wrong with how it ended.

The parent has imported everything and computed nothing, so that a child starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 10
_MEMORY_BYTES = 6 * 2**30
_BROKEN = 70
_ERROR = "mlxgen: error: "
_NOTE = re.compile(
    r'Loading (draft )?model from ".*"\.\.\.|Draft model loaded\.|Resolved drafter kind: .*'
    r"|Drafter kind was auto-detected only; .*|Max tokens: unlimited .*|Seed: \d+|warning: .*"
    r"|note: .*|Sampling from the model's generation_config\.json: .*|Prompt cache: .*"
    r"|The draft is the target itself; .*|Filter order: .*|Checking .*\.\.\.|\d+ runs to make"
    r"|\[transformers\] .*|.* holds \d+ of \d+ runs|wrote .*|mlxgen \S+, mlx .*"
    r"|Matrix products in float32 on the CPU: .*|\[Draft length\] .*"
)
_STATISTICS = re.compile(
    r"\[(Generated|Speculative|Drafters|Draft length|Logprobs|Profile).*|  \S.*|"
)


@dataclass(frozen=True)
class Case:
    """A command line, what is piped in, and the files that differ from the valid ones.

    is_bounded: it must end within the time limit.
    """

    words: tuple[str, ...]
    stdin: bytes = b""
    files: tuple[tuple[str, bytes], ...] = ()
    is_bounded: bool = True


@dataclass(frozen=True)
class Ended:
    """How a child ended. code: its exit code, or minus the signal that ended it."""

    code: int
    out: bytes
    err: bytes


def run_case(case: Case, directory: Path) -> Ended:
    """Run the command in a directory that holds the case's files."""
    (directory / "stdin").write_bytes(case.stdin)
    code = in_child(lambda: _command(case.words), directory)
    return Ended(code, (directory / "stdout").read_bytes(), (directory / "stderr").read_bytes())


def in_child(work: Callable[[], int], directory: Path) -> int:
    """Do some work in a child in a directory, its streams in files there; its code as `Ended`."""
    (directory / "stdin").touch()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = _BROKEN
        try:
            _settle_in(directory)
            code = work()
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _settle_in(directory: Path) -> None:
    os.chdir(directory)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        flags = os.O_RDONLY if name == "stdin" else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(name, flags, 0o600), number)
    os.environ["HOME"] = str(directory)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The default action ends the process even in the middle of a library call.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT_S)


def _command(words: tuple[str, ...]) -> int:
    from mlxgen.__main__ import main

    sys.argv = ["mlxgen", *words]
    return main()


def complaint(case: Case, ended: Ended) -> str | None:
    """What is wrong with how a case ended, or None."""
    if ended.code == -signal.SIGALRM:
        return f"took more than {LIMIT_S} s" if case.is_bounded else None
    if ended.code < 0:
        return f"ended by signal {-ended.code} ({signal.Signals(-ended.code).name})"
    err = ended.err.decode("utf-8", "replace")
    if ended.code not in (0, 1, 2):
        return f"exit code {ended.code}"
    if "--verbose" in case.words:
        return None
    if "Traceback" in err or "panicked" in err:
        return "a traceback"
    return _wrong_lines(case, ended, err)


def _wrong_lines(case: Case, ended: Ended, err: str) -> str | None:
    errors = [line for line in err.split("\n") if line.startswith(_ERROR)]
    others = [line for line in err.split("\n") if line and not line.startswith(_ERROR)]
    noise = [line for line in others if not _NOTE.fullmatch(line)]
    if {"--json", "--quiet"} & set(case.words):
        noise = [line for line in noise if not _STATISTICS.fullmatch(line)]
        if case.words[:1] != ("generate",):
            noise = []
    if noise:
        return f"a line on stderr that is no note: {noise[0][:200]!r}"
    if any(line.startswith(f"{_ERROR}unexpected ") for line in errors):
        return f"an error that nobody expected: {errors[0][:200]!r}"
    failed_checks = case.words[:1] == ("verify",) and ended.code == 1 and not errors
    # Without any word the help is printed, and that is no error line.
    if case.words and len(errors) != (ended.code != 0) and not failed_checks:
        return f"{len(errors)} error lines with exit code {ended.code}"
    if ended.code == 0 and "--json" in case.words and "--help" not in case.words:
        try:
            json.loads(ended.out)
        except ValueError:
            return "standard output is not JSON"
    return None
