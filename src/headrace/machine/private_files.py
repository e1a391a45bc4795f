"""Reads files that hold a secret of the wire, after a check that they are closed to other users. The same for a socket's directory.

Writes files that are closed to other users.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.regular_files import MAX_SECRET_BYTES, in_time, read_file

MAX_DIR_BYTES = 90
"""Unix sockets' names have at most 107 bytes."""


def check_private_file(where: str, path: str) -> None:
    """Raises ConfigError unless `path` is a regular file of this user or root that no other user may read or write.

    Kubernetes gives a secret to a pod as a file of root, open to a group that this process is in (fsGroup, mode 0440).
    """
    info = _stat(where, path)
    if not stat.S_ISREG(info.st_mode):
        raise ConfigError(where, f"{path} is not a file")
    if info.st_uid not in (os.geteuid(), 0):
        raise ConfigError(where, f"{path} belongs to another user", "Copy it as the user that runs Headrace.")
    if is_open_to_others(info):
        raise ConfigError(where, f"{path} is open to other users (mode {stat.S_IMODE(info.st_mode):04o})", f"chmod 600 {path}")


def check_socket_folder(where: str, path: str | os.PathLike[str]) -> None:
    """Raises ConfigError where the directory of the socket is not this user's alone; OSError where it does not exist."""
    info = os.stat(os.path.dirname(path))
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(where, "the socket's directory is open to other users", "Make it yours alone (mode 0700).")


def why_not_private(where: str, path: str) -> str:
    """A warning about a secret file of another system, which is used all the same. Empty: none."""
    mode = stat.S_IMODE((info := _stat(where, path)).st_mode)
    return f"{where}: {path} is open to other users (mode {mode:04o}); chmod 600 {path}" if is_open_to_others(info) else ""


def is_open_to_others(info: os.stat_result) -> bool:
    """Reading by a group of this process is allowed on a file of root."""
    is_given_by_root = info.st_uid == 0 and info.st_gid != 0 and info.st_gid in (os.getegid(), *os.getgroups())
    return bool(stat.S_IMODE(info.st_mode) & (0o037 if is_given_by_root else 0o077))


def _stat(where: str, path: str) -> os.stat_result:
    try:
        return in_time(lambda: os.stat(path))
    except OSError as error:
        remedy = "The user that runs Headrace must be able to read it."
        raise ConfigError(where, f"{path} cannot be read ({error.strerror})", remedy) from error


def read_private_text(where: str, path: str, *, encoding: str = "UTF-8") -> str:
    """Raises ConfigError unless the file is closed to other users; no message shows any of the text."""
    check_private_file(where, path)
    try:
        return read_file(path, MAX_SECRET_BYTES).decode(encoding)
    except OSError as error:
        raise ConfigError(where, f"{path} cannot be read ({error.strerror})") from error
    except UnicodeError:
        raise ConfigError(where, f"{path} cannot be read as {encoding} text") from None


def read_token(where: str, path: str) -> str:
    """Raises ConfigError; no message shows the token."""
    token = read_private_text(where, path, encoding="ASCII").strip()
    if not token.isprintable() or " " in token:
        raise ConfigError(where, f"{path} holds more than one word", "A token is one line without spaces.")
    return token


def write_private_file(path: Path, data: bytes) -> None:
    """Whole or not at all. Raises OSError."""
    new = path.with_suffix(f".{os.getpid()}.new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(path)
