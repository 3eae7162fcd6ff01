"""`python -m mlxgen` and the console script."""

import signal
import sys


def main() -> int:
    """Run the command line; returns the exit code. Ctrl-C ends it in one line from here on."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # Importing takes long enough to be interrupted.
        from mlxgen.cli.app import main as command

        code = command()
    except KeyboardInterrupt:
        print("mlxgen: interrupted", file=sys.stderr)
        code = 130
    # What is left is the interpreter's own end, which an interrupt would only make noisy.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(main())
