"""Settings of the CUDA backend are made where the user has made none."""

from __future__ import annotations

import os

import pytest

from mlxgen.backend.cuda import SETTINGS, prepare_cuda


@pytest.mark.parametrize("variable", SETTINGS)
@pytest.mark.parametrize("own", [None, "", "1", "50"])
def test_a_setting_of_the_user_stays(
    variable: str, own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(variable, own)
    prepare_cuda()
    assert os.environ[variable] == (SETTINGS[variable] if own is None else own)
    others = SETTINGS.keys() - {variable}
    assert {name: os.environ[name] for name in others} == {n: SETTINGS[n] for n in others}
