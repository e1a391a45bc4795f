"""The part of the gateway's configuration that is about foreign servers: OpenAI-compatible servers that answer for a model.

Addresses are the operator's alone, and so are the rules on them: no password in an address, no link-local address unless it is allowed.
A host name is held to the second rule when it is connected to (`upstream.foreign_session`), since its address may change.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from headrace.core.errors import ConfigError
from headrace.core.hosts import is_link_local

MAX_FOREIGN_SERVERS = 16
"""Foreign servers of one model."""

MAX_SECONDS = 86400
MAX_ORDER = 100
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_TIMEOUTS = ("connect_s", "first_token_s", "inter_chunk_s")
_LINK_LOCAL = "Cloud machines hand out credentials at such addresses. If a model server is really there, set allow_link_local."


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignConfig:
    """An OpenAI-compatible server that answers for a model.

    url               of its API, http or https, up to and with /v1
    name              label `replica` of metrics and logs; default: foreign-N, N its place in the list
    model             what it calls the model; default: the name here
    order             servers of the lowest order share the requests; a higher one gets those that no lower one takes
    api_key_file      a file that holds the key it wants; api_key_env: or the variable of this process's environment that does
    cache_salt        each tenant's salt is sent, so that tenants share no cached prefix there (vLLM and Headrace know the field). Off for a
                      server that refuses unknown fields: then all tenants share its cache
    allow_link_local  connect although the address is link-local or a cloud's metadata service
    connect_s         seconds to look up the address, connect and shake hands
    first_token_s     seconds from sending a request to the first token of its answer
    inter_chunk_s     seconds between two pieces of an answer
    """

    url: str
    name: str = ""
    model: str = ""
    order: int = 0
    api_key_file: str = ""
    api_key_env: str = ""
    cache_salt: bool = True
    allow_link_local: bool = False
    connect_s: float = 5.0
    first_token_s: float = 120.0
    inter_chunk_s: float = 60.0

    def checked(self) -> ForeignConfig:
        """This value if its rules hold. Raises ConfigError."""
        parts = _checked_url(self.url)
        if is_link_local(parts.hostname or "") and not self.allow_link_local:
            raise ConfigError("url", "is a link-local address or that of a cloud's metadata service", _LINK_LOCAL)
        if self.name and _NAME.fullmatch(self.name) is None:
            raise ConfigError("name", f"{self.name!r} is not a replica name")
        if self.api_key_file and self.api_key_env:
            raise ConfigError("api_key_file", "is given beside api_key_env", "Give one of them.")
        if not 0 <= self.order <= MAX_ORDER:
            raise ConfigError("order", f"{self.order} is outside 0..{MAX_ORDER}")
        for name in _TIMEOUTS:
            if not 0 < getattr(self, name) <= MAX_SECONDS:
                raise ConfigError(name, f"{getattr(self, name)} is outside 0 < {name} <= {MAX_SECONDS} seconds")
        return self


def check_foreign(where: str, upstreams: Sequence[ForeignConfig], *, taken: Sequence[str] = ()) -> None:
    """Raise ConfigError for a server that breaks a rule, too many of them, or two with one name. taken: names of the model's replicas"""
    if len(upstreams) > MAX_FOREIGN_SERVERS:
        raise ConfigError(where, f"names {len(upstreams)} servers, more than {MAX_FOREIGN_SERVERS}")
    for index, upstream in enumerate(upstreams):
        try:
            upstream.checked()
        except ConfigError as error:
            raise error.at(f"{where}[{index}].{error.where}") from error
    names = [name for name, _ in named(upstreams)]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"{where}[{index}].name", f"{name!r} is the name of another server of this model")
        if name in taken:
            raise ConfigError(f"{where}[{index}].name", f"{name!r} is the name of one of this model's replicas")


def named(upstreams: Sequence[ForeignConfig]) -> Iterator[tuple[str, ForeignConfig]]:
    """Each server under its name."""
    for index, upstream in enumerate(upstreams):
        yield upstream.name or f"foreign-{index}", upstream


def _checked_url(url: str) -> SplitResult:
    """Raises ConfigError, which shows no password."""
    if "@" in url:
        reason = "holds an @, and no user name or password is taken from an address"
        raise ConfigError("url", reason, "Keys go into api_key_file or api_key_env; an @ of the path is written %40.")
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        is_url = False
    if not is_url or " " in url or _is_wrong_ipv4(parts.hostname or ""):
        raise ConfigError("url", f"{re.split('[?#]', url)[0]!r} is not the address of a server", "Write http://HOST:PORT/v1.")
    if parts.query or parts.fragment:
        raise ConfigError("url", "holds more than host and path", "Keys go into api_key_file or api_key_env.")
    return parts


def _is_wrong_ipv4(host: str) -> bool:
    """Whether `host` ends in a number, as no name does, and is no IPv4 address in four parts: such forms are read differently by different
    programs."""
    if ":" in host or not host.rstrip(".").rpartition(".")[2].isdecimal():
        return False
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return True
    return False
