"""Decodes the gateway's configuration once: one JSON file, written by the supervisor, or the same data from `headrace gateway`.

Nothing here is read from the environment or the command line: that is `cli.config.load`. The configuration only names the key of a foreign
server, and `upstream.foreign` reads the key when the gateway opens. API keys are kept as SHA-256 digests from the moment the file is
decoded, and no repr of these values shows a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from headrace.core.errors import ConfigError
from headrace.core.hashing import check_secret
from headrace.core.option import Reload, Role, check_options, option, section
from headrace.core.strict_decode import decode, read_json_object
from headrace.gateway.access.principal import (
    ANY_ACCESS,
    OPEN_ACCESS,
    READER_TIER,
    ApiKey,
    OpenMetrics,
    check_key,
    with_digest,
)
from headrace.gateway.generation.config import CacheConfig, RequestConfig, SessionConfig
from headrace.gateway.http.config import HttpTls, Limits, ServerConfig, Timeouts, check_names, check_networks
from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.stores.config import StoreConfig
from headrace.gateway.upstream.model_config import ModelConfig, PoolRules, check_models, check_routes, check_url
from headrace.policy.config import AdmissionRules
from headrace.policy.limits.price import Price
from headrace.policy.limits.tier import Tier, all_tiers
from headrace.policy.routing.replicas import DEFAULT_POLICY, POLICIES
from headrace.policy.routing.routes import ModelRoute

LOG_TARGETS = ("on", "off", "stderr")
LOG_WORDS = {*LOG_TARGETS, "", "true", "false", "yes", "no", "none", "null", "stdout"}
"""Words that are meant as a switch and never as the name of a request log's file, in lower case."""

MAX_WORKERS = 64
"""Gateway processes on one port. Each has threads, a tokenizer and connections to every engine of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The gateway's whole configuration file."""

    models: tuple[ModelConfig, ...] = option((), "Served models.", reload=Reload.LIVE)
    host: str = option(
        "127.0.0.1",
        "Address or name to listen at; `::` is every address, those of IPv4 too. "
        "Beyond loopback an API key (here, or by `headrace keys create`) or `allow_open` is required.",
        role=Role.DEVELOPER,
    )
    port: int = option(8000, "Port to listen at; 0 takes a free one, which is printed.", low=0, high=65535, role=Role.DEVELOPER)
    workers: int = option(
        1,
        "Gateway processes on the port: more streams than one core carries, for another copy of the tokenizer each.",
        low=1,
        high=MAX_WORKERS,
    )
    api_keys: tuple[ApiKey, ...] = option(
        (), "Without one every request is of the tenant `default`.", reload=Reload.LIVE, role=Role.TENANTS, repr=False
    )
    access: str = option(
        ANY_ACCESS,
        "`auto`: a request needs a key where there are keys. `open`: none needs one; refused where there are keys, and the word without "
        "which no reload takes the last key away ([control.md](control.md#what-a-reload-keeps)).",
        one_of=(ANY_ACCESS, OPEN_ACCESS),
        reload=Reload.LIVE,
        role=Role.SECURITY,
    )
    open_metrics: str = option(
        OpenMetrics.NONE.value,
        "What `/metrics` shows without a key although there are keys: `none`, `totals` (sums over all tenants), or `all` (series of "
        "tenants and tiers too). Where there are several tenants, a key reads its own tenant's series, and a reader's key all "
        "([identity.md](identity.md#readers)).",
        one_of=tuple(OpenMetrics),
        reload=Reload.LIVE,
        role=Role.SECURITY,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names that a `Host` header may carry, without port; again for more. On loopback its own names are always allowed.",
        shown="on loopback its own names, elsewhere any",
        reload=Reload.LIVE,
        role=Role.SECURITY,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origins whose pages a browser lets use this server (`https://app.example`), or `*` for every page; again for more. On loopback "
        "without keys `*` is every page that the user opens.",
        reload=Reload.LIVE,
        role=Role.SECURITY,
    )
    request_log: bool | str = option(
        "on",
        "One line per request, probes and scrapes excepted: `on` (stdout), `off`, `stderr` or a file ([gateway.md](gateway.md#logs)).",
        reload=Reload.LIVE,
    )
    log_prompt_blocks: bool = option(
        False,
        "Add keyed hashes of the blocks of 128 tokens that a prompt begins with to the request log, for `headrace log trace` "
        "([measuring.md](measuring.md#traces)). They show a reader of the log which prompts of a tenant begin alike.",
        reload=Reload.LIVE,
    )
    otlp_traces_endpoint: str = option(
        "",
        "Where each generating request's trace is sent: an OpenTelemetry collector's address for OTLP over HTTP, such as "
        "`http://127.0.0.1:4318`; without a path `/v1/traces` is added ([monitoring.md](monitoring.md#traces)).",
        shown="no traces are sent",
    )
    salt_key: str = field(default="", repr=False)
    limits: Limits = section(Limits, reload=Reload.LIVE)
    timeouts: Timeouts = section(Timeouts)
    admission: AdmissionRules = section(AdmissionRules, reload=Reload.LIVE)
    routing: str = option(
        DEFAULT_POLICY,
        "How a request's replica is chosen ([routing.md](routing.md#which-replica)).",
        one_of=tuple(POLICIES),
        reload=Reload.LIVE,
    )
    tls: HttpTls | None = option(None, "Certificate and key of the port.", reload=Reload.LIVE, role=Role.SECURITY)
    trusted_proxies: tuple[str, ...] = option(
        (),
        "Networks (`10.0.0.0/8`) whose `Forwarded` and `X-Forwarded-For` name the client in the log. Of any other peer these are ignored.",
        reload=Reload.LIVE,
        role=Role.SECURITY,
    )
    store: StoreConfig = section(StoreConfig)
    sessions: SessionConfig = section(SessionConfig)
    cache: CacheConfig = section(CacheConfig, reload=Reload.LIVE)
    state: str = ""
    tiers: dict[str, Tier] = section(dict, reload=Reload.LIVE)
    prices: dict[str, Price] = section(dict, reload=Reload.LIVE)
    routes: dict[str, ModelRoute] = section(dict, reload=Reload.LIVE)
    usage: UsageConfig = section(UsageConfig, reload=Reload.LIVE)

    def checked(self) -> GatewayConfig:
        """This value. Raises ConfigError for the first broken rule."""
        check_models(self.models)
        check_routes(self.routes, self.models)
        tiers = all_tiers(self.tiers)
        for index, key in enumerate(self.api_keys):
            check_key(f"api_keys[{index}]", key, tiers)
        check_options(self)
        if self.access == OPEN_ACCESS and self.api_keys:
            raise ConfigError("access", f"is {OPEN_ACCESS} beside api_keys", "Leave out one of the two.")
        if not self.host.strip("[]"):
            raise ConfigError(
                "host", f"{self.host!r} names no address", "Write 127.0.0.1; 0.0.0.0 or ::, which is every address; or a name."
            )
        if self.request_log_target not in LOG_TARGETS and self.request_log_target.strip().lower() in LOG_WORDS:
            raise ConfigError("request_log", f"{self.request_log!r} is no target", "Write on (stdout), off, stderr or a file's path.")
        if self.otlp_traces_endpoint:
            check_url(
                "otlp_traces_endpoint", self.otlp_traces_endpoint, "http://HOST:4318", "A collector nearby can hold another one's key."
            )
        if self.log_prompt_blocks and self.request_log_target == "off":
            raise ConfigError("log_prompt_blocks", "has no effect while request_log is off", "Name a file as request_log.")
        check_secret("salt_key", self.salt_key)
        check_names(self.allowed_hosts, self.allowed_origins)
        check_networks("trusted_proxies", self.trusted_proxies)
        for name, part in ((each.name, getattr(self, each.name)) for each in fields(self)):
            if is_dataclass(part):
                check_options(part, name)
        self._check_money()
        _check_share(self.limits.max_tenant_share, self.num_tenants)
        self.store.checked()
        for name, tier in self.tiers.items():
            if name == READER_TIER:
                raise ConfigError(f"tiers.{name}", "is what a key of a reader has for a tier", "Give the tier another name.")
            tier.checked(f"tiers.{name}")
        for name, price in self.prices.items():
            price.checked(f"prices.{name}")
        self.usage.checked()
        return self

    def _check_money(self) -> None:
        """Raise ConfigError for a price of no model, for a budget without prices, and for an unpriced model in the site's budget."""
        names = {model.name for model in self.models}
        for name in self.prices:
            if self.models and name not in names:
                of_alias = next((f"Write {model.name}: {name} is its alias." for model in self.models if name in model.aliases), None)
                raise ConfigError(f"prices.{name}", "is no model's name", of_alias or f"The models are {', '.join(sorted(names))}.")
        of_tiers = [f"tiers.{tier_name}.{name}" for tier_name, tier in self.tiers.items() for name in tier.budgets]
        of_deployment = [f"limits.{name}" for name, money in self.limits.budget._asdict().items() if money is not None]
        for where in of_tiers + of_deployment:
            if not self.prices:
                raise ConfigError(where, "has no effect without prices", "Give prices of the models, or leave it out.")
        for where in of_deployment:
            if unpriced := sorted(names - set(self.prices)):
                raise ConfigError(
                    where, f"does not count the model {unpriced[0]}, which has no price", f"Give prices.{unpriced[0]}; 0 is free."
                )

    @property
    def scheme(self) -> str:
        """The scheme of this gateway's URLs."""
        return "http" if self.tls is None else "https"

    @property
    def server(self) -> ServerConfig:
        return ServerConfig(
            host=self.host,
            port=self.port,
            tls=self.tls,
            timeouts=self.timeouts,
            allowed_origins=self.allowed_origins,
        )

    @property
    def requests(self) -> RequestConfig:
        return RequestConfig(
            limits=self.limits,
            timeouts=self.timeouts,
            admission=self.admission,
            prices=self.prices,
            cache=self.cache,
            open_metrics=OpenMetrics(self.open_metrics),
            log_prompt_blocks=self.log_prompt_blocks,
        )

    @property
    def pool_rules(self) -> PoolRules:
        return PoolRules(self.timeouts.failover_s, self.routing, self.admission)

    @property
    def request_log_target(self) -> str:
        """`request_log` as a word of LOG_TARGETS or a file's path."""
        return self.request_log if isinstance(self.request_log, str) else "on" if self.request_log else "off"

    @property
    def traces_url(self) -> str:
        """Empty: no traces are sent."""
        url = self.otlp_traces_endpoint
        return url if not url or urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1/traces"

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
    if share == 1 and num_tenants > 1:
        rule = f"1 lets one of {num_tenants} tenants take what all have"
        raise ConfigError("limits.max_tenant_share", rule, "Give less than 1, or leave it out for a quarter.")
