"""Checks that a file lies in its model's folder: a downloaded folder may hold links to anywhere."""

from __future__ import annotations

from pathlib import Path

from headrace.core.errors import CheckpointError


def inside(folder: Path, file: str) -> Path:
    """The file's path, if the file really lies in the folder or, for a hub cache snapshot, among that repository's blobs.

    Raises: CheckpointError for a missing file and for a link that leads elsewhere.
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
