"""Fixtures and settings for all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.fixtures.runs import ModelStore

# The same examples in every run, so that a failure in CI is a failure everywhere.
settings.register_profile("mlxgen", deadline=None, derandomize=True, database=None)
settings.load_profile("mlxgen")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    """Tiny models, written and loaded on demand and kept for the session."""
    return ModelStore(tmp_path_factory.mktemp("models"))
