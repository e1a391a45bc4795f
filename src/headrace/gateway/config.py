"""The gateway's configuration: one JSON file, written by the supervisor, or the same data of `headrace gateway`; decoded once.

Nothing here is read from the environment or the command line, which `cli.config` does. The key of a foreign server is only named here;
`upstream.foreign` reads it when the gateway opens. API keys are kept as SHA-256 digests from the moment the file is decoded, and no repr of
these values shows a secret.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.hashing import check_secret
from headrace.core.request import PriorityClass
from headrace.core.strict_decode import NeedsExactlyOne, decode, read_json_object
from headrace.gateway.cache.config import CacheConfig, IdempotencyConfig
from headrace.gateway.http.config import HttpTls
from headrace.gateway.http.forwarded import check_networks
from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.model_config import ModelConfig, check_models
from headrace.gateway.sessions.config import SessionConfig
from headrace.gateway.stores.config import StoreConfig
from headrace.policy.admission.config import AdmissionRules
from headrace.policy.limits.price import Price, check_money
from headrace.policy.limits.tier import DeploymentBudget, Tier, all_tiers

SHA256_HEX = re.compile(r"[0-9a-f]{64}")
_HOST = r"(?:[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])"
HOST_NAME = re.compile(_HOST)
ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]{{0,31}}://{_HOST}(?::[0-9]{{1,5}})?")
"""As browsers write it: lower case, no path. Apps and extensions have schemes of their own."""

DEFAULT_PORTS = {"http": "80", "https": "443"}
"""Scheme -> the port that browsers leave out of an Origin."""

ANY_ORIGIN = "*"
LOG_TARGETS = ("on", "off", "stderr")
LOG_WORDS = {*LOG_TARGETS, "", "true", "false", "yes", "no", "none", "null", "stdout"}
"""Words that are meant as a switch and never as the name of a request log's file, in lower case."""

MAY_BE_ZERO = ("failover_s", "slow_start_s", "stream_resume_s", "ttl_s")
"""Times whose 0 turns something off. Any other limit or time that is not positive is refused."""

FAIL_OPEN, FAIL_CLOSED = "open", "closed"
"""Values of `limits.on_store_failure`."""

MIN_KEY_CHARS = 8
PLAIN_PRIORITY, PLAIN_WEIGHT = "standard", 1.0
"""Class and weight of a key that names neither these nor a tier."""

MAX_WORKERS = 64
"""Gateway processes on one port. Each has threads, a tokenizer and connections to every engine of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """An API key and its tenant. Give `key` (plain, hashed at once) or `sha256` (hex of the digest), never both.

    tenant    opaque name: fairness, cache salt and log; defaults to a name made from the digest
    user      the person or program that uses it; limits and usage may be by user
    tier      name of the tenant's rules; empty: the default tier's, with the next two
    priority  class of this key's requests (premium | standard | batch); a body's `priority` may only lower it
    weight    share of the tenant among the tenants of its tier
    """

    key: str = field(default="", repr=False)
    sha256: str = field(default="", repr=False)
    tenant: str = ""
    user: str = ""
    tier: str = ""
    priority: str = PLAIN_PRIORITY
    weight: float = PLAIN_WEIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Caps at the border. Each is inclusive; what exceeds one is refused with field, limit, value and remedy.

    Several gateway workers share those that count over all requests (`worker.SHARED_LIMITS`).

    max_body_bytes        a whole request body
    max_connections       open sockets, as far as open files allow (ulimit -n); one more is refused with 503
    max_header_bytes      request line and headers together; max_headers counts them
    max_json_depth        nesting
    max_messages          of a chat
    max_prompts           of one completions request
    max_sequences         prompts times n
    max_requests          in the gateway at once; one more is refused with 429
    max_text_workers      processes that render templates and tokenize
    max_text_queue        waiting jobs of less than 64 KiB, and as many larger ones; beyond it the tenant with most of them gets 429
    max_text_queue_bytes  their bytes, counted apart for smaller and larger jobs likewise
    max_pending_bytes     of an answer that its client has not read yet; beyond it the request is cancelled
    max_prompt_bytes      bodies and prompts of all requests; one more is refused with 429. None: a sixteenth of the machine's memory
    max_answer_bytes      log-probabilities of all requests, and answers until they are written; one more is refused with 429
    max_tenant_share      of either and of each store, for one tenant. None: a quarter where keys name several tenants and from the first
                          stored key on, all where there is one
    max_request_held_bytes  of either, for one request; more is refused with 413
    daily_budget, monthly_budget  money that all tenants together may use in a UTC day, a UTC month, in the currency of `prices`
    on_store_failure      what a request with limits gets while their store fails: "closed": 503; "open": it is not counted
    """

    max_body_bytes: int = 1 << 20
    max_connections: int = 16_384
    max_header_bytes: int = 32 << 10
    max_headers: int = 100
    max_json_depth: int = 32
    max_messages: int = 1024
    max_prompts: int = 64
    max_sequences: int = 128
    max_requests: int = 4096
    max_text_workers: int = 2
    max_text_queue: int = 8192
    max_text_queue_bytes: int = 64 << 20
    max_pending_bytes: int = 256 << 10
    max_prompt_bytes: int | None = None
    max_answer_bytes: int = 40 << 20
    max_tenant_share: float | None = None
    max_request_held_bytes: int = 32 << 20
    daily_budget: float | None = None
    monthly_budget: float | None = None
    on_store_failure: str = FAIL_CLOSED

    @property
    def budget(self) -> DeploymentBudget:
        return DeploymentBudget(self.daily_budget, self.monthly_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds.

    header_s      connection made (or previous answer read) to the last header byte
    body_s        headers to the last body byte
    keep_alive_s  idle connection between requests
    sse_ping_s    a stream without a chunk for this long gets a comment line
    write_s       a client that does not catch up within this while more than 64 KiB wait for it is cut off
    request_s     deadline of every request, counted from its arrival; None = none
    drain_s       after SIGTERM: what running requests may take to end
    failover_s    a running request whose engine was lost waits at most this long for one that can continue it; 0: it ends at once
    stream_resume_s  how long after its end a stream can be continued by its client; 0: never, and events have no ids
    """

    header_s: float = 10.0
    body_s: float = 30.0
    keep_alive_s: float = 75.0
    sse_ping_s: float = 10.0
    write_s: float = 30.0
    request_s: float | None = None
    drain_s: float = 30.0
    failover_s: float = 60.0
    stream_resume_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How requests are shared between the replicas of a model.

    slow_start_s  seconds over which the share of a replica grows that has just connected while others serve; 0: all of it at once
    """

    slow_start_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The whole file.

    host, port     loopback by default; port 0 takes a free one, which the log names
    workers        gateway processes that listen on it, each with its part of the limits
    api_keys       empty: open, every request is of the tenant "default". Otherwise every path but the probes and / wants one of them
    open_metrics   /metrics without a key although keys exist, without series of tenants and tiers
    open_tenant_metrics  with these too, beside `open_metrics`
    metrics_tenants  tenants whose keys read the whole of /metrics; where there are several, any other key reads its own tenant's series
    vllm_metrics   /metrics has vLLM's names beside ours
    allowed_hosts  names that a Host header may carry, beside loopback names when bound to loopback. Empty: every name when bound elsewhere
    allowed_origins  origins whose pages may use this server, as browsers write them ("https://app.example"); "*": every page. Empty: none
    request_log    target of the request log: on (stdout), off, "stderr" or a file's path. true means on, false means off
    salt_key       secret (hex) that turns tenants into cache salts; empty: drawn by this process, which then shares no cached
                   prefixes with other gateways; the supervisor draws one for its whole site
    tls            certificate and key of this port, which is https then; None: http
    trusted_proxies  networks whose X-Forwarded-For and Forwarded are believed; of any other peer the address itself is the client's
    store          where streams are kept that their clients may continue
    sessions       how long conversations are kept, and how much they may hold
    cache          the response cache;  idempotency  answers to requests with an Idempotency-Key
    state          folder of all embedded stores; empty: they are in memory, and end with this process
    tiers          by name: what tenants may use. A built-in one holds where no other has its name
    prices         of tokens, by name of the model; one that is not named costs nothing
    usage          how records of what requests used are kept in `state`, and where they are sent
    """

    models: tuple[ModelConfig, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    api_keys: tuple[ApiKey, ...] = field(default=(), repr=False)
    open_metrics: bool = False
    open_tenant_metrics: bool = False
    metrics_tenants: tuple[str, ...] = ()
    vllm_metrics: bool = True
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    request_log: bool | str = "on"
    salt_key: str = field(default="", repr=False)
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    routing: Routing = field(default_factory=Routing)
    admission: AdmissionRules = field(default_factory=AdmissionRules)
    tls: HttpTls | None = None
    trusted_proxies: tuple[str, ...] = ()
    store: StoreConfig = field(default_factory=StoreConfig)
    sessions: SessionConfig = field(default_factory=SessionConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    idempotency: IdempotencyConfig = field(default_factory=IdempotencyConfig)
    state: str = ""
    tiers: dict[str, Tier] = field(default_factory=dict)
    prices: dict[str, Price] = field(default_factory=dict)
    usage: UsageConfig = field(default_factory=UsageConfig)

    def checked(self) -> GatewayConfig:
        """This value if its rules hold. Raises ConfigError."""
        check_models(self.models)
        for index, key in enumerate(self.api_keys):
            _check_key(f"api_keys[{index}]", key, all_tiers(self.tiers))
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", f"{self.port} is outside 0..65535")
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError("workers", f"{self.workers} is outside 1..{MAX_WORKERS}")
        if self.request_log_target not in LOG_TARGETS and self.request_log_target.strip().lower() in LOG_WORDS:
            raise ConfigError("request_log", f"{self.request_log!r} is no target", "Write on (stdout), off, stderr or a file's path.")
        check_secret("salt_key", self.salt_key)
        self._check_metrics()
        _check_names(self.allowed_hosts, self.allowed_origins)
        check_networks("trusted_proxies", self.trusted_proxies)
        for part in ("limits", "timeouts", "routing", "admission", "sessions"):
            value = getattr(self, part)
            for item in fields(value):
                given = getattr(value, item.name)
                if isinstance(given, int | float) and not (given > 0 or (given == 0 and item.name in MAY_BE_ZERO)):
                    raise ConfigError(f"{part}.{item.name}", f"{given} is not positive")
        if self.limits.on_store_failure not in (FAIL_OPEN, FAIL_CLOSED):
            raise ConfigError("limits.on_store_failure", f"{self.limits.on_store_failure!r} is not one of {FAIL_OPEN}, {FAIL_CLOSED}")
        self._check_money()
        _check_share(self.limits.max_tenant_share, self.num_tenants)
        for section in (self.store, self.cache, self.idempotency):
            section.checked()
        for name, tier in self.tiers.items():
            tier.checked(f"tiers.{name}")
        for name, price in self.prices.items():
            price.checked(f"prices.{name}")
        self.usage.checked()
        return self

    def _check_money(self) -> None:
        """Raise ConfigError for a price that no model has, and for a budget in which requests would cost nothing."""
        names = {model.name for model in self.models}
        for name in self.prices:
            if self.models and name not in names:
                of_alias = next((f"Write {model.name}: {name} is its alias." for model in self.models if name in model.aliases), None)
                raise ConfigError(f"prices.{name}", "is no model's name", of_alias or f"The models are {', '.join(sorted(names))}.")
        budgets = {f"tiers.{tier_name}.{name}": money for tier_name, tier in self.tiers.items() for name, money in tier.budgets.items()}
        of_deployment = {f"limits.{name}": money for name, money in self.limits.budget._asdict().items() if money is not None}
        for where, money in (budgets | of_deployment).items():
            check_money(where, money)
            if not self.prices:
                raise ConfigError(where, "has no effect without prices", "Give prices of the models, or leave it out.")
        for where in of_deployment:
            if unpriced := sorted(names - set(self.prices)):
                raise ConfigError(
                    where, f"does not count the model {unpriced[0]}, which has no price", f"Give prices.{unpriced[0]}; 0 is free."
                )

    def _check_metrics(self) -> None:
        """An option that would change nothing is refused. Raises ConfigError."""
        if self.open_tenant_metrics and not self.open_metrics:
            raise ConfigError("open_tenant_metrics", "has no effect without open_metrics", "Set open_metrics too, or leave it out.")
        if self.metrics_tenants and self.open_metrics:
            remedy = "Leave out one of the two; open_tenant_metrics shows tenants to every reader."
            raise ConfigError("metrics_tenants", "has no effect beside open_metrics, where no reader shows a key", remedy)

    @property
    def scheme(self) -> str:
        """How this gateway's URLs begin."""
        return "http" if self.tls is None else "https"

    @property
    def request_log_target(self) -> str:
        """`request_log` as `observe.request_log` names targets."""
        return self.request_log if isinstance(self.request_log, str) else "on" if self.request_log else "off"

    @property
    def num_tenants(self) -> int:
        """Number of tenants. A key without a tenant's name is a tenant of its own; without keys there is one tenant."""
        named = {key.tenant for key in self.api_keys if key.tenant}
        return max(1, len(named) + sum(not key.tenant for key in self.api_keys))


def load_config(path: str | Path) -> GatewayConfig:
    """The checked configuration in a JSON file. Raises ConfigError naming the key."""
    return config_from(read_json_object(path))


def config_from(data: Mapping[str, object]) -> GatewayConfig:
    """The checked configuration in plain data, with keys replaced by their digests. Raises ConfigError."""
    config = decode(GatewayConfig, data)
    hashed = tuple(_hashed(key) for key in config.checked().api_keys)
    if len({key.sha256 for key in hashed}) != len(hashed):
        raise ConfigError("api_keys", "names a key twice", "Each key belongs to one tenant.")
    return replace(config, api_keys=hashed)


def digest_of(key: bytes) -> bytes:
    """SHA-256 of a key: keys are long and random, so no slow hash is needed."""
    return hashlib.sha256(key).digest()


def _hashed(key: ApiKey) -> ApiKey:
    digest = key.sha256 or digest_of(key.key.encode()).hex()
    return replace(key, key="", sha256=digest, tenant=key.tenant or f"key-{digest[:12]}")


def _check_key(where: str, key: ApiKey, tiers: Mapping[str, Tier]) -> None:
    if bool(key.key) == bool(key.sha256):
        raise NeedsExactlyOne(where, "key", "sha256")
    if key.key and len(key.key) < MIN_KEY_CHARS:
        raise ConfigError(f"{where}.key", f"is shorter than {MIN_KEY_CHARS} characters", "Use 32 random bytes.")
    if key.sha256 and SHA256_HEX.fullmatch(key.sha256) is None:
        raise ConfigError(f"{where}.sha256", "is not 64 lower-case hex digits")
    if key.tier and key.tier not in tiers:
        raise ConfigError(f"{where}.tier", f"{key.tier!r} is not a tier", f"There are: {', '.join(tiers)}.")
    if key.tier and (key.priority, key.weight) != (PLAIN_PRIORITY, PLAIN_WEIGHT):
        raise ConfigError(f"{where}.tier", "is given beside priority or weight", "A tier has its own: leave them out.")
    if key.priority.upper() not in PriorityClass.__members__:
        raise ConfigError(f"{where}.priority", f"{key.priority!r} is not one of premium, standard, batch")
    if not 0 < key.weight <= 1e6:
        raise ConfigError(f"{where}.weight", f"{key.weight} is outside 0 < weight <= 1e6")


def _check_names(hosts: tuple[str, ...], origins: tuple[str, ...]) -> None:
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


def _check_share(share: float | None, num_tenants: int) -> None:
    if share is None:
        return
    if share > 1:
        raise ConfigError("limits.max_tenant_share", f"{share} is above 1")
    if share == 1 and num_tenants > 1:
        rule = f"1 lets one of {num_tenants} tenants take what all have"
        raise ConfigError("limits.max_tenant_share", rule, "Give less than 1, or leave it out for a quarter.")
