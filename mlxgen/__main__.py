"""`python -m mlxgen` and the console script."""

import sys

from mlxgen.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
