"""Models inside the package: which they are, and which one is served when none is named."""

from __future__ import annotations

from pathlib import Path

from headrace.fleet.weights import BUNDLED

DEFAULT_MODEL = "headrace-tiny"


def bundled_folders() -> list[Path]:
    """Every model folder in the package, the default first."""
    found = sorted(path.parent for path in BUNDLED.glob("*/config.json"))
    return sorted(found, key=lambda folder: folder.name != DEFAULT_MODEL)
