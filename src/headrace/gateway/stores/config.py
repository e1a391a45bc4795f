"""Defines the options that choose a store, refuses an insecure one on another machine, and opens the stores that are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.core.option import option
from headrace.gateway.stores.redis import RedisStore, open_redis
from headrace.gateway.stores.sqlite import SqliteStore
from headrace.gateway.stores.sqlite_thread import IN_MEMORY
from headrace.gateway.stores.store import Store, StoreLimits
from headrace.machine.hosts import is_loopback
from headrace.machine.private_files import read_token

URL_SCHEMES = ("redis://", "rediss://", "unix://")

MAX_STREAMS_BYTES = 256 << 20
MAX_STREAM_BYTES = 1 << 20
"""A longer answer (eight bytes per token) cannot be continued."""


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


@dataclass(frozen=True, slots=True)
class Stores:
    """Opens the stores of one configuration, one for each part: none pushes out entries of another."""

    config: StoreConfig
    state: str
    tenant_share: Callable[[], float]
    unix_time: Clock

    def limits(self, *, entry: int, total: int) -> StoreLimits:
        return StoreLimits(entry=entry, total=total, tenant_share=self.tenant_share)

    def open(self, part: str, limits: StoreLimits) -> Store:
        """Raises ConfigError."""
        if self.config.url:
            return RedisStore(open_redis(self.config.url, password=self.config.password()), limits, part)
        return SqliteStore(str(Path(self.state) / f"{part or 'entries'}.db") if self.state else IN_MEMORY, limits, self.unix_time)

    def open_streams(self) -> Store:
        return self.open("", self.limits(entry=MAX_STREAM_BYTES, total=MAX_STREAMS_BYTES))
