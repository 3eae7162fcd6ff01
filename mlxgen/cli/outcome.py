"""From what happened to a process's exit code and its last line: the one place that maps them."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import typer
from typer.exceptions import TyperException

from mlxgen.cli import interrupts
from mlxgen.cli.streams import make_dispensable_stderr, printable
from mlxgen.errors import ExitCode, MlxgenError

PROGRAM = "mlxgen"


def run(command: Callable[[], object], *, verbose: bool) -> int:
    """Run a command and return its exit code, with every failure told in one line on stderr.

    verbose: show tracebacks. SIGTERM and SIGHUP count as an interruption, like Ctrl-C. A reader
    that closed the pipe of stdout ends the command quietly; what cannot be told on stderr is not.
    """
    interrupts.install()
    if sys.stdin is None:
        # A file that gets the free descriptor 0 is taken for one that could not be opened.
        os.open(os.devnull, os.O_RDONLY)
    for name in ("stdout", "stderr"):
        # A stream that the caller closed is None, and print would take that for stdout.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    make_dispensable_stderr()
    try:
        result = command()
        if result == ExitCode.INTERRUPTED and not isinstance(result, ExitCode):
            # Typer makes a number of an interrupt that nobody else has handled.
            raise KeyboardInterrupt
        sys.stdout.flush()
        return result if isinstance(result, int) else ExitCode.DONE
    except MlxgenError as error:
        return _fail(str(error), error.exit_code, verbose)
    except TyperException as error:
        # Usage errors, found while parsing.
        message = error.format_message()
        if not message:
            # No command at all: Typer has printed the help.
            return ExitCode.BAD_INPUT
        return _fail(message, ExitCode.BAD_INPUT, verbose)
    except (KeyboardInterrupt, typer.Abort):
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # Typer makes SystemExit(1) of a broken pipe, whatever its mode.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            # Typer leaves this way after --show-completion.
            return error.code if isinstance(error.code, int) else ExitCode.FAILED
        # The interpreter flushes stdout again when it exits; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.DONE
    except OSError as error:
        return _fail(f"cannot write or read: {error}", ExitCode.FAILED, verbose)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return _fail(
            f"unexpected {type(error).__name__}: {lines[0]} (--verbose shows where)",
            ExitCode.FAILED,
            verbose,
        )


def _fail(message: str, code: ExitCode, verbose: bool) -> int:
    if verbose:
        traceback.print_exc(file=sys.stderr)
    # A message may quote a model's own words, such as a chat template's.
    print(f"{PROGRAM}: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
