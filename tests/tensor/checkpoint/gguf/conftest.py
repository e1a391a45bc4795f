"""Every test has a cache folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.tensor.host.cache_folder import ENVIRONMENT


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(ENVIRONMENT, str(folder))
    return folder
