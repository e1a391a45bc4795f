"""Opens the private cache folders of this user, in which compiled kernels and packed weights are kept for later starts.

A user with write access to a cache folder could change the code that runs: a folder that is not this user's alone is refused. No torch is
imported here: packed weights are searched while torch is being imported.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

ENVIRONMENT = "HEADRACE_CACHE_DIR"
KEEP = "HEADRACE_KEEP_PACKED"
""""0": weights are packed at every start, and none are kept on disk."""


def cache_root(environ: Mapping[str, str]) -> Path:
    """HEADRACE_CACHE_DIR, else `headrace` in XDG_CACHE_HOME or ~/.cache, else, for a user without a home, in the temporary directory."""
    if given := environ.get(ENVIRONMENT):
        return Path(given)
    base = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the standard has relative ones ignored
        base = os.path.expanduser("~/.cache")
    return Path(base) / "headrace" if os.path.isabs(base) else Path(tempfile.gettempdir()) / f"headrace-cache-{os.geteuid()}"


def packed_directory() -> Path | None:
    if os.environ.get(KEEP) == "0":
        return None
    try:
        return open_private(cache_root(os.environ), ("packed",))
    except OSError as error:
        log.warning("packed weights are not kept: %s", error)
        return None


def open_private(root: Path, parts: tuple[str, ...]) -> Path:
    """Make and check root / parts[0] / ...; each of these folders must belong to this user and be writable by this user alone.

    Raises PermissionError naming the folder and the fault; OSError if a folder cannot be made.
    """
    path = root
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(path)
    for part in parts:
        path = path / part
        path.mkdir(mode=0o700, exist_ok=True)
        _check_private(path)
    if stat.S_IMODE(path.stat().st_mode) != 0o700:  # a folder with the right mode may be on a read-only disk
        path.chmod(0o700)
    return path


def _check_private(path: Path) -> None:
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise PermissionError(f"{path} is not a folder of its own (a link, or a file)")
    if facts.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {facts.st_uid}, not to this one ({os.geteuid()})")
    if facts.st_mode & 0o022:
        raise PermissionError(f"{path} may be written by others (mode {stat.S_IMODE(facts.st_mode):04o})")
