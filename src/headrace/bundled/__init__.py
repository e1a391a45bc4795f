"""Models and adapters inside the package, one folder each as Hugging Face and PEFT lay them out: where they are, and which model is used
when none is named."""

from __future__ import annotations

from pathlib import Path

DEFAULT_MODEL = "headrace-tiny"
DRAFT_MODEL = "headrace-draft"
FOLDER = Path(__file__).resolve().parent
CLASSIFIER = FOLDER / "classifier.bin"
"""The weights of the request classifier."""


def bundled_names(folder: Path = FOLDER) -> tuple[str, ...]:
    """Names of the complete models in this installation."""
    return tuple(sorted(path.parent.name for path in folder.glob("*/config.json")))


def bundled_path(name: str, folder: Path = FOLDER) -> Path | None:
    """The folder of a bundled model; None when this installation has none of that name. A name is looked up, never joined unseen."""
    return folder / name if name in bundled_names(folder) else None


def bundled_adapter(name: str, folder: Path = FOLDER) -> Path | None:
    """The folder of a bundled adapter, looked up in the same way."""
    found = {path.parent.name: path.parent for path in folder.glob("adapters/*/adapter_config.json")}
    return found.get(name)
