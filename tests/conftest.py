"""Fixtures and settings for all tests."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

from tests.fixtures.runs import ModelStore

# The same examples in every run, so that a failure in CI is a failure everywhere.
settings.register_profile("mlxgen", deadline=None, derandomize=True, database=None)
settings.load_profile("mlxgen")

# Started in the background, a shell hands down an ignored SIGINT, and the programs that the tests
# interrupt would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    """Tiny models, written and loaded on demand and kept for the session."""
    return ModelStore(tmp_path_factory.mktemp("models"))
