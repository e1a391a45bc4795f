"""Defines the options that choose a store, and refuses an insecure one on another machine."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace.core.errors import ConfigError
from headrace.core.option import option
from headrace.machine.hosts import is_loopback
from headrace.machine.private_files import read_token

URL_SCHEMES = ("redis://", "rediss://", "unix://")


class InsecureStore(ConfigError):
    def __init__(self, where: str, lacks: str) -> None:
        super().__init__(where, f"is on another machine and has no {lacks}", "Set it, or allow that with allow_insecure: true.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Without `url`, entries are in the state folder, or without one in this process's memory."""

    url: str = option(
        "",
        "Redis or Valkey that gateways on several machines share: `redis://HOST:PORT/0`, `rediss://` with TLS, or `unix:///path`, with a "
        "user's name where it has one. Its maxmemory-policy is noeviction or volatile-ttl: the others evict the store's index, whose sums "
        "begin anew then. Needs `pip install 'headrace[redis]'`.",
    )
    password_file: str = option("", "File with the password for `url`, closed to other users; a password in `url` is refused.")
    allow_insecure: bool = option(False, "Allow a server on another machine without TLS (`rediss://`), or without a password.")

    def checked(self) -> StoreConfig:
        """Raises ConfigError."""
        if self.url and not self.url.startswith(URL_SCHEMES):
            raise ConfigError("store.url", "is no address of Redis or Valkey", "Write redis://HOST:PORT/0, rediss:// or unix:///path.")
        if self.url and urlsplit(self.url).password is not None:
            raise ConfigError("store.url", "holds a password", "Write it into a file, closed to other users: store.password_file.")
        if self.password_file and not self.url:
            raise ConfigError("store.password_file", "is given without store.url")
        self._check_is_safe()
        return self

    def password(self) -> str | None:
        """Raises ConfigError."""
        return read_token("store.password_file", self.password_file) if self.password_file else None

    def _check_is_safe(self) -> None:
        address = urlsplit(self.url)
        if not self.url or address.scheme == "unix" or self.allow_insecure or is_loopback(address.hostname or ""):
            return
        if address.scheme != "rediss":
            raise InsecureStore("store.url", "TLS (rediss://)")
        if not self.password_file:
            raise InsecureStore("store.url", "password_file")
