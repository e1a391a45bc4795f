"""Loads the configuration of `headrace serve` from one YAML file, then the environment, then flags. It is put together here and nowhere
else.

`cli.config.sections` has the types of the values, and docs/config.md lists every key. `cli.config.variables` turns variables into values.

    file         models: [{name: tiny, replicas: 2, engine: {model: /models/tiny}}]
    environment  HEADRACE_MODELS__0__REPLICAS=3, HEADRACE_GATEWAY__PORT=9000
    flags        headrace serve --port 9001
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from headrace.bundled import DEFAULT_MODEL
from headrace.cli.config.sections import ServeConfig
from headrace.cli.config.state import has_stored_keys, state_folder
from headrace.cli.config.variables import ELSEWHERE, REMOVED, apply_environment, flag_steps, named_by_origin, set_at
from headrace.cli.config.yaml_files import Raw, read_yaml
from headrace.core.errors import ConfigError
from headrace.core.strict_decode import decode
from headrace.gateway.access.principal import OPEN_ACCESS
from headrace.gateway.config import GatewayConfig
from headrace.machine.hosts import is_loopback

ENV_PREFIX = "HEADRACE_"


def load(
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, object] | None = None,
    *,
    flag_names: Mapping[str, str] | None = None,
    default_model: str = DEFAULT_MODEL,
) -> ServeConfig:
    """The checked configuration, from the file, then the environment, then flags.

    flags       dotted path -> value; "model." stands for the only model's section
    flag_names  the same paths -> the flag as it was written

    Raises ConfigError, which names the flag or the variable of a wrong value, else its path in the file.
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
    """As `load`, for a command that serves nothing: a server open without keys is not refused, and secrets of Kafka are not read."""
    names = flag_names or {}
    raw = {} if file is None else read_yaml(file)
    is_empty = not raw
    default = None if "models" in raw else default_model
    with named_by_origin(environment, ENV_PREFIX, names):
        apply_environment(ServeConfig, raw, environment, ENV_PREFIX)
        _apply_flags(raw, {path: value for path, value in (flags or {}).items() if value is not None}, names)
        config = from_raw(raw, default)
    if file is not None and is_empty:
        raise ConfigError(str(file), "is empty", "`headrace config init` prints a file to begin with; the defaults need no file.")
    return replace(config, state=str(state_folder(config.state, environment)))


def check_wants_keys(config: ServeConfig) -> None:
    """Raise ConfigError if other machines could use the server without a key, unless `allow_open` or `gateway.access: open` is set."""
    gateway = config.gateway
    is_open = gateway.access == OPEN_ACCESS
    if is_open and has_stored_keys(config.state, gateway.store):
        raise ConfigError("gateway.access", f"is {OPEN_ACCESS}, and the store has API keys", "Leave it out: requests need a key.")
    if not (is_open or is_loopback(gateway.host) or gateway.api_keys or config.allow_open or has_stored_keys(config.state, gateway.store)):
        raise ConfigError(
            "gateway.host",
            f"{gateway.host} can be reached from other machines and there is no API key",
            "Create one (headrace keys create), set one (--api-key, gateway.api_keys), or allow use without one (--allow-open).",
        )


def from_raw(raw: Raw, default_model: str | None = None) -> ServeConfig:
    """The checked configuration of plain data. Missing parts are added to `raw`, in place. Raises ConfigError with the path in `raw`."""
    config = decoded(raw, default_model).checked()
    return replace(config, gateway=_with_hashed_keys(config.gateway))


def decoded(raw: Raw, default_model: str | None = None) -> ServeConfig:
    """As `from_raw`, but only keys and types are checked, not values: a model's folder need not exist."""
    _refuse_computed(raw)
    _fill(raw, default_model)
    return decode(ServeConfig, raw, elsewhere={**ELSEWHERE, **REMOVED})


def _apply_flags(raw: Raw, flags: Mapping[str, object], names: Mapping[str, str]) -> None:
    models = raw.get("models")
    for path, value in flags.items():
        if path.startswith("model.") and isinstance(models, list) and len(models) > 1:
            reason = f"the file declares {len(models)} models, a flag cannot say which one it means"
            raise ConfigError(names.get(path, path), reason, "Set it in the file.")
        set_at(raw, flag_steps(path), value, path)


def _fill(raw: Raw, default_model: str | None) -> None:
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
    for path, remedy in ELSEWHERE.items():
        *sections, name = path.split(".")
        section: object = raw
        for each in sections:
            section = section.get(each) if isinstance(section, dict) else None
        if isinstance(section, dict) and name in section:
            raise ConfigError(path, "is not set here", remedy)


def _with_hashed_keys(gateway: GatewayConfig) -> GatewayConfig:
    """The gateway with only digests of its API keys: plain keys are dropped as early as possible."""
    hashed = [replace(key, key="", sha256=key.sha256 or hashlib.sha256(key.key.encode()).hexdigest()) for key in gateway.api_keys]
    return replace(gateway, api_keys=tuple(hashed))
