"""Which store a gateway uses; how long, and in how many bytes, it keeps sessions and whole answers there."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace.core.errors import ConfigError
from headrace.core.hosts import is_loopback
from headrace.wire.private_files import read_token

URL_SCHEMES = ("redis://", "rediss://", "unix://")


class InsecureStore(ConfigError):
    """A store on another machine that would get records in the clear, or without proof of which sender it has."""

    def __init__(self, where: str, lacks: str) -> None:
        super().__init__(where, f"is on another machine and has no {lacks}", "Set it, or allow that with allow_insecure: true.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Give `path` or `url`; without either, entries are in the state folder, or without one in the memory of this process alone.

    path             SQLite file of streams, which the processes of one machine share; its folder must exist
    url              Redis or Valkey, which gateways on several machines share; without its password, since it may be shown
    password_file    file with that password, closed to other users
    allow_insecure   a server on another machine without TLS, or without a password
    max_bytes        of all entries
    max_entry_bytes  of one entry: eight bytes per token of an answer
    """

    path: str = ""
    url: str = ""
    password_file: str = ""
    allow_insecure: bool = False
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
        self._check_is_safe()
        for name in ("max_bytes", "max_entry_bytes"):
            if (value := getattr(self, name)) <= 0:
                raise ConfigError(f"store.{name}", f"{value} is not positive")
        return self

    def password(self) -> str | None:
        """What its file holds now. Raises ConfigError."""
        return read_token("store.password_file", self.password_file) if self.password_file else None

    def _check_is_safe(self) -> None:
        """Raises InsecureStore."""
        address = urlsplit(self.url)
        if not self.url or address.scheme == "unix" or self.allow_insecure or is_loopback(address.hostname or ""):
            return
        if address.scheme != "rediss":
            raise InsecureStore("store.url", "TLS (rediss://)")
        if not self.password_file:
            raise InsecureStore("store.url", "password_file")


def _check_bytes(where: str, max_entry_bytes: int, max_bytes: int) -> None:
    if not 0 < max_entry_bytes <= max_bytes:
        raise ConfigError(f"{where}.max_entry_bytes", f"{max_entry_bytes} is outside 1..max_bytes ({max_bytes})")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The response cache.

    enabled          for tenants without an option `cache` of their own
    models           names of the models whose answers are cached; empty: all
    ttl_s            seconds that an answer is kept
    max_bytes        of all entries;  max_entry_bytes  of one
    """

    enabled: bool = False
    models: tuple[str, ...] = ()
    ttl_s: float = 3600.0
    max_bytes: int = 64 << 20
    max_entry_bytes: int = 1 << 20

    def checked(self) -> CacheConfig:
        """This value if its rules hold. Raises ConfigError."""
        if not self.ttl_s > 0:
            raise ConfigError("cache.ttl_s", f"{self.ttl_s} is not positive", "Write enabled: false for no cache.")
        _check_bytes("cache", self.max_entry_bytes, self.max_bytes)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyConfig:
    """Answers to requests with an Idempotency-Key.

    ttl_s            seconds that an answer is kept for retries; 0: the header has no effect
    max_bytes        of all entries;  max_entry_bytes  of one
    """

    ttl_s: float = 86400.0
    max_bytes: int = 64 << 20
    max_entry_bytes: int = 1 << 20

    def checked(self) -> IdempotencyConfig:
        """This value if its rules hold. Raises ConfigError."""
        if self.ttl_s < 0:
            raise ConfigError("idempotency.ttl_s", f"{self.ttl_s} is negative", "Write 0 for no effect of the header.")
        _check_bytes("idempotency", self.max_entry_bytes, self.max_bytes)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """
    ttl_s              seconds since its last turn that a session is kept; 0: none is kept, and a request with one is refused
    max_session_bytes  of the messages of one session, as JSON
    max_bytes          of all sessions, compressed; one tenant may fill `limits.max_tenant_share` of it
    """

    ttl_s: float = 3600.0
    max_session_bytes: int = 1 << 20
    max_bytes: int = 256 << 20
