"""Models inside the package: where they are, and which one is served when none is named."""

from __future__ import annotations

from pathlib import Path

import headrace
from headrace.core.errors import ConfigError

DEFAULT_MODEL = "headrace-tiny"


def bundled_folders() -> list[Path]:
    """Every model folder in the package, the default first."""
    root = Path(headrace.__file__ or "").parent / "bundled"
    found = sorted(path.parent for path in root.glob("*/config.json"))
    return sorted(found, key=lambda folder: folder.name != DEFAULT_MODEL)


def default_folder() -> Path:
    """The model served when none is named. Raises ConfigError when this installation has none."""
    for folder in bundled_folders():
        if folder.name == DEFAULT_MODEL:
            return folder
    raise ConfigError("model", f"this installation does not contain {DEFAULT_MODEL}", "Give a model folder.")
