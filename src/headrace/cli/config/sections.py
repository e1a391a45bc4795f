"""The configuration of `headrace serve` as typed values, and the checks that concern more than one package."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from headrace.bundled import bundled_path
from headrace.core.errors import ConfigError
from headrace.core.model_names import name_of_file
from headrace.core.option import Reload, Role, check_options, mapping, option, required, section
from headrace.core.parallelism import AUTO as LAYOUT_AUTO
from headrace.core.strict_decode import NeedsExactlyOne, plain
from headrace.engine.config import EngineConfig, FindGpus
from headrace.fleet.config import MAX_REPLICAS, FleetConfig, FleetOptions, ModelSpec, ReplicaRange
from headrace.fleet.kubernetes.endpoints import MAX_ENGINES
from headrace.fleet.kubernetes.service import ANY_WORKLOAD, KubernetesService
from headrace.fleet.ray.options import RayOptions
from headrace.fleet.weights import HUB_ID, resolve_adapter
from headrace.gateway.config import GatewayConfig, config_from
from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.upstream.model_config import ForeignConfig, ModelConfig, ReplicaConfig
from headrace.machine.folders import expanded
from headrace.machine.gpus import find_gpus
from headrace.policy.fallbacks import NO_FALLBACKS, Fallbacks
from headrace.policy.limits.price import Price
from headrace.policy.limits.tier import Tier
from headrace.policy.routing.routes import ModelRoute
from headrace.registry.names import is_reference, read_reference
from headrace.tensor.checkpoint.gguf.paths import SUFFIX, is_first, is_gguf, model_name
from headrace.text.output.formats import AUTO, reasoning_format, tool_format
from headrace.wire.tls.files import token_path

TOP_LEVEL = ("state", "tiers", "prices", "routes", "usage")
"""Keys of the gateways' file that stand beside the section `gateway` in an operator's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReplica:
    """One engine that `headrace engine` started, and that this supervisor does not manage."""

    name: str = required("Label `replica` of metrics and logs, and its name in `/ready`.")
    address: str = required("Where the engine listens: `HOST:PORT` or `unix:/path`; the flag is `NAME=ADDRESS`, again for more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSection:
    model: str = required(
        "What the engines serve: a folder on this machine, a bundled model or a hub id. The gateway reads its tokenizer and template. "
        "Another one takes a restart of `headrace serve`.",
    )
    replicas: tuple[RemoteReplica, ...] = option((), "Where its engines listen.")
    kubernetes: KubernetesService | None = option(None, "In place of `replicas`: its engines are pods ([kubernetes.md](kubernetes.md)).")
    tls_dir: str = option(
        "",
        "Folder with this machine's certificates (`ca.crt`, `tls.crt`, `tls.key`), as `headrace tls init` or cert-manager makes it; for "
        "TCP addresses, required beyond loopback.",
    )
    token_file: str = option(
        "",
        "File with the token that the engines want, closed to other users; required for TCP.",
        shown="`token` of `tls_dir`",
    )

    def gateway_replicas(self) -> tuple[ReplicaConfig, ...]:
        """A replica on a Unix socket gets a token but no certificates. One stands for all pods of a Service."""
        if self.kubernetes is not None:
            address = f"{self.kubernetes.service}:1"
            return (ReplicaConfig(name=self.kubernetes.service, address=address, token_file=self.token_file, tls_dir=self.tls_dir),)
        return tuple(
            ReplicaConfig(
                name=replica.name,
                address=replica.address,
                token_file=token_path(self.token_file, self.tls_dir) if replica.address.startswith("unix:") else self.token_file,
                tls_dir="" if replica.address.startswith("unix:") else self.tls_dir,
            )
            for replica in self.replicas
        )


Divide = Callable[[EngineConfig, Path, int], EngineConfig]
"""Options, the model's folder and the number of replicas on this machine -> the options with a number of ranks."""


def undivided(engine: EngineConfig, folder: Path, num_replicas: int) -> EngineConfig:
    """A `Divide` for what starts no engine."""
    return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """One served model: the engines that serve it, the foreign servers that answer for it, or both."""

    engine: EngineConfig | None = option(None, "Options of every replica that is started here.", role=Role.DEVELOPER)
    remote: RemoteSection | None = option(None, "Engines that are started by themselves.", role=Role.OPERATOR)
    upstreams: tuple[ForeignConfig, ...] = option((), "OpenAI-compatible servers.", role=Role.OPERATOR)
    name: str = option(
        "",
        "What clients ask for.",
        shown="the hub id, the folder's name (what no name may have becomes `-`), or `model` of the first of `upstreams`",
    )
    aliases: tuple[str, ...] = option((), "Further names for it: the flag's from the second on.")
    replicas: int = option(
        1, "Engine processes, each with its own copy of the weights: more throughput, more memory.", low=1, high=MAX_REPLICAS
    )
    autoscale: ReplicaRange | None = option(
        None,
        "The load decides how many engines there are; `replicas` is the number to start with. Engines that are pods need a `workload`.",
        role=Role.OPERATOR,
    )
    standby: int = option(
        0,
        "Further engines that have loaded and get no request: one takes the place of a start when a replica is added, and another one is "
        "started. Each has its own copy of the weights.",
        low=0,
        high=MAX_REPLICAS,
        role=Role.OPERATOR,
    )
    sleeps: bool = option(
        False,
        "Its engine is awake while it has requests or no other one waits for its memory: `sleep_budget_bytes`.",
        flags=(),
    )
    adapters: dict[str, str] = mapping(
        "LoRA adapters of its engines: the name that clients ask for -> a folder as PEFT saves it, or the name of a bundled one. They set "
        "`enable_lora`. A reload changes them in engines that run, and reads their folders again; the flag is `NAME=FOLDER ...`, or vLLM's "
        "JSON.",
    )
    fallbacks: Fallbacks = section(Fallbacks, role=Role.TENANTS)
    tool_call_parser: str = option(
        AUTO,
        "How the model writes calls: a name that vLLM has for it (`hermes`, `llama3_json`, `mistral`, `pythonic`, ...), or `none`. `auto`: "
        "what the chat template shows. Without a known form requests with functions are refused.",
    )
    reasoning_parser: str = option(
        AUTO,
        "How the model marks its reasoning (`qwen3`, `deepseek_r1`, `mistral`, ...), or `none`: then it is part of the text. `auto`: what "
        "the chat template shows.",
    )

    @property
    def parsers(self) -> dict[str, str]:
        return {"tool_call_parser": self.tool_call_parser, "reasoning_parser": self.reasoning_parser}

    @property
    def of_gateway(self) -> dict[str, object]:
        fallbacks = {} if self.fallbacks == NO_FALLBACKS else {"fallbacks": plain(self.fallbacks)}
        return {**fallbacks, **(self.parsers if self.engine is not None or self.remote is not None else {})}

    def engine_options(self, resolve: Callable[[str], Path]) -> EngineConfig:
        """The options of engines that are started here, but for their adapters, with folders. resolve: as of `ServeConfig.fleet`"""
        assert self.engine is not None
        engine = self.engine.with_folders(resolve)
        return replace(engine, enable_lora=engine.enable_lora or bool(self.adapters))

    @property
    def num_engines(self) -> int:
        return self.replicas if self.engine is not None else 0

    @property
    def has_workload(self) -> bool:
        return self.remote is not None and self.remote.kubernetes is not None and bool(self.remote.kubernetes.workload)

    @property
    def max_engines(self) -> int:
        """Including the standby ones."""
        return 0 if self.engine is None else self.standby + (self.replicas if self.autoscale is None else self.autoscale.max)

    @property
    def num_replicas(self) -> int:
        """The most that may answer. Engines started elsewhere are included."""
        if self.remote is not None and self.remote.kubernetes is not None:
            return MAX_ENGINES
        return self.max_engines + (len(self.remote.replicas) if self.remote is not None else 0)

    @property
    def served_name(self) -> str:
        if self.name or (self.engine is None and self.remote is None):
            return self.name or self._file_name
        return name_of_file(self._file_name)

    @property
    def renamed(self) -> str:
        """Not empty where the name is made of a folder's or file's name that is no model name."""
        if self.name or self.served_name == self._file_name:
            return ""
        return (
            f"{self._file_name!r} is no model name: it is served as {self.served_name}; --served-model-name (the key name) gives another."
        )

    @property
    def _file_name(self) -> str:
        section = self.engine or self.remote
        if section is None:
            return self.upstreams[0].model if self.upstreams else ""
        if is_reference(section.model):
            return read_reference(section.model).name
        if is_fetched(section.model):
            return section.model
        return model_name(Path(section.model)) if is_gguf(section.model) else expanded(section.model).resolve().name


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(FleetOptions):
    models: tuple[ModelSection, ...] = required("Served models.", reload=Reload.LIVE, role=Role.DEVELOPER)
    state: str = option(
        "",
        "Folder of all embedded stores ([tenancy.md](tenancy.md)): keys, limits, usage. Made closed to other users; every command that "
        "reads or changes them finds it by the same rule. Relative to the working directory.",
        shown="`HEADRACE_STATE`, `$XDG_STATE_HOME/headrace`, else `~/.local/state/headrace`",
        role=Role.OPERATOR,
    )
    tiers: dict[str, Tier] = section(dict, reload=Reload.LIVE, role=Role.TENANTS)
    prices: dict[str, Price] = section(dict, reload=Reload.LIVE, role=Role.TENANTS)
    routes: dict[str, ModelRoute] = section(dict, reload=Reload.LIVE, role=Role.OPERATOR)
    usage: UsageConfig = section(UsageConfig, reload=Reload.LIVE, role=Role.BILLING)
    gateway: GatewayConfig = section(GatewayConfig, role=Role.OPERATOR)
    allow_open: bool = option(
        False,
        "Listen beyond loopback although there is no API key, neither in the configuration nor in the store ([identity.md](identity.md)).",
        reload=Reload.LIVE,
        role=Role.SECURITY,
    )
    experimental: bool = option(
        False,
        "Allow what has not been run where Headrace is tested: hub ids.",
        reload=Reload.LIVE,
        role=Role.DEVELOPER,
    )

    def checked(self, find: FindGpus = find_gpus) -> ServeConfig:
        """With engines' options for this machine. Raises ConfigError with the path of the wrong key in the file."""
        if self.ray is not None:
            find = self.ray.checked().find_gpus
        models = tuple(_checked_model(f"models[{index}]", model, find) for index, model in enumerate(self.models))
        self._check_gateway()
        folders = {model.remote.tls_dir for model in self.models if model.remote is not None and model.remote.tls_dir}
        if self.admin is not None and self.admin.tls_dir in folders:
            remedy = "Make a folder for operators alone: headrace tls init admin."
            raise ConfigError("admin.tls_dir", "is the folder that the gateways show to engines", remedy)
        if self.lora_root is not None and not expanded(self.lora_root).is_dir():
            raise ConfigError("lora_root", f"there is no folder {self.lora_root!r}")
        for index, model in enumerate(models):
            if self.ray is not None and model.engine is not None:
                _check_for_ray(f"models[{index}].engine", model.engine, self.ray)
        config = replace(self, models=models)
        config.fleet(lambda model: Path(model)).checked()
        return config

    def _check_gateway(self) -> None:
        try:
            # Decoded as the gateway will decode it, so that what it would refuse at its start is refused here.
            config_from(plain(self.gateway_before_start()))
        except ConfigError as error:
            # Replicas that this file does not name have made-up addresses, which are right.
            where = re.sub(r"^(models\[\d+\])\.replicas", r"\1.remote.replicas", error.where)
            raise error.at(where if where.startswith(("models", *TOP_LEVEL)) else f"gateway.{where}") from error

    @property
    def has_pods(self) -> bool:
        """Whether engines are found in a cluster, which a supervisor does."""
        return any(model.remote is not None and model.remote.kubernetes is not None for model in self.models)

    def whole_gateway(self) -> GatewayConfig:
        return replace(self.gateway, **{name: getattr(self, name) for name in TOP_LEVEL})

    def gateway_before_start(self) -> GatewayConfig:
        """Engines that are not started yet have placeholders for addresses."""
        return replace(self.whole_gateway(), models=tuple(_as_gateway_model(model) for model in self.models))

    def fleet(self, resolve: Callable[[str], Path], divide: Divide = undivided) -> FleetConfig:
        """
        resolve  makes a local folder of a `model` as the file names it; may download a hub id, and raise
        divide   decides the layout of engines whose options leave it open
        """
        gateway = plain(self.whole_gateway())
        del gateway["models"], gateway["timeouts"]["drain_s"]
        models = []
        for model in self.models:
            spec = ModelSpec(
                name=model.served_name,
                aliases=model.aliases,
                replicas=model.num_engines,
                autoscale=model.autoscale,
                standby=model.standby,
                sleeps=model.sleeps,
                gateway=model.of_gateway,
            )
            if model.engine is not None:
                sources: dict[str, str] = {}
                engine = model.engine_options(partial(_noted, resolve, sources))
                options = plain(divide(engine, Path(engine.model), sum(each.max_engines for each in self.models)))
                folders = {name: str(_noted(resolve_adapter, sources, path)) for name, path in model.adapters.items()}
                spec = replace(spec, folder=Path(options.pop("model")), source=model.engine.model, engine=options)
                spec = replace(spec, adapters=folders, sources=sources)
            elif model.remote is not None:
                remote = tuple(plain(replica) for replica in model.remote.gateway_replicas())
                spec = replace(spec, folder=resolve(model.remote.model), source=model.remote.model, remote=remote)
                spec = replace(spec, kubernetes=model.remote.kubernetes)
            models.append(replace(spec, upstreams=tuple(plain(upstream) for upstream in model.upstreams)))
        shared = {item.name: getattr(self, item.name) for item in fields(FleetOptions)}
        return FleetConfig(**{**shared, "models": tuple(models), "gateway": gateway})


def _noted(resolve: Callable[[str], Path], sources: dict[str, str], name: str) -> Path:
    folder = resolve(name)
    sources[str(folder)] = name
    return folder


def _check_for_ray(where: str, engine: EngineConfig, ray: RayOptions) -> None:
    if engine.device == "cuda" and not ray.num_gpus:
        raise ConfigError(f"{where}.device", "is cuda, and ray.num_gpus is 0", "Set the number of GPUs that a replica takes.")
    if engine.device == "cpu" and ray.num_gpus:
        raise ConfigError("ray.num_gpus", f"is {ray.num_gpus}, and {where}.device is cpu", "Leave one of them out.")
    if engine.tensor_parallel_size == LAYOUT_AUTO:
        reason = f"{LAYOUT_AUTO} is decided by the memory of this machine, and engines run on the nodes of a Ray cluster"
        raise ConfigError(f"{where}.tensor_parallel_size", reason, "Give the number.")
    if is_fetched(engine.model):
        reason = f"{engine.model!r} is a hub id, which the nodes of a Ray cluster do not fetch"
        raise ConfigError(f"{where}.model", reason, "Push it to a registry (headrace registry push), or give a folder that all nodes have.")


def _checked_model(where: str, model: ModelSection, find: FindGpus) -> ModelSection:
    _check_answers(where, model)
    check_options(model, where)
    if model.autoscale is not None and model.remote is not None and model.remote.kubernetes is not None and not model.has_workload:
        remedy = f"Name what has the pods: {ANY_WORKLOAD}."
        raise ConfigError(f"{where}.remote.kubernetes.workload", "is missing beside autoscale", remedy)
    for name, default in (("replicas", 1), ("autoscale", None), ("standby", 0)):
        if model.engine is None and getattr(model, name) != default and not (name == "autoscale" and model.has_workload):
            reason = "counts engines that are started here, and this model has none"
            raise ConfigError(f"{where}.{name}", reason, "Leave it out beside upstreams and remote.")
    if model.engine is None and model.sleeps:
        raise ConfigError(f"{where}.sleeps", "is of an engine that is started here, and this model has none", "Leave it out.")
    if model.engine is None and model.adapters:
        reason = "are of engines that are started here, and this model has none"
        raise ConfigError(f"{where}.adapters", reason, "Give them to `headrace engine --lora-modules`.")
    if model.engine is None and model.remote is None:
        for name, parser in model.parsers.items():
            if parser != AUTO:
                raise ConfigError(f"{where}.{name}", "is for text of our engines", "Leave it out: the other server parses its output.")
        return model
    tool_format(model.tool_call_parser, (), where=f"{where}.tool_call_parser")
    reasoning_format(model.reasoning_parser, (), where=f"{where}.reasoning_parser")
    if model.remote is not None:
        _check_folder(f"{where}.remote.model", model.remote.model)
        _check_remote(f"{where}.remote", model.remote)
    if model.engine is None:
        return model
    engine = _checked_engine(f"{where}.engine", model.engine, find)
    _check_adapters(f"{where}.adapters", model.adapters)
    return replace(model, engine=engine)


def _check_remote(where: str, remote: RemoteSection) -> None:
    if bool(remote.replicas) == (remote.kubernetes is not None):
        raise NeedsExactlyOne(where, "replicas", "kubernetes")
    if remote.kubernetes is not None:
        remote.kubernetes.check(f"{where}.kubernetes")
        if not remote.tls_dir:
            raise ConfigError(f"{where}.tls_dir", "is missing beside kubernetes", "Between pods the wire speaks TLS: `headrace tls init`.")


def _checked_engine(where: str, engine: EngineConfig, find: FindGpus) -> EngineConfig:
    try:
        checked = engine.checked(find)
    except ConfigError as error:
        raise error.at(f"{where}.{error.where}") from error
    _check_folder(f"{where}.model", engine.model)
    if engine.speculative_config is not None and engine.speculative_config.model:
        _check_folder(f"{where}.speculative_config.model", engine.speculative_config.model)
    return checked


def _as_gateway_model(model: ModelSection) -> ModelConfig:
    answered = ModelConfig(name=model.served_name, aliases=model.aliases, upstreams=model.upstreams, fallbacks=model.fallbacks)
    if model.remote is not None:
        return replace(answered, folder=model.remote.model, replicas=model.remote.gateway_replicas())
    if model.engine is not None:
        return replace(answered, folder=model.engine.model, replicas=(ReplicaConfig(name="-", address="unix:/run/replica"),))
    return answered


def _check_answers(where: str, model: ModelSection) -> None:
    is_here, is_elsewhere = model.engine is not None, model.remote is not None
    if (is_here and is_elsewhere) or not (is_here or is_elsewhere or model.upstreams):
        remedy = (
            "engine runs the model here, remote names engines that run elsewhere, upstreams asks servers for it, alone or beside these."
        )
        raise NeedsExactlyOne(where, "engine", "remote" if is_here else "upstreams", remedy)


def _check_adapters(where: str, adapters: Mapping[str, str]) -> None:
    for name, path in adapters.items():
        try:
            read_reference(path) if is_reference(path) else resolve_adapter(path)
        except ConfigError as error:
            raise error.at(f"{where}.{name}") from None


def _check_folder(where: str, name: str) -> None:
    if is_reference(name):
        try:
            read_reference(name)
        except ConfigError as error:
            raise error.at(where) from None
        return
    path = expanded(name)
    if is_fetched(name) or bundled_path(name) or (path / "config.json").is_file() or (is_gguf(name) and path.is_file()):
        return
    if path.is_dir():
        files = sorted(each.name for each in path.glob(f"*{SUFFIX}") if is_first(each))
        remedy = f"Give its file: {path / files[0]}." if files else "A model's folder holds config.json, tokenizer.json and *.safetensors."
        raise ConfigError(where, f"the folder {name!r} has no config.json", remedy)
    kind, there = ("file", path.parent.glob(f"*{SUFFIX}")) if is_gguf(name) else ("folder", path.parent.glob("*/config.json"))
    known = [str(each if is_gguf(name) else each.parent) for each in there]
    near = get_close_matches(str(path), known, n=1)
    raise ConfigError(where, f"there is no {kind} {name!r}", f"Did you mean {near[0]}?" if near else "")


def is_fetched(model: str) -> bool:
    """Whether `model` is a hub id, and not the name of a folder, a file or a bundled model."""
    return HUB_ID.fullmatch(model) is not None and not is_gguf(model) and bundled_path(model) is None and not Path(model).exists()
