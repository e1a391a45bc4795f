"""Defines the options of usage records."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from headrace.core.errors import ConfigError
from headrace.core.option import Role, check_options, option, required
from headrace.gateway.stores.config import InsecureStore
from headrace.machine.hosts import is_loopback
from headrace.machine.private_files import check_private_file, read_private_text

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
        properties = read_properties(f"{where}.properties_file", self.properties_file) if self.properties_file else {}
        protocol = properties.get("security.protocol")
        has_certificate = {"ssl.certificate.location", "ssl.key.location"} <= properties.keys()
        if not (self.allow_insecure or protocol == "SASL_SSL" or (protocol == "SSL" and has_certificate)):
            for index, broker in enumerate(self.brokers):
                if not is_loopback(urlsplit(f"//{broker}").hostname or ""):
                    lacks = "properties_file with security.protocol=SASL_SSL (or SSL and the client's certificate and key)"
                    raise InsecureStore(f"{where}.brokers[{index}]", lacks)
        return properties


PROPERTIES: dict[str, tuple[str, ...]] = {
    "security.protocol": ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"),
    "ssl.endpoint.identification.algorithm": ("HTTPS",),
    "sasl.mechanism": ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"),
    **dict.fromkeys(("sasl.username", "sasl.password", "client.id"), ()),
    **dict.fromkeys(("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.key.password"), ()),
}
"""Name -> the values that it may have, in letters of either size; none: any text."""


NEEDS = {
    "ssl.certificate.location": "ssl.key.location",
    "ssl.key.location": "ssl.certificate.location",
    "ssl.key.password": "ssl.key.location",
}
"""A property -> the one without which librdkafka ignores it."""


def read_properties(where: str, path: str) -> dict[str, str]:
    """A file of librdkafka's properties: NAME=VALUE on each line, and lines of comment that begin with `#`. sasl.mechanisms becomes
    sasl.mechanism.

    Only names on a list are allowed, since other properties load code, run a command or turn verification off. An error shows no value
    except the path of a file, since any other may be a secret. Raises ConfigError.
    """
    properties: dict[str, str] = {}
    for number, line in enumerate(read_private_text(where, path).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        name = name.replace("sasl.mechanisms", "sasl.mechanism")
        if name not in PROPERTIES:
            shown = f" ({name})" if equals and re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name) else ""
            remedy = f"Leave it out. Known: {', '.join(PROPERTIES)}."
            raise ConfigError(where, f"{path}: line {number}{shown} is no property that is read", remedy)
        choices = PROPERTIES[name]
        if not value or (choices and value.upper() not in choices):
            raise ConfigError(where, f"{path}: {name} is {'not one of ' + ', '.join(choices) if choices else 'empty'}")
        if name in properties:
            raise ConfigError(where, f"{path}: line {number}: {name} is given twice")
        properties[name] = value.upper() if choices else value
    protocol = properties.get("security.protocol", "")
    needed = ["sasl.mechanism", "sasl.username", "sasl.password"] if "SASL" in protocol else []
    for name in ("security.protocol", *needed):  # a mechanism that is not named is GSSAPI, for which librdkafka runs a command
        if name not in properties:
            raise ConfigError(where, f"{path}: {name} is missing")
    for name, value in properties.items():
        layer = name.partition(".")[0].upper()
        if layer in ("SASL", "SSL") and layer not in protocol:
            raise ConfigError(where, f"{path}: {name} has no effect without {layer} in security.protocol")
        if NEEDS.get(name, name) not in properties:
            raise ConfigError(where, f"{path}: {name} has no effect without {NEEDS[name]}")
        if name.endswith(".location") and not (os.access(value, os.R_OK) and _is_file(name, value)):
            raise ConfigError(where, f"{path}: {name}: {value} cannot be read", "It is a file that the user of Headrace can read.")
    if "ssl.key.location" in properties:
        check_private_file(where, properties["ssl.key.location"])
    return properties


def _is_file(name: str, path: str) -> bool:
    """Authorities may also be in a folder."""
    return os.path.isfile(path) or (name == "ssl.ca.location" and os.path.isdir(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickHouseConfig:
    url: str = required("`http://HOST:8123`, or `https://USER@HOST:8443` with a user.")
    table: str = option("default.headrace_usage", "Database and table, joined by a dot; made where they are not there, if the user may.")
    password_file: str = option("", "File with the password of the user in `url`, closed to other users.", role=Role.SECURITY)
    allow_insecure: bool = option(False, "Allow a server on another machine without https, or without a user.", role=Role.SECURITY)

    @property
    def address(self) -> SplitResult:
        return urlsplit(self.url)

    @property
    def user(self) -> str:
        return unquote(self.address.username or "")

    @property
    def full_table(self) -> str:
        return self.table if "." in self.table else f"default.{self.table}"

    def checked(self, where: str) -> ClickHouseConfig:
        """Raises ConfigError about a key below `where`."""
        self._check_url(f"{where}.url")
        if TABLE.fullmatch(self.table) is None:
            raise ConfigError(f"{where}.table", f"{self.table!r} is not DATABASE.TABLE, names of letters, digits and _")
        if bool(self.user) != bool(self.password_file):
            lacking, what = ("password_file", "password") if self.user else ("url", "user")
            raise ConfigError(f"{where}.{lacking}", f"has no {what}", "Give both or none.")
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
            raise ConfigError(where, "is no address of ClickHouse's HTTP port", "Write http://HOST:8123 or https://USER@HOST:8443.")
        if parts.password is not None:
            raise ConfigError(where, "holds a password", "Write it into a file, closed to other users: password_file.")


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
