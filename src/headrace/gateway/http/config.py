"""What the configuration says of the HTTP server: its certificate, its bounds, and which pages and names may use it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_network

from headrace.core.errors import ConfigError
from headrace.policy.limits.tier import DeploymentBudget

_HOST = r"(?:[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])"
HOST_NAME = re.compile(_HOST)
ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]{{0,31}}://{_HOST}(?::[0-9]{{1,5}})?")
"""As browsers write it: lower case, no path. Apps and extensions have schemes of their own."""

DEFAULT_PORTS = {"http": "80", "https": "443"}
"""Scheme -> the port that browsers leave out of an Origin."""

ANY_ORIGIN = "*"

FAIL_OPEN, FAIL_CLOSED = "open", "closed"
"""Values of `limits.on_store_failure`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTls:
    """Paths of two PEM files.

    certificate  of this server, intermediate ones after it
    key          its private key: no passphrase, and closed to other users
    """

    certificate: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Caps at the border. Each is inclusive; what exceeds one is refused with field, limit, value and remedy.

    Several gateway workers share those that count over all requests (`worker.SHARED_LIMITS`).

    max_body_bytes        a whole request body
    max_connections       open sockets, as far as open files allow (ulimit -n); one more is refused with 503
    max_requests          in the gateway at once; one more is refused with 429
    max_text_workers      processes that render templates and tokenize
    max_prompt_bytes      bodies and prompts of all requests; one more is refused with 429. None: a sixteenth of the machine's memory
    max_answer_bytes      log-probabilities of all requests, and answers until they are written; one more is refused with 429
    max_tenant_share      of either and of each store, for one tenant. None: a quarter where keys name several tenants and from the first
                          stored key on, all where there is one
    daily_budget, monthly_budget  money that all tenants together may use in a UTC day, a UTC month, in the currency of `prices`
    on_store_failure      what a request with limits gets while their store fails: "closed": 503; "open": it is not counted
    """

    max_body_bytes: int = 1 << 20
    max_connections: int = 16_384
    max_requests: int = 4096
    max_text_workers: int = 2
    max_prompt_bytes: int | None = None
    max_answer_bytes: int = 40 << 20
    max_tenant_share: float | None = None
    daily_budget: float | None = None
    monthly_budget: float | None = None
    on_store_failure: str = FAIL_CLOSED

    @property
    def max_text_queue(self) -> int:
        """Waiting jobs of less than 64 KiB, and as many larger ones; beyond it the tenant with most of them gets 429.

        A request has one job at a time. As many again are of requests that are not counted: bodies being parsed, and those that tokenize.
        """
        return 2 * self.max_requests

    @property
    def budget(self) -> DeploymentBudget:
        return DeploymentBudget(self.daily_budget, self.monthly_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds.

    keep_alive_s  idle connection between requests
    sse_ping_s    a stream without a chunk for this long gets a comment line
    request_s     deadline of every request, counted from its arrival; None = none
    drain_s       after SIGTERM: what running requests may take to end
    failover_s    a running request whose engine was lost waits at most this long for one that can continue it; 0: it ends at once
    stream_resume_s  how long after its end a stream can be continued by its client; 0: never, and events have no ids
    """

    keep_alive_s: float = 75.0
    sse_ping_s: float = 10.0
    request_s: float | None = None
    drain_s: float = 30.0
    failover_s: float = 60.0
    stream_resume_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What the HTTP server reads of the gateway's configuration."""

    host: str
    port: int
    tls: HttpTls | None
    limits: Limits
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
    """Raises ConfigError for what is no network in CIDR notation."""
    for index, network in enumerate(networks):
        try:
            ip_network(network)
        except ValueError as error:
            raise ConfigError(f"{where}[{index}]", f"{network!r} is no network ({error})", "Write 10.0.0.0/8, or one address.") from None
