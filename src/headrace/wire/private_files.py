"""Files that hold a secret of the wire: they must be closed to other users before their content is used."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from headrace.core.errors import ConfigError


def check_private_file(where: str, path: str) -> None:
    """Raises ConfigError unless `path` is a regular file of this user or root that no other user may read or write."""
    try:
        info = os.stat(path)
    except OSError as error:
        raise ConfigError(where, f"{path} cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(info.st_mode):
        raise ConfigError(where, f"{path} is not a file")
    if info.st_uid not in (os.geteuid(), 0):
        raise ConfigError(where, f"{path} belongs to another user", "Copy it as the user that runs Headrace.")
    if (mode := stat.S_IMODE(info.st_mode)) & 0o077:
        raise ConfigError(where, f"{path} is open to other users (mode {mode:04o})", f"chmod 600 {path}")


def read_token(where: str, path: str) -> str:
    """The token in a file, without the white space around it. Raises ConfigError; no message shows the token."""
    check_private_file(where, path)
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(where, f"{path} cannot be read as ASCII text") from error
    if not token.isprintable() or " " in token:
        raise ConfigError(where, f"{path} holds more than one word", "A token is one line without spaces.")
    return token
