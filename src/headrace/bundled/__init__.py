"""Models inside the package, one folder each in the Hugging Face layout: where they are, and which one is used when none is named."""

from __future__ import annotations

from pathlib import Path

DEFAULT_MODEL = "headrace-tiny"
_FOLDER = Path(__file__).resolve().parent


def bundled_names() -> tuple[str, ...]:
    """Names of the complete models in this installation."""
    return tuple(sorted(path.parent.name for path in _FOLDER.glob("*/config.json")))


def bundled_path(name: str) -> Path | None:
    """The folder of a bundled model; None when this installation has none of that name. A name is looked up, never joined unseen."""
    return _FOLDER / name if name in bundled_names() else None
