"""Defines the options of usage records. A server on another machine must be reached over TLS with authentication, unless `allow_insecure`
is set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from headrace.core.errors import ConfigError
from headrace.core.option import Role, check_options, option, required
from headrace.gateway.ledger.kafka_properties import read_properties
from headrace.gateway.stores.config import InsecureStore
from headrace.machine.hosts import is_loopback

TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
TABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,127}\.)?[A-Za-z_][A-Za-z0-9_]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaConfig:
    brokers: tuple[str, ...] = required("`HOST:PORT` of some of the cluster's brokers.")
    topic: str = option("headrace-usage", "Topic that gets every record, as it exists or as the cluster makes it.")
    properties_file: str = option(
        "", "File of librdkafka's properties for TLS and SASL, closed to other users ([usage.md](usage.md)).", role=Role.SECURITY
    )
    allow_insecure: bool = option(
        False, "Allow brokers on other machines without TLS, or without a user or certificate.", role=Role.SECURITY
    )

    def checked(self, where: str) -> KafkaConfig:
        """Raises ConfigError about a key below `where`; `properties` checks the file."""
        if not self.brokers:
            raise ConfigError(f"{where}.brokers", "is empty", "Write HOST:PORT of one or more brokers.")
        for index, broker in enumerate(self.brokers):
            _check_broker(f"{where}.brokers[{index}]", broker)
        if TOPIC.fullmatch(self.topic) is None:
            raise ConfigError(f"{where}.topic", f"{self.topic!r} is no name of a topic", "Use letters, digits, and . _ - only.")
        if not self.properties_file:
            self.properties(where)
        return self

    def properties(self, where: str = "usage.kafka") -> dict[str, str]:
        """Raises ConfigError, and InsecureStore if a remote broker would not be secured."""
        found = read_properties(f"{where}.properties_file", self.properties_file) if self.properties_file else {}
        protocol, has_certificate = found.get("security.protocol"), {"ssl.certificate.location", "ssl.key.location"} <= found.keys()
        if not (self.allow_insecure or protocol == "SASL_SSL" or (protocol == "SSL" and has_certificate)):
            for index, broker in enumerate(self.brokers):
                if not is_loopback(urlsplit(f"//{broker}").hostname or ""):
                    lacks = "properties_file with security.protocol=SASL_SSL (or SSL and the client's certificate and key)"
                    raise InsecureStore(f"{where}.brokers[{index}]", lacks)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickHouseConfig:
    url: str = required("`http://HOST:8123` or `https://HOST:8443`.")
    table: str = option("default.headrace_usage", "Database and table, joined by a dot; made where they are not there, if the user may.")
    user: str = option("", "Beside `password_file`.", role=Role.SECURITY)
    password_file: str = option("", "File with its password, closed to other users.", role=Role.SECURITY)
    ca_file: str = option("", "Authorities that sign the server's certificate.", shown="the system's", role=Role.SECURITY)
    allow_insecure: bool = option(False, "Allow a server on another machine without https, or without a user.", role=Role.SECURITY)

    @property
    def address(self) -> SplitResult:
        return urlsplit(self.url)

    @property
    def full_table(self) -> str:
        return self.table if "." in self.table else f"default.{self.table}"

    def checked(self, where: str) -> ClickHouseConfig:
        """Raises ConfigError about a key below `where`."""
        self._check_url(f"{where}.url")
        if TABLE.fullmatch(self.table) is None:
            raise ConfigError(f"{where}.table", f"{self.table!r} is not DATABASE.TABLE, names of letters, digits and _")
        for name, other in (("user", "password_file"), ("password_file", "user")):
            if getattr(self, name) and not getattr(self, other):
                raise ConfigError(f"{where}.{name}", f"is given without {other}")
        if self.ca_file and self.address.scheme != "https":
            raise ConfigError(f"{where}.ca_file", "is given without an https:// url")
        if not (self.allow_insecure or is_loopback(self.address.hostname or "")):
            if self.address.scheme != "https":
                raise InsecureStore(f"{where}.url", "https")
            if not self.user:
                raise InsecureStore(f"{where}.url", "user")
        return self

    def _check_url(self, where: str) -> None:
        try:
            parts = self.address
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            is_address = False
        if not is_address or parts.path not in ("", "/") or parts.query or parts.fragment:
            raise ConfigError(where, "is no address of ClickHouse's HTTP port", "Write http://HOST:8123 or https://HOST:8443.")
        if parts.username is not None or parts.password is not None:
            raise ConfigError(where, "holds a user or a password", "Write them as user and password_file.")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageConfig:
    """Nothing is kept where there is no `state`."""

    retention_days: int = option(90, "Days for which usage.db keeps a record.", low=1)
    kafka: KafkaConfig | None = option(None, "Topic that gets every record; ClickHouse then gets them from there (`headrace log archive`).")
    clickhouse: ClickHouseConfig | None = option(None, "Server that gets every record.")

    def checked(self, where: str = "usage") -> UsageConfig:
        """Raises ConfigError about a key below `where`."""
        check_options(self, where)
        if self.kafka is not None:
            self.kafka.checked(f"{where}.kafka")
        if self.clickhouse is not None:
            self.clickhouse.checked(f"{where}.clickhouse")
        return self


def _check_broker(where: str, broker: str) -> None:
    try:
        parts = urlsplit(f"//{broker}")
        is_address = bool(parts.hostname and parts.port) and parts.netloc == broker and "@" not in broker
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(where, f"{broker!r} is not HOST:PORT")
