"""The configuration of `headrace serve`: one YAML file, then the environment, then flags; read here and nowhere else.

`ServeConfig` composes the packages' own frozen configs and checks pairs of them; each package checks its own fields. Every key is in
docs/config.md. How variables become values: `cli.config_variables`.

    file         models: [{name: tiny, replicas: 2, engine: {model: /models/tiny}}]
    environment  HEADRACE_MODELS__0__REPLICAS=3, HEADRACE_GATEWAY__PORT=9000
    flags        headrace serve --port 9001
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.cli.config_origins import flag_steps, named_by_origin
from headrace.cli.config_variables import ELSEWHERE, apply_environment, set_at
from headrace.cli.config_yaml import Raw, read_yaml
from headrace.cli.state import state_folder
from headrace.cli.stored_keys import has_stored_keys
from headrace.core.errors import ConfigError
from headrace.core.hosts import is_loopback
from headrace.core.strict_decode import NeedsExactlyOne, decode, plain
from headrace.engine.config import EngineConfig
from headrace.fleet.admin_listen import AdminListen
from headrace.fleet.config import FleetConfig, ModelSpec
from headrace.fleet.weights import HUB_ID
from headrace.gateway.config import GatewayConfig, config_from
from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.upstream.model_config import ForeignConfig, ModelConfig, ReplicaConfig
from headrace.observe.logs import LogFormat
from headrace.policy.limits.price import Price
from headrace.policy.limits.tier import Tier
from headrace.tensor.checkpoint.gguf.paths import is_gguf, model_name
from headrace.text.output.formats import AUTO, reasoning_format, tool_format
from headrace.wire.tls.files import token_path

ENV_PREFIX = "HEADRACE_"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReplica:
    """One engine that was started by itself (`headrace engine`), here or on another machine. address: HOST:PORT or unix:/path."""

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSection:
    """The engines of one model that run elsewhere.

    model       the model's folder on this machine, a bundled model's name, or a hub id: the gateway reads its tokenizer and template
    replicas    where its engines listen
    tls_dir     folder with this machine's certificates (ca.crt, tls.crt, tls.key), for TCP addresses; required beyond loopback
    token_file  file with the token that the engines want; empty: the file `token` of tls_dir. One of the two is required for TCP addresses
    """

    model: str
    replicas: tuple[RemoteReplica, ...]
    tls_dir: str = ""
    token_file: str = ""

    def gateway_replicas(self) -> tuple[ReplicaConfig, ...]:
        """The replicas as the gateway reads them. A Unix socket needs no certificates."""
        return tuple(
            ReplicaConfig(
                name=replica.name,
                address=replica.address,
                token_file=token_path(self.token_file, self.tls_dir) if replica.address.startswith("unix:") else self.token_file,
                tls_dir="" if replica.address.startswith("unix:") else self.tls_dir,
            )
            for replica in self.replicas
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """One served model: the engines that serve it, the foreign servers that answer for it, or both.

    engine     the options of every replica; `engine.model` is a folder, the name of a bundled model, or a hub id
    remote     engines that are started by themselves, instead of engines that are started here
    upstreams  OpenAI-compatible servers instead of engines; beside them, for what no engine takes
    name       what clients ask for; default: the hub id, the folder's name, or what the first foreign server calls it
    aliases    further names for it
    replicas   engine processes, each with its own copy of the weights
    smaller    name of another model that answers while this one is busy (docs/tenancy.md, "Busy models")

    tool_call_parser, reasoning_parser  how the model writes calls and reasoning: a name of `text.output.formats`, auto or none
    """

    engine: EngineConfig | None = None
    remote: RemoteSection | None = None
    upstreams: tuple[ForeignConfig, ...] = ()
    name: str = ""
    aliases: tuple[str, ...] = ()
    replicas: int = 1
    smaller: str = ""
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO

    @property
    def parsers(self) -> dict[str, str]:
        return {"tool_call_parser": self.tool_call_parser, "reasoning_parser": self.reasoning_parser}

    @property
    def of_gateway(self) -> dict[str, object]:
        """The gateway's own options of the model."""
        smaller = {"smaller": self.smaller} if self.smaller else {}
        return {**smaller, **(self.parsers if self.engine is not None or self.remote is not None else {})}

    @property
    def num_engines(self) -> int:
        return self.replicas if self.engine is not None else 0

    @property
    def num_replicas(self) -> int:
        """Engines that the gateway connects to."""
        return self.num_engines + (len(self.remote.replicas) if self.remote is not None else 0)

    @property
    def served_name(self) -> str:
        section = self.engine or self.remote
        if self.name or section is None:
            return self.name or (self.upstreams[0].model if self.upstreams else "")
        model = section.model
        if is_fetched(model):
            return model
        return model_name(Path(model)) if is_gguf(model) else Path(model).expanduser().resolve().name


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The whole configuration of `headrace serve`.

    state            folder of all embedded stores (docs/tenancy.md), made where it is not there; relative to the working directory. `load`
                     puts the user's own folder (`cli.state`) in the place of an empty one
    tiers            by name, beside `policy.limits.tier.BUILT_IN_TIERS` or in their place: what tenants may use
    prices           of tokens, by name of the model
    usage            how records of what requests used are kept in `state`, and where they are sent (docs/usage.md)
    gateway          the gateway's section; its `models` is made from `models` here, its `timeouts.drain_s` from `drain_timeout_s`
    drain_timeout_s  after SIGTERM: how long running requests may take
    start_timeout_s, hang_timeout_s  see `FleetConfig`
    log_format       "auto" (text on a terminal, JSON elsewhere), "text" or "json"; a request log that is a file is always JSON
    admin            where the supervisor answers `headrace status`, ... over TCP too; None: on this machine alone
    run_dir          parent of the private directory for sockets; None: XDG_RUNTIME_DIR, else the temporary directory
    allow_open       listen beyond loopback without API keys
    site_key         secret (hex) of all that processes of a site agree on, equal where several starts serve one site; empty: drawn at start
    experimental     allow what has not been run where Headrace is tested (hub ids)
    """

    models: tuple[ModelSection, ...]
    state: str = ""
    tiers: dict[str, Tier] = field(default_factory=dict)
    prices: dict[str, Price] = field(default_factory=dict)
    usage: UsageConfig = field(default_factory=UsageConfig)
    gateway: GatewayConfig = field(default_factory=lambda: GatewayConfig(models=()))
    drain_timeout_s: float = 30.0
    start_timeout_s: float = 1800.0
    hang_timeout_s: float = 60.0
    log_format: str = "auto"
    run_dir: str | None = None
    admin: AdminListen | None = None
    allow_open: bool = False
    site_key: str = field(default="", repr=False)
    experimental: bool = False

    def checked(self) -> ServeConfig:
        """This value if the rules of every section and of their pairs hold. Raises ConfigError with the path in the file."""
        for index, model in enumerate(self.models):
            self._check_model(f"models[{index}]", model)
        self._check_gateway()
        if self.log_format not in list(LogFormat):
            raise ConfigError("log_format", f"{self.log_format!r} is not one of {', '.join(LogFormat)}")
        self.fleet(lambda model: Path(model)).checked()
        return self

    def _check_model(self, where: str, model: ModelSection) -> None:
        _check_answers(where, model)
        if model.engine is None and model.replicas != 1:
            reason = "counts engines that are started here, and this model has none"
            raise ConfigError(f"{where}.replicas", reason, "Leave it out beside upstreams and remote.")
        if model.engine is None and model.remote is None:
            for name, parser in model.parsers.items():
                if parser != AUTO:
                    raise ConfigError(f"{where}.{name}", "is for text of our engines", "Leave it out: the other server parses its output.")
            return
        tool_format(model.tool_call_parser, (), where=f"{where}.tool_call_parser")
        reasoning_format(model.reasoning_parser, (), where=f"{where}.reasoning_parser")
        if model.engine is not None:
            self._check_engine(where, model.engine)
        if model.remote is not None:
            _check_folder(f"{where}.remote.model", model.remote.model)

    def _check_engine(self, where: str, engine: EngineConfig) -> None:
        try:
            engine.checked()
        except ConfigError as error:
            raise error.at(f"{where}.engine.{error.where}") from error
        _check_folder(f"{where}.engine.model", engine.model)

    def _check_gateway(self) -> None:
        models = [_as_gateway_model(model) for model in self.models]
        try:
            # Decoded as the gateway will decode it, so that what it would refuse at its start is refused here.
            config_from(plain(replace(self.whole_gateway(), models=tuple(models))))
        except ConfigError as error:
            # Replicas that this file does not name have made-up addresses, which are right.
            where = re.sub(r"^(models\[\d+\])\.replicas", r"\1.remote.replicas", error.where)
            raise error.at(where if where.startswith(("models", "state", "tiers", "prices", "usage")) else f"gateway.{where}") from error

    def whole_gateway(self) -> GatewayConfig:
        """The gateway's section with what stands at the top level."""
        return replace(self.gateway, state=self.state, tiers=self.tiers, prices=self.prices, usage=self.usage)

    def fleet(self, resolve: Callable[[str], Path]) -> FleetConfig:
        """The supervisor's configuration. resolve: a `model` as the file has it -> local folder."""
        gateway = plain(self.whole_gateway())
        del gateway["models"], gateway["timeouts"]["drain_s"]
        models = []
        for model in self.models:
            spec = ModelSpec(name=model.served_name, aliases=model.aliases, replicas=model.num_engines, gateway=model.of_gateway)
            if model.engine is not None:
                engine = plain(model.engine)
                spec = replace(spec, folder=resolve(engine.pop("model")), engine=engine)
            elif model.remote is not None:
                remote = tuple(plain(replica) for replica in model.remote.gateway_replicas())
                spec = replace(spec, folder=resolve(model.remote.model), remote=remote)
            models.append(replace(spec, upstreams=tuple(plain(upstream) for upstream in model.upstreams)))
        run_dir = None if self.run_dir is None else Path(self.run_dir).expanduser()
        return FleetConfig(
            models=tuple(models),
            gateway=gateway,
            site_key=self.site_key,
            drain_timeout_s=self.drain_timeout_s,
            start_timeout_s=self.start_timeout_s,
            hang_timeout_s=self.hang_timeout_s,
            log_format=LogFormat(self.log_format),
            run_dir=run_dir,
            admin=self.admin,
        )


def _as_gateway_model(model: ModelSection) -> ModelConfig:
    """The model as the gateway's own file has it, with a made-up address: where its replicas will listen is not known yet."""
    answered = ModelConfig(name=model.served_name, aliases=model.aliases, upstreams=model.upstreams, smaller=model.smaller)
    if model.engine is None and model.remote is None:
        return answered
    replicas: tuple[ReplicaConfig, ...] = (ReplicaConfig(name="-", address="unix:/run/replica"),)
    if model.remote is not None:
        replicas = model.remote.gateway_replicas()
    return replace(answered, folder="/", replicas=replicas)


def _check_answers(where: str, model: ModelSection) -> None:
    """Raises NeedsExactlyOne where engines are both here and elsewhere, or nothing answers for the model."""
    is_here, is_elsewhere = model.engine is not None, model.remote is not None
    if (is_here and is_elsewhere) or not (is_here or is_elsewhere or model.upstreams):
        remedy = (
            "engine runs the model here, remote names engines that run elsewhere, upstreams asks servers for it, alone or beside these."
        )
        raise NeedsExactlyOne(where, "engine", "remote" if is_here else "upstreams", remedy)


def _check_folder(where: str, name: str) -> None:
    path = Path(name).expanduser()
    if not (is_fetched(name) or bundled_path(name) or (path / "config.json").is_file() or (is_gguf(name) and path.is_file())):
        raise ConfigError(where, f"{name!r} is neither a folder with a config.json nor a .gguf file nor a model's name")


def load(
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, object] | None = None,
    *,
    flag_names: Mapping[str, str] | None = None,
    default_model: str = DEFAULT_MODEL,
) -> ServeConfig:
    """The checked configuration: file, then environment, then flags.

    flags          dotted path -> value, e.g. "gateway.port"; "model." stands for the only model's section. None = not given
    flag_names     the same paths -> the flag as it was written, for errors
    default_model  folder served when nothing names one

    Raises: ConfigError, about a value of a flag under the flag's name, of the environment under the variable's, else under the path.
    """
    with named_by_origin(environment, ENV_PREFIX, flag_names or {}):
        config = load_settings(file, environment, flags, flag_names=flag_names, default_model=default_model)
        check_wants_keys(config)
        if config.usage.kafka is not None:
            config.usage.kafka.properties()
    return config


def load_settings(
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, object] | None = None,
    *,
    flag_names: Mapping[str, str] | None = None,
    default_model: str = DEFAULT_MODEL,
) -> ServeConfig:
    """As `load`, for a command that serves nothing: whether a key is wanted is not asked, and the secrets of Kafka are not read."""
    names = flag_names or {}
    raw = {} if file is None else read_yaml(file)
    default = None if "models" in raw else default_model
    with named_by_origin(environment, ENV_PREFIX, names):
        apply_environment(ServeConfig, raw, environment, ENV_PREFIX)
        _apply_flags(raw, {path: value for path, value in (flags or {}).items() if value is not None}, names)
        config = from_raw(raw, default)
    return replace(config, state=str(state_folder(config.state, environment)))


def check_wants_keys(config: ServeConfig) -> None:
    """Raise ConfigError where other machines could use the server without a key, and nothing allows that."""
    gateway = config.gateway
    if not (is_loopback(gateway.host) or gateway.api_keys or config.allow_open or has_stored_keys(config.state, gateway.store)):
        raise ConfigError(
            "gateway.host",
            f"{gateway.host} can be reached from other machines and there is no API key",
            "Create one (headrace keys create), set one (--api-key, gateway.api_keys), or allow use without one (--allow-open).",
        )


def from_raw(raw: Raw, default_model: str | None = None) -> ServeConfig:
    """The checked configuration in plain data, which is filled up in place. Raises ConfigError with the path in it."""
    config = decoded(raw, default_model).checked()
    return replace(config, gateway=_with_hashed_keys(config.gateway))


def decoded(raw: Raw, default_model: str | None = None) -> ServeConfig:
    """As `from_raw`, where each key and type is looked at, but not what values mean: a model's folder need not be there."""
    _refuse_computed(raw)
    _fill(raw, default_model)
    return decode(ServeConfig, raw, elsewhere=ELSEWHERE)


def _apply_flags(raw: Raw, flags: Mapping[str, object], names: Mapping[str, str]) -> None:
    models = raw.get("models")
    for path, value in flags.items():
        if path.startswith("model.") and isinstance(models, list) and len(models) > 1:
            reason = f"the file declares {len(models)} models, a flag cannot say which one it means"
            raise ConfigError(names.get(path, path), reason, "Set it in the file.")
        set_at(raw, flag_steps(path), value, path)


def _fill(raw: Raw, default_model: str | None) -> None:
    """Add what a file may leave out and `ServeConfig` may not: a model, and the gateway's list of models. Raises ConfigError."""
    if "models" not in raw:
        default_model = default_model or DEFAULT_MODEL  # so that a file may say nothing of models
    if default_model is not None and not raw.get("models"):
        raw["models"] = [{}]
    models = raw.get("models")
    only = models[0] if isinstance(models, list) and len(models) == 1 else None
    if isinstance(only, dict) and not {"upstreams", "remote"} & set(only) and default_model is not None:
        engine = only.setdefault("engine", {})
        if isinstance(engine, dict):
            engine.setdefault("model", default_model)
    gateway = raw.setdefault("gateway", {})
    if isinstance(gateway, dict):
        gateway["models"] = []


def _refuse_computed(raw: Raw) -> None:
    """Raise ConfigError for a key that is computed from another one: its value here would be ignored."""
    for path, remedy in ELSEWHERE.items():
        *sections, name = path.split(".")
        section: object = raw
        for each in sections:
            section = section.get(each) if isinstance(section, dict) else None
        if isinstance(section, dict) and name in section:
            raise ConfigError(path, "is not set here", remedy)


def _with_hashed_keys(gateway: GatewayConfig) -> GatewayConfig:
    """Plain keys are forgotten as early as possible: from here on only digests travel."""
    hashed = [replace(key, key="", sha256=key.sha256 or hashlib.sha256(key.key.encode()).hexdigest()) for key in gateway.api_keys]
    return replace(gateway, api_keys=tuple(hashed))


def is_fetched(model: str) -> bool:
    """A hub id: looks like one, and no folder, file and bundled model has that name."""
    return HUB_ID.fullmatch(model) is not None and not is_gguf(model) and bundled_path(model) is None and not Path(model).exists()
