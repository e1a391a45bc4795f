"""What the command tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder that passes for a model folder where only config.json is looked for."""
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder
