"""Defines the configuration of served models.

Addresses hold no password and are not link-local; a name's address is checked when it is connected to (`foreign.session`).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from headrace.core.errors import ConfigError
from headrace.core.model_names import check_free_name, check_model_names
from headrace.core.option import Role, check_options, option, required
from headrace.machine.hosts import is_link_local
from headrace.policy.config import AdmissionRules
from headrace.policy.fallbacks import MAX_FALLBACKS, NO_FALLBACKS, FallbackReason, Fallbacks
from headrace.policy.routing.routes import ModelRoute, RouteTarget, ShadowTarget
from headrace.policy.routing.wishes import OWN_ENGINES
from headrace.text.output.formats import AUTO
from headrace.wire.target import GrpcTarget, check_target, target_of

REPLICA_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")

MAX_FOREIGN_SERVERS = 16

MAX_SECONDS = 86400
MAX_ORDER = 100
_LINK_LOCAL = "Cloud machines hand out credentials at such addresses: name the server by another one."


class PoolRules(NamedTuple):
    """failover_s: 0: a call ends when its replica is lost; routing: a name of `POLICIES`; admission: also holds for what was held"""

    failover_s: float
    routing: str
    admission: AdmissionRules


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """address: unix:/path, or host:port with a token, and beyond loopback with tls_dir; tls_dir may hold the token too

    tls_name: that its certificate is for; empty: the address's host
    """

    name: str
    address: str
    token: str | None = field(default=None, repr=False)
    token_file: str = ""
    tls_dir: str = ""
    tls_name: str = ""

    def target(self) -> GrpcTarget:
        """Raises ConfigError."""
        target = target_of(self.address, token=self.token, token_file=self.token_file, tls_dir=self.tls_dir)
        return replace(target, tls_name=self.tls_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignConfig:
    url: str = required("URL of its API, `http` or `https`, up to and with `/v1`. Redirects are not followed.")
    name: str = option("", "Label `replica` of metrics and logs, and its name in `/ready`.", shown="`foreign-N`, N its place in the list")
    model: str = option("", "What the server calls the model.", shown="the model's `name`")
    order: int = option(
        0,
        "Servers of the lowest order share the requests; one of a higher order gets those that no lower one takes.",
        low=0,
        high=MAX_ORDER,
    )
    api_key_file: str = option("", "File with the key to send.", role=Role.SECURITY)
    api_key_env: str = option(
        "",
        "Or environment variable with the key. A variable with a secret of `headrace serve` itself (`HEADRACE_API_KEY`, ...) is refused: "
        "the gateway does not inherit it.",
        role=Role.SECURITY,
    )
    cache_salt: bool = option(
        True,
        "Send each tenant's salt, so that tenants share no cached prefix there (vLLM and Headrace know the field). Off for a server that "
        "refuses unknown fields: tenants then share its cache.",
        role=Role.SECURITY,
    )
    silence_s: float = option(
        120.0,
        "Seconds to the first token, and that an answer may be silent after it: shorter notices a dead server sooner, and gives up on long "
        "prompts and on models that think between two parts. Once it has begun, five times as long while comments or pings come.",
        above=0.0,
        high=MAX_SECONDS,
    )

    def checked(self) -> ForeignConfig:
        parts = check_url("url", self.url, "http://HOST:PORT/v1", "Keys go into api_key_file or api_key_env.")
        if is_link_local(parts.hostname or ""):
            raise ConfigError("url", "is a link-local address or that of a cloud's metadata service", _LINK_LOCAL)
        if self.name and REPLICA_NAME.fullmatch(self.name) is None:
            raise ConfigError("name", f"{self.name!r} is not a replica name")
        if self.api_key_file and self.api_key_env:
            raise ConfigError("api_key_file", "is given beside api_key_env", "Give one of them.")
        check_options(self)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """upstreams    foreign servers: they answer all requests, or beside `replicas` those that no replica takes
    unavailable  why the model has no replica now, in words that clients may read; only with empty `replicas`
    starts_on_demand  with empty `replicas`, requests wait: one is started for them, or starts and is listed once it serves
    closed_until  with empty `replicas`, no request starts one before this Unix time
    num_wanted   replicas that the supervisor wants, for the metrics page; None: they run elsewhere
    num_pods     pods (or groups of them) that this deployment wants, for the metrics page; None: it does not scale them

    tool_call_parser, reasoning_parser  names of rows in `text.output.formats`; auto: chosen by the chat template
    """

    name: str
    folder: str = ""
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    replicas: tuple[ReplicaConfig, ...] = ()
    aliases: tuple[str, ...] = ()
    upstreams: tuple[ForeignConfig, ...] = ()
    fallbacks: Fallbacks = NO_FALLBACKS
    unavailable: str = ""
    starts_on_demand: bool = False
    closed_until: float | None = None
    num_wanted: int | None = None
    num_pods: int | None = None


def check_models(models: tuple[ModelConfig, ...]) -> None:
    if not models:
        raise ConfigError("models", "is empty", "Declare at least one model.")
    names: set[str] = set()
    for index, model in enumerate(models):
        where = f"models[{index}]"
        check_model_names(where, model.name, model.aliases, names)
        replicas = [replica.name for replica in model.replicas]
        check_foreign(f"{where}.upstreams", model.upstreams, taken=replicas)
        if model.upstreams and not (model.folder or model.replicas):
            continue
        if not model.folder:
            raise ConfigError(f"{where}.folder", "is missing", "A model needs folder and replicas, or upstreams.")
        is_explained = bool(model.unavailable) or model.starts_on_demand
        if (model.unavailable if replicas else not is_explained) or len(set(replicas)) != len(replicas):
            rule = "must name at least one replica, each name once; or none beside `unavailable` or `starts_on_demand`"
            raise ConfigError(f"{where}.replicas", rule)
        for replica in model.replicas:
            if REPLICA_NAME.fullmatch(replica.name) is None:
                raise ConfigError(f"{where}.replicas", f"{replica.name!r} is not a replica name")
        for number, replica in enumerate(model.replicas):
            try:
                check_target(replica.address, token=replica.token, token_file=replica.token_file, tls_dir=replica.tls_dir)
            except ConfigError as error:
                raise error.at(f"{where}.replicas[{number}].address") from error
    _check_fallbacks(models)


def _check_fallbacks(models: tuple[ModelConfig, ...]) -> None:
    by_name = {name: model for model in models for name in (model.name, *model.aliases)}
    for index, model in enumerate(models):
        met: dict[FallbackReason, list[str]] = {reason: [] for reason in FallbackReason}
        for reason, name in model.fallbacks.named():
            where, other = f"models[{index}].fallbacks.{reason}", by_name.get(name)
            if other is None or other is model:
                raise ConfigError(where, f"{name!r} is not the name of another model here")
            if other.name in met[reason]:
                raise ConfigError(where, f"names {other.name!r} twice")
            met[reason].append(other.name)
            if len(met[reason]) > MAX_FALLBACKS:
                raise ConfigError(where, f"names more than {MAX_FALLBACKS} models")


def check_routes(routes: Mapping[str, ModelRoute], models: Sequence[ModelConfig]) -> None:
    served = {name for model in models for name in (model.name, *model.aliases)}
    taken = set(served)
    for name, route in routes.items():
        where = f"routes.{name}"
        check_free_name(where, name, taken)
        if set(name) & set(":@"):
            raise ConfigError(where, f"{name!r} has a : or @", "A client writes a size behind :, a version behind @.")
        check_options(route, where)
        parts: dict[str, RouteTarget | ShadowTarget] = {f"{where}.targets[{index}]": each for index, each in enumerate(route.targets)}
        for place, part in (parts | ({} if route.shadow is None else {f"{where}.shadow": route.shadow})).items():
            check_options(part, place)
            if part.model not in served:
                raise ConfigError(f"{place}.model", f"{part.model!r} is not a model's name", f"There are: {', '.join(sorted(served))}.")
        _check_targets(f"{where}.targets", route)


def _check_targets(where: str, route: ModelRoute) -> None:
    if not route.targets:
        raise ConfigError(where, "is empty", "Name at least one model.")
    for index, target in enumerate(route.targets):
        for key, value in (("size", target.size), ("version", target.version)):
            if value and REPLICA_NAME.fullmatch(value) is None:
                raise ConfigError(f"{where}[{index}].{key}", f"{value!r} is not one word", "Letters, digits and ._- only, at most 128.")
        if target.model in route.models[:index]:
            raise ConfigError(f"{where}[{index}].model", f"{target.model!r} is a target twice", "Add the weights up.")
        if bool(target.size) != bool(route.targets[0].size):
            raise ConfigError(f"{where}[{index}].size", "is given to some targets alone", "Give each target a size, or none.")
        if not any(each.weight for each in route.targets if each.size == target.size):
            raise ConfigError(f"{where}[{index}].weight", "is 0, as is that of all targets of its size", "Give one of them a weight.")


def text_folders(models: Iterable[ModelConfig]) -> dict[str, str]:
    return {model.name: model.folder for model in models if model.folder}


def key_variables(models: Iterable[ModelConfig]) -> frozenset[str]:
    return frozenset(upstream.api_key_env for model in models for upstream in model.upstreams if upstream.api_key_env)


def check_foreign(where: str, upstreams: Sequence[ForeignConfig], *, taken: Sequence[str] = ()) -> None:
    """taken: names of the model's replicas"""
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
        if name == OWN_ENGINES:
            raise ConfigError(f"{where}[{index}].name", f"{name!r} is the name of our own engines in a request's wishes", "Write another.")


def named(upstreams: Sequence[ForeignConfig]) -> Iterator[tuple[str, ForeignConfig]]:
    for index, upstream in enumerate(upstreams):
        yield upstream.name or f"foreign-{index}", upstream


def check_url(where: str, url: str, example: str, keys: str) -> SplitResult:
    """keys: what to do with a key that the address holds. Raises ConfigError, which shows no password."""
    if "@" in url:
        reason = "holds an @, and no user name or password is taken from an address"
        raise ConfigError(where, reason, f"{keys} An @ of the path is written %40.")
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        is_url = False
    if not is_url or " " in url or _is_wrong_ipv4(parts.hostname or ""):
        raise ConfigError(where, f"{re.split('[?#]', url)[0]!r} is not the address of a server", f"Write {example}.")
    if parts.query or parts.fragment:
        raise ConfigError(where, "holds more than host and path", keys)
    return parts


def _is_wrong_ipv4(host: str) -> bool:
    """Programs read a host differently that ends in a number and is no IPv4 address in four parts."""
    if ":" in host or not host.rstrip(".").rpartition(".")[2].isdecimal():
        return False
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return True
    return False
