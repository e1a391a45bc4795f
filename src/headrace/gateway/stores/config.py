"""Which store a gateway uses, and how much it may hold."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace.core.errors import ConfigError

URL_SCHEMES = ("redis://", "rediss://", "unix://")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Give `path` or `url`; without either, entries are kept in the memory of this process alone.

    path             SQLite file, which the processes of one machine share; its folder must exist
    url              Redis or Valkey, which gateways on several machines share; without its password, since it may be shown
    password_file    file with that password, closed to other users
    max_bytes        of all entries
    max_entry_bytes  of one entry: eight bytes per token of an answer
    """

    path: str = ""
    url: str = ""
    password_file: str = ""
    max_bytes: int = 256 << 20
    max_entry_bytes: int = 1 << 20

    def checked(self) -> StoreConfig:
        """This value if its rules hold. Raises ConfigError."""
        if self.path and self.url:
            raise ConfigError("store.url", "is given beside store.path", "Entries are kept in one of the two.")
        if self.url and not self.url.startswith(URL_SCHEMES):
            raise ConfigError("store.url", "is no address of Redis or Valkey", "Write redis://HOST:PORT/0, rediss:// or unix:///path.")
        if self.url and urlsplit(self.url).password is not None:
            raise ConfigError("store.url", "holds a password", "Write it into a file, closed to other users: store.password_file.")
        if self.password_file and not self.url:
            raise ConfigError("store.password_file", "is given without store.url")
        for name in ("max_bytes", "max_entry_bytes"):
            if (value := getattr(self, name)) <= 0:
                raise ConfigError(f"store.{name}", f"{value} is not positive")
        return self
