"""The limit of CUDA graphs is raised, and a user's own is left alone."""

from __future__ import annotations

import os

import pytest

from mlxgen.backend.cuda_graphs import VARIABLE, keep_more_graphs


@pytest.mark.parametrize(("before", "after"), [(None, "2000"), ("50", "50")])
def test_a_limit_that_was_set_stays(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    keep_more_graphs()
    assert os.environ[VARIABLE] == after
