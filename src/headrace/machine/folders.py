"""Reads paths that people write, and checks that a file lies in its model's folder: a downloaded folder may hold links to anywhere."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.core.errors import CheckpointError


def expanded(path: str) -> Path:
    """A leading `~` or `~user` where there is no such home is a name like others."""
    return Path(os.path.expanduser(path))


def inside(folder: Path, file: str) -> Path:
    """Links to the blobs of a Hugging Face cache's repository are accepted.

    Raises CheckpointError for a missing file, for one that cannot be resolved, and for a link that leads out of the folder.
    """
    path, home = folder / file, folder.resolve()
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(str(path), "no such file" if isinstance(error, FileNotFoundError) else "cannot be resolved") from error
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(place) for place in homes):
        raise CheckpointError(str(path), "a link that leads out of the folder", "Copy the file into the folder.")
    return path
