"""Logging to stderr, off unless the environment turns it on."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from mlxgen.cli.environment import log_level


def configure_logging(environment: Mapping[str, str]) -> None:
    """Send mlxgen's log lines to stderr at the level that MLXGEN_LOG or RUST_LOG names."""
    level = log_level(environment)
    if level is None:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("mlxgen")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
