"""`python -m mlxgen` and the console script."""

import signal
import sys

DECODING_COMMANDS = frozenset({"generate", "verify", "compare"})


def main() -> int:
    """Run the command line; returns the exit code. Ctrl-C ends it in one line from here on."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if _decodes(sys.argv):
            from mlxgen.backend.allocator import restart_with_allocator

            restart_with_allocator()
        # Importing takes long enough to be interrupted.
        from mlxgen.cli.app import main as command

        code = command()
    except KeyboardInterrupt:
        print("mlxgen: interrupted", file=sys.stderr)
        code = 130
    # What is left is the interpreter's own end, which an interrupt would only make noisy.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def _decodes(words: list[str]) -> bool:
    """Whether this process is a command that runs a model, and not a program that calls `main`."""
    is_own = words[0].rpartition("/")[2] in ("mlxgen", "__main__.py")
    return is_own and words[1:2] != [] and words[1] in DECODING_COMMANDS and "--help" not in words


if __name__ == "__main__":
    sys.exit(main())
