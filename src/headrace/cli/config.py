"""The configuration of `headrace serve`: one YAML file, then the environment, then flags; read here and nowhere else.

Composes the packages' own frozen configs and checks pairs; each package checks its own fields. See docs/config.md.

    file         models: [{name: tiny, replicas: 2, engine: {model: /models/tiny}}]
    environment  HEADRACE_MODELS__0__REPLICAS=3, HEADRACE_GATEWAY__PORT=9000
    flags        headrace serve --port 9001
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.cli.config_decode import Raw, apply_environment, decode, read_yaml, set_at
from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.gateway.config import GatewayConfig, ModelConfig, ReplicaConfig

ENV_PREFIX = "HEADRACE_"
MAX_REPLICAS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """One served model and the engines that serve it.

    engine    of every replica
    name      what clients ask for; default: the hub id, or the folder's name
    aliases   further names for it
    replicas  engine processes
    """

    engine: EngineConfig
    name: str = ""
    aliases: tuple[str, ...] = ()
    replicas: int = 1

    @property
    def served_name(self) -> str:
        model = self.engine.model.rstrip("/")
        return self.name or (model if is_hub_id(model) else Path(model).name)

    @property
    def replica_names(self) -> tuple[str, ...]:
        """Labels of the replicas: the served name where it is a plain word, a number behind it."""
        stem = re.sub(r"[^A-Za-z0-9._-]", "-", self.served_name)[:100]
        return tuple(f"{stem}-{number}" for number in range(self.replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything `headrace serve` is told.

    gateway       its own section; `gateway.models` is made from `models` once the replicas have addresses
    allow_open    listen beyond loopback without API keys
    experimental  allow what has not been run where Headrace is tested (device cuda)
    """

    models: tuple[ModelSection, ...]
    gateway: GatewayConfig = field(default_factory=lambda: GatewayConfig(models=()))
    allow_open: bool = False
    experimental: bool = False

    def checked(self) -> ServeConfig:
        """This value if every section's rules and the pairs hold. Raises ConfigError with the path in the file."""
        for index, model in enumerate(self.models):
            self._check_model(f"models[{index}]", model)
        try:
            self.gateway_with(lambda name: f"unix:/run/{name}").checked()
        except ConfigError as error:
            where = error.where if error.where.startswith("models") else f"gateway.{error.where}"
            raise ConfigError(where, error.reason, error.remedy) from error
        if not (is_loopback(self.gateway.host) or self.gateway.api_keys or self.allow_open):
            raise ConfigError(
                "gateway.host",
                f"{self.gateway.host} can be reached from other machines and there is no API key",
                "Set one (--api-key, gateway.api_keys), or say that everybody may use it (--allow-open, allow_open).",
            )
        return self

    def _check_model(self, where: str, model: ModelSection) -> None:
        try:
            model.engine.checked()
        except ConfigError as error:
            raise ConfigError(f"{where}.engine.{error.where}", error.reason, error.remedy) from error
        if not 1 <= model.replicas <= MAX_REPLICAS:
            raise ConfigError(f"{where}.replicas", f"{model.replicas} is outside 1..{MAX_REPLICAS}")
        folder = Path(model.engine.model).expanduser()
        if not is_hub_id(model.engine.model) and not (folder / "config.json").is_file():
            raise ConfigError(f"{where}.engine.model", f"{model.engine.model!r} is not a folder with a config.json")
        if model.engine.device != "cpu" and not self.experimental:
            reason = f"{model.engine.device} has not been run where Headrace is tested"
            raise ConfigError(f"{where}.engine.device", reason, "Say --experimental (or experimental: true) to try it.")

    def gateway_with(self, address_of: Callable[[str], str]) -> GatewayConfig:
        """The gateway's whole configuration; address_of: replica name -> its address."""
        models = tuple(
            ModelConfig(
                name=model.served_name,
                aliases=model.aliases,
                folder=model.engine.model,
                replicas=tuple(ReplicaConfig(name=name, address=address_of(name)) for name in model.replica_names),
            )
            for model in self.models
        )
        return replace(self.gateway, models=models)


def load(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, object] | None = None, *, default_model: str | None = None
) -> ServeConfig:
    """The checked configuration: file, then environment, then flags.

    flags          dotted path -> value, e.g. "gateway.port"; "model." stands for the only model's section. None = not given
    default_model  folder served when nothing names one

    Raises: ConfigError.
    """
    raw = {} if file is None else read_yaml(file)
    apply_environment(ServeConfig, raw, environment, ENV_PREFIX)
    _apply_flags(raw, {path: value for path, value in (flags or {}).items() if value is not None})
    _fill(raw, default_model)
    config = decode(ServeConfig, raw).checked()
    return replace(config, models=tuple(map(_with_local_path, config.models)), gateway=_with_hashed_keys(config.gateway))


def _apply_flags(raw: Raw, flags: Mapping[str, object]) -> None:
    models = raw.get("models")
    for path, value in flags.items():
        steps = path.split(".")
        if steps[0] == "model":
            if isinstance(models, list) and len(models) > 1:
                reason = f"the file declares {len(models)} models, a flag cannot say which one it means"
                raise ConfigError(f"--{steps[-1].replace('_', '-')}", reason, "Set it in the file.")
            steps = ["models", "0", *steps[1:]]
        set_at(raw, steps, value, path)


def _fill(raw: Raw, default_model: str | None) -> None:
    """What may be left out of a file but not out of the value: a model, and the gateway's list that is made from ours."""
    if default_model is not None and not raw.get("models"):
        raw["models"] = [{}]
    models = raw.get("models")
    if isinstance(models, list) and len(models) == 1 and isinstance(models[0], dict) and default_model is not None:
        engine = models[0].setdefault("engine", {})
        if isinstance(engine, dict):
            engine.setdefault("model", default_model)
    gateway = raw.setdefault("gateway", {})
    if isinstance(gateway, dict):
        if "models" in gateway:
            raise ConfigError("gateway.models", "is not set here", "Declare models at the top level.")
        gateway["models"] = []


def _with_local_path(model: ModelSection) -> ModelSection:
    """Child processes may run in another directory: a folder becomes absolute, under the name it had."""
    if is_hub_id(model.engine.model):
        return model
    folder = str(Path(model.engine.model).expanduser().resolve())
    engine = replace(model.engine, model=folder)
    return replace(model, engine=engine, name=model.name or Path(folder).name)


def _with_hashed_keys(gateway: GatewayConfig) -> GatewayConfig:
    """Plain keys are forgotten as early as possible: from here on only digests travel."""
    hashed = [replace(key, key="", sha256=key.sha256 or hashlib.sha256(key.key.encode()).hexdigest()) for key in gateway.api_keys]
    return replace(gateway, api_keys=tuple(hashed))


def is_hub_id(model: str) -> bool:
    """`owner/name` that is no local path."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model) is not None and not Path(model).exists()


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
