"""Loads the configuration of `headrace serve` from one YAML file, then the environment, then flags, and loads it again for a reload.

    file         models: [{name: tiny, replicas: 2, engine: {model: /models/tiny}}]
    environment  HEADRACE_MODELS__0__REPLICAS=3, HEADRACE_GATEWAY__PORT=9000
    flags        headrace serve --port 9001

`cli.config.sections` has the types of the values. A variable's value is a string where the configuration has a string, and YAML elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from headrace.bundled import DEFAULT_MODEL
from headrace.cli.config.sections import TOP_LEVEL, ServeConfig
from headrace.cli.config.state import has_stored_keys, state_folder
from headrace.cli.config.yaml_files import Raw, parse_yaml, read_yaml, shown_path
from headrace.cli.flags.flag import NO_FLAGS, GivenFlags
from headrace.core.differences import differences
from headrace.core.errors import ConfigError
from headrace.core.option import Leaf, leaves
from headrace.core.strict_decode import UnknownKey, decode, inner, joined, key_of
from headrace.engine.config import FindGpus
from headrace.fleet.config import FleetConfig
from headrace.gateway.access.principal import OPEN_ACCESS
from headrace.gateway.config import GatewayConfig
from headrace.gateway.control.protections import check_keeps_protections, gives_up_keys
from headrace.lab.plan.here import decide_layout
from headrace.machine.gpus import find_gpus
from headrace.machine.hosts import is_loopback

ENV_PREFIX = "HEADRACE_"

INSTEAD = {
    **{f"gateway.{name}": f"Set {name} at the top level." for name in ("models", *TOP_LEVEL)},
    "gateway.salt_key": "Set site_key at the top level.",
    "gateway.timeouts.drain_s": "Set drain_timeout_s at the top level.",
    "gateway.limits.max_text_workers": "Each gateway worker has one or two: set gateway.workers.",
    "gateway.limits.max_prompt_bytes": "A sixteenth of the memory is for prompts: limit the process's memory, or set max_requests.",
    "models[N].engine.lora_modules": "Name adapters in models[N].adapters.",
    "gateway.limits.max_answer_bytes": "Answers may hold 40 MiB: set max_requests, or max_tenant_share.",
    # Earlier versions had these.
    "models[N].smaller": "Write fallbacks: {busy: [NAME]}: the models that answer while this one is busy.",
    "models[N].upstreams[N].first_token_s": "silence_s holds before the first token too.",
    "models[N].upstreams[N].allow_link_local": "A server at a link-local address is never connected to: name it by another address.",
    "gateway.timeouts.sse_ping_s": "A quiet stream gets a comment line every 10 s: give proxies a longer time.",
    "gateway.timeouts.stream_resume_s": "A stream whose client asks for that can be continued for 60 s after its end.",
    "gateway.limits.max_connections": "A gateway holds 16384 connections, or twice max_requests where that is more.",
    "usage.clickhouse.user": "Write it into url, as https://USER@HOST:8443.",
    "usage.clickhouse.ca_file": "Add the authority to the system's, or name all of them by SSL_CERT_FILE.",
    "gateway.metrics_tenants": "Give whoever reads the series of all tenants a key with role: reader.",
    "models[N].engine.max_waiting_per_tenant": "A full queue is shared by the tenants: bound one by max_concurrent_requests of its tier.",
    "gateway.cache.models": "Answers of all models are cached: switch it for a tenant (`headrace tenants set NAME --option cache=false`).",
    "gateway.idempotency": "Answers to requests with an Idempotency-Key are kept for 24 hours.",
}
"""Paths that are refused -> what to do instead. The first are keys of the packages' configs that are computed, or have one good value."""


def file_keys() -> Iterator[Leaf]:
    return (leaf for leaf in leaves(ServeConfig) if not any(rest_within(leaf.path, path) is not None for path in INSTEAD))


def load(file: Path | None, environment: Mapping[str, str], flags: GivenFlags = NO_FLAGS, find: FindGpus = find_gpus) -> ServeConfig:
    """Raises ConfigError, which names the flag or the variable of a wrong value, else its path in the file."""
    config = load_settings(file, environment, flags, find)
    with named_by_origin(environment, flags):
        check_wants_keys(config)
        if config.usage.kafka is not None:
            config.usage.kafka.properties()
    return config


def load_settings(
    file: Path | None, environment: Mapping[str, str], flags: GivenFlags = NO_FLAGS, find: FindGpus = find_gpus
) -> ServeConfig:
    """As `load`, for a command that serves nothing: a server open without keys is not refused, and secrets of Kafka are not read."""
    raw = {} if file is None else read_yaml(file)
    is_empty, default_model = not raw, None if "models" in raw else DEFAULT_MODEL
    with named_by_origin(environment, flags):
        for name, steps in variables(environment):
            apply_variable(raw, name, steps, environment[name])
        _apply_flags(raw, flags)
        config = from_raw(raw, default_model, find)
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


def from_raw(raw: Raw, default_model: str | None = None, find: FindGpus = find_gpus) -> ServeConfig:
    """Missing parts are added to `raw`, in place. Raises ConfigError with the path in `raw`."""
    config = decoded(raw, default_model)
    _refuse_adapters_that_are_off(raw["models"])
    config = config.checked(find)
    return replace(config, gateway=_with_hashed_keys(config.gateway))


def decoded(raw: Raw, default_model: str | None = None) -> ServeConfig:
    """As `from_raw`, but only keys and types are checked, not values: a model's folder need not exist."""
    _fill(raw, default_model)
    return decode(ServeConfig, raw, refused=INSTEAD)


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


def _refuse_adapters_that_are_off(models: Any) -> None:
    """Adapters set `enable_lora`, unless it is set to off: decoded, that looks like the default. models: as a file has them, decodable"""
    for index, model in enumerate(models):
        if model.get("adapters") and (model.get("engine") or {}).get("enable_lora") is False:
            where, remedy = f"models[{index}].engine.enable_lora", "Leave out one of the two."
            raise ConfigError(where, "is off, and there are adapters (--lora-modules)", remedy)


def _with_hashed_keys(gateway: GatewayConfig) -> GatewayConfig:
    """Plain keys are dropped as early as possible."""
    hashed = [replace(key, key="", sha256=key.sha256 or hashlib.sha256(key.key.encode()).hexdigest()) for key in gateway.api_keys]
    return replace(gateway, api_keys=tuple(hashed))


def variables(environment: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """(name, steps of its path) of each variable that is configuration, in the order in which they are applied."""
    outside = {leaf.path for leaf in file_keys() if "." not in leaf.path}
    for name in sorted(environment):
        rest = name.removeprefix(ENV_PREFIX).lower()
        if name.startswith(ENV_PREFIX) and ("__" in rest or rest in outside):
            yield name, rest.split("__")


def apply_variable(raw: Raw, name: str, steps: Sequence[str], text: str) -> None:
    """Raises ConfigError for an unknown path."""
    set_at(raw, steps, text if inner(_hint_at(steps, name)) is str else parse_yaml(text, name), name)


def _apply_flags(raw: Raw, flags: GivenFlags) -> None:
    models = raw.get("models")
    for path, value in flags.values.items():
        if path.startswith("model.") and isinstance(models, list) and len(models) > 1:
            reason = f"the file declares {len(models)} models, a flag cannot say which one it means"
            raise ConfigError(flags.names.get(path, path), reason, "Set it in the file.")
        set_at(raw, _flag_steps(path), value, path)


def known_variables(number: str = "0") -> Iterator[str]:
    """The variable of every value that can be set, except below names chosen in the file (tiers, routes). number: of every list item"""
    for leaf in file_keys():
        if "[NAME]" not in leaf.path:
            yield ENV_PREFIX + leaf.path.upper().replace("[N]", f".{number}").replace(".", "__")


def nearest_variable(name: str) -> str | None:
    """The only known variable with the same ending, else the one with the most similar name."""
    number = next((step for step in name.split("__") if step.isdecimal()), "0")
    known = list(known_variables(number))
    last = name.removeprefix(ENV_PREFIX).rpartition("__")[2]
    alike = [each for each in known if each.endswith(f"__{last}")]
    return alike[0] if len(alike) == 1 else next(iter(get_close_matches(name, known, n=1, cutoff=0.7)), None)


def _hint_at(steps: Sequence[str], name: str) -> object:
    hint: object = ServeConfig
    path = ""
    for step in steps:
        hint = inner(hint)
        if get_origin(hint) is tuple and step.isdecimal():
            hint, path = get_args(hint)[0], f"{path}[N]"
        elif get_origin(hint) is dict:
            hint, path = get_args(hint)[1], f"{path}[NAME]"
        elif isinstance(hint, type) and is_dataclass(hint):
            hints, path = {key_of(name): each for name, each in get_type_hints(hint).items()}, joined(path, step)
            if path in INSTEAD:
                raise ConfigError(name, "is not a key", INSTEAD[path])
            if step not in hints:
                nearest = nearest_variable(name)
                raise ConfigError(name, "is not a known key", f"Did you mean {nearest}?") if nearest else UnknownKey(name, hints, {})
            hint = hints[step]
        else:
            raise ConfigError(name, f"nothing can be set at {step!r}", "Levels are joined by two underscores; list places are numbers.")
    return hint


def set_at(raw: Raw, steps: Sequence[str], value: object, name: str) -> None:
    """Missing or null mappings are made, and the next item of a list; an index beyond it raises ConfigError. Nothing is set in a value
    of the wrong type (gateway: []): decoding refuses it by its own path."""
    place: object = raw
    for index, step in enumerate(steps):
        last = index == len(steps) - 1
        fresh: object = value if last else ([] if steps[index + 1].isdecimal() else {})
        if isinstance(place, dict):
            if last or place.get(step) is None:
                place[step] = fresh
            place = place[step]
        elif not (isinstance(place, list) and step.isdecimal()):
            return
        elif int(step) <= len(place):
            if int(step) == len(place):
                place.append(fresh)
            elif last:
                place[int(step)] = value
            place = place[int(step)]
        else:
            raise ConfigError(name, f"nothing can be set at {step!r}", "List places are filled in order, from 0.")


@contextmanager
def named_by_origin(environment: Mapping[str, str], flags: GivenFlags) -> Iterator[None]:
    """Make a ConfigError of the block name the flag or variable that set the value, unless the value is from the file."""
    try:
        yield
    except ConfigError as error:
        if (name := origin_of(error.where, environment, flags)) is None:
            raise
        raise error.at(name) from error


def origin_of(where: str, environment: Mapping[str, str], flags: GivenFlags = NO_FLAGS) -> str | None:
    """The flag or variable that set the value at `where`; None: the file. Flags win over variables, later variables over earlier ones."""
    for path, name in flags.names.items():
        if (rest := rest_within(where, shown_path(_flag_steps(path)))) is not None:
            return name + (rest if rest.startswith(".") else "")  # a flag may hold a whole section
    places = [(name, rest_within(where, shown_path(steps))) for name, steps in variables(environment)]
    return next((name + rest for name, rest in reversed(places) if rest is not None), None)  # a variable may hold a whole section


def rest_within(where: str, path: str) -> str | None:
    rest = where.removeprefix(path)
    return rest if rest != where and rest[:1] in ("", ".", "[") else None


def _flag_steps(path: str) -> list[str]:
    """["models", "0", "name"] for "model.name": a flag means the only model's section."""
    steps = path.split(".")
    return ["models", "0", *steps[1:]] if steps[0] == "model" else steps


class ServeSource:
    """The configuration of `headrace serve` as a `fleet.control.ConfigSource`."""

    def __init__(
        self, held: ServeConfig, load: Callable[[], ServeConfig], resolve: Callable[[str], Path], file: Path | None = None
    ) -> None:
        """load: reads the configuration again; resolve: name of a model in the file -> its local folder; file: None: there is none"""
        self.file = None if file is None else file.absolute()
        self._held = self._last = held
        self._load = load
        self._resolve = resolve

    @property
    def held(self) -> ServeConfig:
        return self._held

    def read(self, pulled: Mapping[str, Path]) -> FleetConfig:
        """May fetch a model. Raises ConfigError, also for a configuration that loses what protects the server."""
        last = self._load()
        check_keeps(self._held, last)
        self._last = last
        return last.fleet(lambda name: pulled.get(name) or self._resolve(name), decide_layout).checked()

    def renewed(self, pulled: Mapping[str, Path], versions: Mapping[str, str]) -> FleetConfig:
        from headrace.fleet.weights import pulled_model

        anew = {name: pulled_model(version) for name, version in versions.items()}
        return self._held.fleet(lambda name: anew.get(name) or pulled.get(name) or self._resolve(name), decide_layout).checked()

    def differences(self) -> list[str]:
        changes = differences(_with_names(self._held), _with_names(self._last))
        return [str(change) for change in changes] or ["the configuration is as it was"]

    def accept(self) -> None:
        self._held = self._last


def check_keeps(held: ServeConfig, last: ServeConfig) -> None:
    """Raise ConfigError for a configuration that lost its models or what protects the server (`gateway.control.protections`)."""
    before, after = held.gateway_before_start(), last.gateway_before_start()
    lost = {model.name for model in before.models} - {DEFAULT_MODEL}
    if {model.name for model in after.models} == {DEFAULT_MODEL} and len(lost) == len(before.models):
        reason = f"would be {DEFAULT_MODEL} alone, as in a file without models, and {', '.join(sorted(lost))} gone"
        raise ConfigError("models", reason, "Write the models again.")
    needs_stored = gives_up_keys(before, after)
    check_keeps_protections(before, after, has_stored_keys=needs_stored and has_stored_keys(last.state, last.gateway.store))


def _with_names(config: ServeConfig) -> ServeConfig:
    return replace(config, models=tuple(replace(model, name=model.served_name) for model in config.models))
