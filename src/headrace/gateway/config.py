"""The gateway's configuration: one JSON file, written by the supervisor, or the same data of `headrace gateway`; decoded once.

Nothing here is read from the environment or the command line, which `cli.config` does. The key of a foreign server is only named here;
`upstream.foreign` reads it when the gateway opens. API keys are kept as SHA-256 digests from the moment the file is decoded, and no repr of
these values shows a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.hashing import check_secret
from headrace.core.strict_decode import decode, read_json_object
from headrace.gateway.access.metrics_access import MetricsAccess, OpenMetrics
from headrace.gateway.access.principal import ApiKey, check_key, with_digest
from headrace.gateway.cache.config import CacheConfig, IdempotencyConfig
from headrace.gateway.generation.config import RequestConfig
from headrace.gateway.http.config import FAIL_CLOSED, FAIL_OPEN, HttpTls, Limits, ServerConfig, Timeouts, check_names, check_networks
from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.sessions.config import SessionConfig
from headrace.gateway.stores.config import StoreConfig
from headrace.gateway.upstream.model_config import ModelConfig, check_models
from headrace.policy.admission.config import AdmissionRules
from headrace.policy.limits.price import Price, check_money
from headrace.policy.limits.tier import Tier, all_tiers

LOG_TARGETS = ("on", "off", "stderr")
LOG_WORDS = {*LOG_TARGETS, "", "true", "false", "yes", "no", "none", "null", "stdout"}
"""Words that are meant as a switch and never as the name of a request log's file, in lower case."""

MAY_BE_ZERO = ("failover_s", "stream_resume_s", "ttl_s")
"""Times whose 0 turns something off. Any other limit or time that is not positive is refused."""

MAX_WORKERS = 64
"""Gateway processes on one port. Each has threads, a tokenizer and connections to every engine of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The whole file.

    host, port     loopback by default; port 0 takes a free one, which the log names
    workers        gateway processes that listen on it, each with its part of the limits
    api_keys       empty: open, every request is of the tenant "default". Otherwise every path but the probes and / wants one of them
    open_metrics   what /metrics shows without a key although keys exist: "none", "totals" (no series of tenants and tiers) or "all". A bool
                   is decoded for an error that names these
    metrics_tenants  tenants whose keys read the whole of /metrics; where there are several, any other key reads its own tenant's series
    allowed_hosts  names that a Host header may carry, beside loopback names when bound to loopback. Empty: every name when bound elsewhere
    allowed_origins  origins whose pages may use this server, as browsers write them ("https://app.example"); "*": every page. Empty: none
    request_log    target of the request log: on (stdout), off, "stderr" or a file's path. true means on, false means off
    salt_key       secret (hex) that turns tenants into cache salts; empty: drawn by this process, which then shares no cached
                   prefixes with other gateways; the supervisor draws one for its whole site
    tls            certificate and key of this port, which is https then; None: http
    trusted_proxies  networks whose X-Forwarded-For and Forwarded are believed; of any other peer the address itself is the client's
    store          where streams are kept that their clients may continue
    sessions       how long conversations are kept
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
    open_metrics: bool | str = OpenMetrics.NONE.value
    metrics_tenants: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    request_log: bool | str = "on"
    salt_key: str = field(default="", repr=False)
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
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
            check_key(f"api_keys[{index}]", key, all_tiers(self.tiers))
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", f"{self.port} is outside 0..65535")
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError("workers", f"{self.workers} is outside 1..{MAX_WORKERS}")
        if self.request_log_target not in LOG_TARGETS and self.request_log_target.strip().lower() in LOG_WORDS:
            raise ConfigError("request_log", f"{self.request_log!r} is no target", "Write on (stdout), off, stderr or a file's path.")
        check_secret("salt_key", self.salt_key)
        self._check_metrics()
        check_names(self.allowed_hosts, self.allowed_origins)
        check_networks("trusted_proxies", self.trusted_proxies)
        for part in ("limits", "timeouts", "admission", "sessions"):
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
        if self.open_metrics not in list(OpenMetrics):
            raise ConfigError("open_metrics", f"{self.open_metrics!r} is not one of {', '.join(OpenMetrics)}")
        if self.metrics_tenants and self.open_metrics != OpenMetrics.NONE:
            remedy = "Leave out one of the two; `open_metrics: all` shows tenants to every reader."
            raise ConfigError("metrics_tenants", "has no effect beside open_metrics, where no reader shows a key", remedy)

    @property
    def scheme(self) -> str:
        """How this gateway's URLs begin."""
        return "http" if self.tls is None else "https"

    @property
    def server(self) -> ServerConfig:
        return ServerConfig(
            host=self.host,
            port=self.port,
            tls=self.tls,
            limits=self.limits,
            timeouts=self.timeouts,
            allowed_origins=self.allowed_origins,
        )

    @property
    def requests(self) -> RequestConfig:
        metrics = MetricsAccess(open=OpenMetrics(str(self.open_metrics)), tenants=self.metrics_tenants)
        return RequestConfig(
            limits=self.limits,
            timeouts=self.timeouts,
            admission=self.admission,
            prices=self.prices,
            cache=self.cache,
            idempotency=self.idempotency,
            metrics=metrics,
        )

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
    hashed = tuple(with_digest(key) for key in config.checked().api_keys)
    if len({key.sha256 for key in hashed}) != len(hashed):
        raise ConfigError("api_keys", "names a key twice", "Each key belongs to one tenant.")
    return replace(config, api_keys=hashed)


def _check_share(share: float | None, num_tenants: int) -> None:
    if share is None:
        return
    if share > 1:
        raise ConfigError("limits.max_tenant_share", f"{share} is above 1")
    if share == 1 and num_tenants > 1:
        rule = f"1 lets one of {num_tenants} tenants take what all have"
        raise ConfigError("limits.max_tenant_share", rule, "Give less than 1, or leave it out for a quarter.")
