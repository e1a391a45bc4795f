"""Defines the options of the HTTP server, and computes how many connections this process can hold with the files it may open."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_network

from headrace.core.errors import ConfigError
from headrace.core.option import Reload, Role, option, required
from headrace.machine.resources import num_open_files, raise_open_files_limit
from headrace.policy.limits.price import MAX_MONEY, MIN_MONEY
from headrace.policy.limits.tier import DeploymentBudget

_HOST = r"(?:[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])"
HOST_NAME = re.compile(_HOST)
ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]{{0,31}}://{_HOST}(?::[0-9]{{1,5}})?")
"""As browsers write it: lower case, no path."""

DEFAULT_PORTS = {"http": "80", "https": "443"}

ANY_ORIGIN = "*"

MIN_MAX_CONNECTIONS = 16_384
"""Many clients keep connections open, whatever few requests may run at once."""

FAIL_OPEN, FAIL_CLOSED = "open", "closed"
"""Values of `limits.on_store_failure`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTls:
    """PEM files."""

    certificate: str = required(
        "PEM file with the certificate of the port, intermediate ones after it: the port speaks https alone then. Changed files are read "
        "beside a later connection, at most once a second, and hold for those after it: after a quiet time one more gets the old one.",
    )
    key: str = required("PEM file with its private key, without passphrase; refused where other users can read it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Inclusive."""

    max_body_bytes: int = option(1 << 20, "A request's body.", low=1)
    max_requests: int = option(
        4096, "Requests at once; one more gets 429. A tenant may have `max_tenant_share` of them.", low=1, is_shared=True
    )
    max_tenant_share: float | None = option(
        None,
        "Part that one tenant may have of the site's requests, of their bytes, and of each store. Where keys name several "
        "tenants, 1 is refused ([identity.md](identity.md)).",
        shown="1; 0.25 where keys name several tenants, and from the first stored key on",
        above=0.0,
        high=1,
        role=Role.TENANTS,
    )
    daily_budget: float | None = option(
        None,
        "Money that all tenants together may use in a UTC day, in the currency of `prices`; every model needs a price then "
        "([limits.md](limits.md)).",
        low=MIN_MONEY,
        high=MAX_MONEY,
        role=Role.TENANTS,
    )
    monthly_budget: float | None = option(None, "The same in a UTC month.", low=MIN_MONEY, high=MAX_MONEY, role=Role.TENANTS)
    on_store_failure: str = option(
        FAIL_CLOSED,
        "What a request with limits gets while their store fails: `closed`: 503; `open`: it is answered, and not counted.",
        one_of=(FAIL_OPEN, FAIL_CLOSED),
        role=Role.TENANTS,
    )

    # Not in an operator's file: what bounds them is the machine or another key (`cli.config.load.INSTEAD`).
    max_text_workers: int = option(2, "Processes that render templates and tokenize, at least one a gateway worker.", low=1, is_shared=True)
    max_prompt_bytes: int | None = option(
        None, "Bytes of the bodies and prompts of all requests; None: a part of the machine's memory.", low=1, is_shared=True
    )
    max_answer_bytes: int = option(40 << 20, "Bytes of log-probabilities and unwritten answers of all requests.", low=1, is_shared=True)

    @property
    def max_connections(self) -> int:
        """For one process, as far as open files allow; one more gets 503."""
        return max(MIN_MAX_CONNECTIONS, 2 * self.max_requests)

    @property
    def max_text_queue(self) -> int:
        """For jobs below 64 KiB, and the same for larger ones. Beyond it the tenant with most of them gets 429.

        The factor 2 is for requests that `max_requests` does not count: those that only tokenize.
        """
        return 2 * self.max_requests

    @property
    def budget(self) -> DeploymentBudget:
        return DeploymentBudget(self.daily_budget, self.monthly_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds."""

    keep_alive_s: float = option(
        75.0,
        "Seconds that an idle connection stays open between requests: longer than a proxy in front keeps it.",
        above=0.0,
        reload=Reload.LIVE,
    )
    request_s: float | None = option(None, "Deadline of every request, counted from its arrival.", above=0.0, reload=Reload.LIVE)
    drain_s: float = option(30.0, "Seconds that running requests may take to end after SIGTERM.", above=0.0, reload=Reload.LIVE)
    failover_s: float = option(
        60.0,
        "A running request whose engine was lost waits at most this long for one that can continue it ([failover.md](failover.md)); 0: it "
        "ends at once.",
        low=0.0,
        reload=Reload.LIVE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str
    port: int
    tls: HttpTls | None
    timeouts: Timeouts
    allowed_origins: tuple[str, ...]


def check_names(hosts: tuple[str, ...], origins: tuple[str, ...]) -> None:
    for index, host in enumerate(hosts):
        if HOST_NAME.fullmatch(host.lower()) is None:
            remedy = "Write the name alone: no scheme, no port, no path; an IPv6 address in brackets."
            raise ConfigError(f"allowed_hosts[{index}]", f"{host!r} is not a host's name", remedy)
    for index, origin in enumerate(origins):
        if origin != ANY_ORIGIN and ORIGIN.fullmatch(origin.lower()) is None:
            remedy = 'Write https://app.example, without a path and with its port where it has one, or "*" for every page there is.'
            raise ConfigError(f"allowed_origins[{index}]", f"{origin!r} is not an origin", remedy)
        port = origin.rpartition(":")[2]
        if DEFAULT_PORTS.get(origin.partition(":")[0].lower()) == port:
            remedy = f"Write {origin.removesuffix(':' + port)}: browsers leave out the port that a scheme has by default."
            raise ConfigError(f"allowed_origins[{index}]", f"{origin!r} is an origin that no browser sends", remedy)


def check_networks(where: str, networks: Sequence[str]) -> None:
    for index, network in enumerate(networks):
        try:
            ip_network(network)
        except ValueError as error:
            raise ConfigError(f"{where}[{index}]", f"{network!r} is no network ({error})", "Write 10.0.0.0/8, or one address.") from None


OWN = 40
"""For the event loop, gRPC, the request log and the listener."""

PER_REPLICA = 4

MAX_FOREIGN_CONNECTIONS = 256

PER_FOREIGN = 2
"""For models and metrics."""

TEXT_HOST = 2
"""The socket to the host, and a worker's end of a socket pair until the host has it. Each worker has one more."""

MIN_CONNECTIONS = 8

ULIMIT_STEP = 4096

SPARE = 1024

MAX_REFUSALS = 64
"""One more closes the oldest."""


@dataclass(frozen=True, slots=True)
class ConnectionLimit:
    max_connections: int
    max_refusals: int


def connection_limit(
    max_connections: int, num_replicas: int, num_foreign: int = 0, *, num_text_workers: int, num_connections: int = 0
) -> ConnectionLimit:
    """Raises the soft limit of open files if necessary.

    num_connections: open now. Raises ConfigError when fewer than MIN_CONNECTIONS fit.
    """
    kept = OWN + PER_REPLICA * num_replicas + (MAX_FOREIGN_CONNECTIONS + PER_FOREIGN) * num_foreign + num_text_workers + TEXT_HOST
    taken = num_open_files() - num_connections + kept
    most = raise_open_files_limit(taken + max_connections + MAX_REFUSALS)
    return divide(max_connections, taken, most)


def divide(max_connections: int, taken: int, most: int) -> ConnectionLimit:
    """An eighth is for refusals. taken: descriptors in use or reserved; most: limit of open descriptors. Raises ConfigError."""
    free = most - taken
    refusals = max(2, min(MAX_REFUSALS, free // 8))
    least = min(max_connections, MIN_CONNECTIONS)
    if free - refusals < least:
        needed = taken + 2 + least
        suffices = math.ceil((needed + SPARE) / ULIMIT_STEP) * ULIMIT_STEP
        raise ConfigError(
            "open files",
            f"a process may have {most} (ulimit -n), {taken} are in use or kept for replicas, foreign servers, text workers and logs, "
            f"and {least} connections need {needed}",
            f"Raise the limit: ulimit -n {suffices}, or LimitNOFILE= of the service.",
        )
    return ConnectionLimit(min(max_connections, free - refusals), refusals)
