"""Describes a deployment on one machine (models, replicas, gateways on one port), and what of it may change while it runs."""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.core.adapters import MAX_ADAPTERS
from headrace.core.errors import ConfigError
from headrace.core.hashing import check_secret
from headrace.core.model_names import check_free_name, check_model_names
from headrace.core.option import Reload, Role, check_options, option, options, required
from headrace.core.parallelism import Parallelism
from headrace.core.strict_decode import NeedsExactlyOne
from headrace.fleet.admin_listen import AdminListen
from headrace.fleet.kept_scaling import KeptScaling, read_scaling
from headrace.fleet.kubernetes.endpoints import MAX_ENGINES
from headrace.fleet.kubernetes.service import KubernetesService
from headrace.fleet.launcher import SECRET_VARIABLES
from headrace.fleet.ray.options import RayOptions
from headrace.machine.folders import expanded
from headrace.observe.logs import LogFormat
from headrace.policy.deployment import Deployment, RolloutOptions, replica_prefix
from headrace.policy.scaling.autoscaler import MIN_SETTLE_S, ScalingRules
from headrace.policy.scaling.budget import HOUR_S, DayBudget, DayUse
from headrace.registry.cache import version_in
from headrace.registry.names import is_reference
from headrace.text.folder import digests_of

MAX_REPLICAS = 64
"""Engines of a model that are started here. Pods: MAX_ENGINES."""
MAX_TIMEOUT_S = 86_400
MIN_HANG_TIMEOUT_S = 15.0
"""The wire's lease (10 s) and a new connection come first."""

DAY_H = 24

LEAVE_GRACE_S = 10.0
"""From the end of a drain to that of the process."""
DECISION_S = 10.0
"""From one decision of the autoscaler to the next, while a gateway is silent."""

KEY_BYTES = 32
COMMAND = (sys.executable, "-P", "-m", "headrace")
"""-P: modules are not looked for in the current directory, which may be a downloaded model's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRange:
    """Between which numbers the load decides ([autoscaling.md](autoscaling.md))."""

    max: int = required(f"Most replicas; of engines that are no pods at most {MAX_REPLICAS}.", low=1, high=MAX_ENGINES)
    min: int = option(
        1,
        "Fewest. 0: the last one ends after 15 minutes without a request, and the next request waits until one has loaded.",
        low=0,
        high=MAX_ENGINES,
    )
    replica_hours_per_day: float | None = option(
        None,
        "Hours that its engines may take together from midnight to midnight UTC ([autoscaling.md](autoscaling.md#a-bound-on-the-bill)): "
        "fewer cost less, and a busy day ends with `min` of them.",
        above=0.0,
        high=MAX_ENGINES * DAY_H,
    )

    def within(self, num_replicas: int) -> int:
        return sorted((self.min, num_replicas, self.max))[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """folder      resolved (`fleet.weights.resolve_model`); None: only foreign servers answer
    source      what the file calls it
    replicas    engine processes, at the start where the load decides; none without a folder or beside `remote`
    sleeps      its engine shares `sleep_budget_bytes`
    autoscale   None: an operator alone decides
    adapters    name -> folder
    kubernetes  the engines are its pods; `remote` then has one entry, for what all of them have alike
    sources     folders of its draft model and adapters -> what the file calls them
    """

    name: str
    folder: Path | None = None
    source: str = ""
    aliases: tuple[str, ...] = ()
    replicas: int = 1
    autoscale: ReplicaRange | None = None
    standby: int = 0
    sleeps: bool = False
    engine: Mapping[str, object] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    remote: tuple[Mapping[str, object], ...] = ()
    kubernetes: KubernetesService | None = None
    upstreams: tuple[Mapping[str, object], ...] = ()
    gateway: Mapping[str, object] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def num_wanted(self, before: int | None) -> int:
        """before: the number until now; None: it is new here"""
        return self.replicas if self.autoscale is None else self.autoscale.within(self.replicas if before is None else before)

    @property
    def starts_on_demand(self) -> bool:
        return self.autoscale is not None and self.autoscale.min == 0

    @property
    def version(self) -> str:
        """Empty where its name in the file is not in a registry."""
        return version_in(self.folder) if self.folder is not None and is_reference(self.source) else ""

    @property
    def num_ranks(self) -> int:
        """Processes of one replica."""
        tp, pp = (int(str(self.engine.get(f"{name}_parallel_size") or 1)) for name in ("tensor", "pipeline"))
        return Parallelism(tp, pp).world

    @property
    def has_adapters(self) -> bool:
        """Whether engines that are started here may have some."""
        return bool(self.replicas and self.engine.get("enable_lora"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What an operator's file says of a deployment. The decoded file and the fleet each have `models` of another class."""

    models: tuple[object, ...]
    drain_timeout_s: float = option(
        30.0,
        "Seconds that running streams may take after SIGTERM, when no new work is accepted.",
        low=0.0,
        high=MAX_TIMEOUT_S,
        reload=Reload.LIVE,
        role=Role.OPERATOR,
    )
    start_timeout_s: float = option(
        1800.0,
        "A gateway or an engine that has not served within these seconds of its start is killed and counts as failed "
        "([fleet.md](fleet.md#what-happens-when)); 0: never. Longer than the slowest load of weights.",
        low=0.0,
        high=MAX_TIMEOUT_S,
        reload=Reload.LIVE,
        role=Role.OPERATOR,
    )
    hang_timeout_s: float = option(
        60.0,
        "An engine that has served, and that no gateway can use for these seconds, is killed and started again; a gateway that answers "
        "nothing, after about 10 s. At least 15; 0: never, for work with a debugger.",
        low=0.0,
        high=MAX_TIMEOUT_S,
        reload=Reload.LIVE,
        role=Role.OPERATOR,
    )
    log_format: str = option(
        "auto",
        "Format of the whole log: `auto` is text on a terminal and JSON elsewhere. A request log that is a file is always JSON.",
        one_of=tuple(LogFormat),
        role=Role.OPERATOR,
    )
    run_dir: str | None = option(
        None,
        "Directory in which the private directory for sockets is made.",
        shown="`XDG_RUNTIME_DIR`, else the temporary directory",
        role=Role.OPERATOR,
    )
    lora_root: str | None = option(
        None,
        "Folder below which `headrace adapters load` may load adapters, links followed ([control.md](control.md#adapters)); without it "
        "none can be loaded at run time.",
        reload=Reload.LIVE,
        role=Role.OPERATOR,
    )
    sleep_budget_bytes: int | None = option(
        None,
        "Bytes that the engines of the models with `sleeps` may take together while they are awake "
        "([fleet.md](fleet.md#several-models-on-one-machine)).",
        shown="none sleeps",
        low=1,
        role=Role.OPERATOR,
    )
    ray: RayOptions | None = option(None, "Engines run on the nodes of a Ray cluster ([ray.md](ray.md)).", role=Role.OPERATOR)
    admin: AdminListen | None = option(None, "The operator's commands from other machines.", role=Role.OPERATOR)
    site_key: str = option(
        "",
        "Hex secret (32 to 128 digits) from which the tenants' cache salts and the hashes of KV blocks are keyed: set it where several "
        "starts serve one site.",
        shown="drawn at start",
        role=Role.SECURITY,
        repr=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig(FleetOptions):
    """An empty site_key: `with_site_key` draws one."""

    models: tuple[ModelSpec, ...]
    gateway: Mapping[str, object] = field(default_factory=dict, repr=False)
    engine_command: tuple[str, ...] = (*COMMAND, "engine")
    gateway_command: tuple[str, ...] = (*COMMAND, "gateway")

    def checked(self) -> FleetConfig:
        if not self.models:
            raise ConfigError("models", "is empty", "Declare at least one model.")
        names: set[str] = set()
        for index, model in enumerate(self.models):
            _check_model(f"models[{index}]", model, names)
            _check_budget(f"models[{index}]", self.day_budget(model))
            if model.sleeps:
                _check_sleeps(f"models[{index}]", model, self.sleep_budget_bytes)
        _check_workloads(self.models)
        for route in self.routes:
            check_free_name(f"routes.{route}", route, names)
        if "models" in self.gateway:
            raise ConfigError("gateway.models", "is not a key of this file", "Models are declared once, under `models`.")
        check_options(self)
        if 0 < self.hang_timeout_s < MIN_HANG_TIMEOUT_S:
            reason = f"{self.hang_timeout_s:g} is less than {MIN_HANG_TIMEOUT_S:g} seconds: a slow step would end its engine"
            raise ConfigError("hang_timeout_s", reason, "Use at least that, or 0 for never.")
        check_secret("site_key", self.site_key)
        if self.admin is not None:
            self.admin.checked()
        if self.sleep_budget_bytes is not None and not any(model.sleeps for model in self.models):
            raise ConfigError("sleep_budget_bytes", "is set, and no model sleeps", "Give a model `sleeps: true`, or leave it out.")
        if self.ray is not None:
            self.ray.checked()
            if not any(model.replicas for model in self.models):
                raise ConfigError("ray", "runs engines, and no model has `engine`", "Leave it out: engines of remote run by themselves.")
            if self.sleep_budget_bytes is not None:
                reason = "is of one machine, and engines run on the nodes of a Ray cluster"
                raise ConfigError("sleep_budget_bytes", reason, "Leave out one of the two.")
        return self

    def spec(self, model: str) -> ModelSpec | None:
        return next((spec for spec in self.models if spec.name == model), None)

    def engine_options(self, model: ModelSpec) -> Mapping[str, object]:
        """An engine that shares the budget has all of it unless its options say less."""
        if not model.sleeps or model.engine.get("memory_bytes") is not None:
            return model.engine
        return {**model.engine, "memory_bytes": self.sleep_budget_bytes}

    @property
    def key_variables(self) -> frozenset[str]:
        """Only the gateway reads these; engines do not inherit them."""
        upstreams = [upstream for model in self.models for upstream in model.upstreams]
        return frozenset(str(upstream["api_key_env"]) for upstream in upstreams if "api_key_env" in upstream)

    @property
    def pulled(self) -> Mapping[str, Path]:
        """Name of a model in a registry -> its folder here."""
        return {model.source: model.folder for model in self.models if model.folder is not None and is_reference(model.source)}

    @property
    def gateway_address(self) -> tuple[str, int]:
        return str(self.gateway.get("host", "127.0.0.1")), int(str(self.gateway.get("port", 0)))

    @property
    def routes(self) -> Sequence[str]:
        given = self.gateway.get("routes", {})
        return list(given) if isinstance(given, Mapping) else []

    @property
    def ttft_s(self) -> float:
        """The shortest goal of a tier; else what a person takes for an immediate answer."""
        tiers = self.gateway.get("tiers")
        goals = [tier.get("ttft_ms") for tier in tiers.values() if isinstance(tier, Mapping)] if isinstance(tiers, Mapping) else []
        return min([float(str(goal)) / 1000 for goal in goals if goal], default=ScalingRules().ttft_s)

    @property
    def leave_s(self) -> float:
        """A replica that is given up has ended by then."""
        return self.drain_timeout_s + LEAVE_GRACE_S

    def day_budget(self, spec: ModelSpec) -> DayBudget | None:
        autoscale = spec.autoscale
        if autoscale is None or autoscale.replica_hours_per_day is None:
            return None
        return DayBudget(hours=autoscale.replica_hours_per_day, num_fixed=autoscale.min + spec.standby, leave_s=DECISION_S + self.leave_s)

    @property
    def adapters_root(self) -> Path | None:
        """Below which operators may load adapters; None: they may not."""
        return None if self.lora_root is None else expanded(self.lora_root).resolve()

    @property
    def adapters_file(self) -> Path | None:
        """Where adapters are kept that operators loaded; None without a state folder."""
        return self._state_file("adapters.json")

    @property
    def scaling_file(self) -> Path | None:
        """Where the load of earlier days is kept."""
        return self._state_file("scaling.json")

    def _state_file(self, name: str) -> Path | None:
        state = self.gateway.get("state")
        return Path(str(state)) / name if state else None

    @property
    def num_gateways(self) -> int:
        return int(str(self.gateway.get("workers", 1)))

    def with_engines(self, specs: Mapping[str, ModelSpec]) -> FleetConfig:
        """Models named there run with the folder and the options of those."""
        models = (
            replace(spec, folder=new.folder, source=new.source, engine=new.engine) if (new := specs.get(spec.name)) is not None else spec
            for spec in self.models
        )
        return replace(self, models=tuple(models))

    def with_site_key(self) -> FleetConfig:
        return replace(self, site_key=self.site_key or secrets.token_hex(KEY_BYTES))


def _check_model(where: str, model: ModelSpec, names: set[str]) -> None:
    check_model_names(where, model.name, model.aliases, names)
    if len(model.adapters) > MAX_ADAPTERS:
        raise ConfigError(f"{where}.adapters", f"has {len(model.adapters)} names, more than {MAX_ADAPTERS}")
    for name in model.adapters:
        check_free_name(f"{where}.adapters.{name}", name, names)
    for index, upstream in enumerate(model.upstreams):
        _check_key_variable(f"{where}.upstreams[{index}].api_key_env", str(upstream.get("api_key_env", "")))
    if model.folder is None:
        if not model.upstreams:
            raise NeedsExactlyOne(where, "folder", "upstreams")
        if model.replicas:
            raise ConfigError(f"{where}.replicas", f"{model.replicas} is not 0 without a folder")
        return
    _check_foreign_names(f"{where}.upstreams", model)
    if model.remote:
        if model.replicas:
            raise ConfigError(f"{where}.replicas", f"{model.replicas} is not 0 beside remote")
        if model.autoscale is not None:
            _check_range(where, model.autoscale)
        return
    if not 1 <= model.replicas <= MAX_REPLICAS:
        raise ConfigError(f"{where}.replicas", f"{model.replicas} is outside 1..{MAX_REPLICAS}")
    if model.autoscale is not None:
        _check_range(where, model.autoscale)
        _check_counts(where, model, model.autoscale)
    if "model" in model.engine:
        raise ConfigError(f"{where}.engine.model", "is not an option here", "The model's folder is `path`.")


def _check_range(where: str, autoscale: ReplicaRange) -> None:
    check_options(autoscale, f"{where}.autoscale")
    if autoscale.min > autoscale.max:
        raise ConfigError(f"{where}.autoscale.min", f"{autoscale.min} is more than max, {autoscale.max}")


def _check_budget(where: str, budget: DayBudget | None) -> None:
    if budget is not None and not budget.num_more(DayUse(0.0), stay_s=MIN_SETTLE_S):
        least = DAY_H * budget.num_fixed + (MIN_SETTLE_S + budget.leave_s) / HOUR_S
        reason = f"{budget.hours:g} is less than {least:.4g}: a day of min and standby ({budget.num_fixed}), and one more for five minutes"
        remedy = "Raise it, or lower min, standby or drain_timeout_s."
        raise ConfigError(f"{where}.autoscale.replica_hours_per_day", f"{reason} and its drain", remedy)


def _check_counts(where: str, model: ModelSpec, autoscale: ReplicaRange) -> None:
    replicas = model.replicas
    if autoscale.max > MAX_REPLICAS:
        remedy = f"More engines than {MAX_REPLICAS} are pods (remote.kubernetes)."
        raise ConfigError(f"{where}.autoscale.max", f"{autoscale.max} is outside 1..{MAX_REPLICAS}", remedy)
    if replicas > 1 and autoscale.within(replicas) != replicas:
        remedy = "It is the number to start with: leave it out, or write one between them."
        raise ConfigError(f"{where}.replicas", f"{replicas} is outside autoscale, {autoscale.min}..{autoscale.max}", remedy)


def _check_workloads(models: Sequence[ModelSpec]) -> None:
    """Two decisions about one number would undo each other. Without a namespace it is that of the pod, which may be any."""
    scaled: list[tuple[str, str, str]] = []
    for index, model in enumerate(models):
        if model.autoscale is None or model.kubernetes is None:
            continue
        where, namespace, workload = f"models[{index}]", model.kubernetes.namespace, model.kubernetes.workload
        for other, other_namespace, other_workload in scaled:
            if workload == other_workload and (namespace == other_namespace or not namespace or not other_namespace):
                reason = f"{workload} is scaled by the load of {other} already"
                remedy = "Leave autoscale out of one of them, or give each a workload of its own; in other namespaces, name them both."
                raise ConfigError(f"{where}.remote.kubernetes.workload", reason, remedy)
        scaled.append((where, namespace, workload))


def _check_sleeps(where: str, model: ModelSpec, budget_bytes: int | None) -> None:
    if budget_bytes is None:
        raise ConfigError("sleep_budget_bytes", f"is missing, and {where} sleeps", "Give the bytes that awake engines may take together.")
    if model.replicas != 1:
        raise ConfigError(f"{where}.replicas", f"{model.replicas} is not 1 for a model that sleeps", "Leave it out.")
    for name in ("autoscale", "standby"):
        if getattr(model, name):
            raise ConfigError(f"{where}.{name}", "is for models that do not sleep", "Leave one of them out.")
    options, own_bytes = model.engine, model.engine.get("memory_bytes")
    speculation = options.get("speculative_config")
    for name, is_refused in (
        ("engine.tensor_parallel_size or engine.pipeline_parallel_size", model.num_ranks > 1),
        ("engine.device", options.get("device", "cpu") == "cuda"),
        ("engine.speculative_config.model", isinstance(speculation, Mapping) and bool(speculation.get("model"))),
    ):
        if is_refused:
            raise ConfigError(f"{where}.{name}", "is of an engine that cannot sleep (docs/engine.md#sleep)", "Leave one of them out.")
    if own_bytes is not None and int(str(own_bytes)) > budget_bytes:
        reason = f"{own_bytes:,} is more than sleep_budget_bytes ({budget_bytes:,})"
        raise ConfigError(f"{where}.engine.memory_bytes", reason, "Give it less, or raise the budget.")


def _check_foreign_names(where: str, model: ModelSpec) -> None:
    names_of_replicas = re.compile(re.escape(replica_prefix(model.name)) + r"-\d+")
    for index, upstream in enumerate(model.upstreams):
        name = str(upstream.get("name") or f"foreign-{index}")
        if model.replicas and names_of_replicas.fullmatch(name):
            raise ConfigError(f"{where}[{index}].name", f"{name!r} is how a replica of this model is named", "Give it another name.")


def _check_key_variable(where: str, name: str) -> None:
    if name.startswith(SECRET_VARIABLES):
        reason = f"{name!r} is not passed on to the gateway, as no variable is that begins with {', '.join(SECRET_VARIABLES)}"
        raise ConfigError(where, reason, "Give it another name, or use api_key_file.")


FIXED = tuple(name for name, described in options(FleetOptions) if described.reload is not Reload.LIVE)

FIXED_GATEWAY = ("host", "port", "workers")

STORES = {"state": "state", "store": "gateway.store", "sessions": "gateway.sessions"}
"""Key of the gateways' file -> its path in the operator's."""


def runs_alike(before: ModelSpec, after: ModelSpec) -> bool:
    return (before.folder, before.sleeps, dict(before.engine)) == (after.folder, after.sleeps, dict(after.engine))


def with_choices_of_start(before: FleetConfig, after: FleetConfig) -> FleetConfig:
    kept = {"port": before.gateway["port"]} if not after.gateway.get("port") and "port" in before.gateway else {}
    return replace(after, site_key=after.site_key or before.site_key, gateway={**after.gateway, **kept})


def check_can_become(before: FleetConfig, after: FleetConfig, *, served: Container[str]) -> None:
    """Reads tokenizers of models that get another folder. Raises ConfigError naming the first option that takes a restart, and
    CheckpointError.
    """
    changed = [name for name in FIXED if getattr(before, name) != getattr(after, name)]
    paths = {**{name: f"gateway.{name}" for name in FIXED_GATEWAY}, **STORES}
    changed += [path for name, path in paths.items() if before.gateway.get(name) != after.gateway.get(name)]
    if changed:
        raise ConfigError(changed[0], "cannot change while the deployment runs", "Stop and start it for this, or write what it was.")
    folders = {model.name: model.folder for model in before.models}
    for model in after.models:
        before_folder = folders[model.name] if model.name in served else None
        if before_folder is not None and model.folder != before_folder and not _is_same_text(before_folder, model.folder):
            reason = f"cannot have another tokenizer or chat template while the deployment runs, and {model.folder} has"
            remedy = "Add it under another name and reload; then remove this one, give its name to the new one as an alias, and reload."
            raise ConfigError(f"models[{model.name}]", reason, remedy)


def _is_same_text(before: Path, after: Path | None) -> bool:
    return after is not None and digests_of(before) == digests_of(after)


class DesiredState:
    """The configuration to reach. options: by (model, revision)"""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.options: dict[tuple[str, int], ModelSpec] = {}

    def copy(self) -> DesiredState:
        made = DesiredState(self.config)
        made.options = {**self.options}
        return made

    def follow(self, config: FleetConfig, deployment: Deployment) -> list[str]:
        """Returns the models whose earlier failures no longer apply."""
        self.config = config
        specs = {model.name: model for model in config.models if model.replicas}
        known = {name: self.options.get((name, target.revision)) for name, target in deployment.targets.items()}
        counts = {name: target.num_replicas for name, target in deployment.targets.items()}
        wanted = {name: self._num_wanted(spec, counts.get(name)) for name, spec in specs.items()}
        deployment.scale(wanted, {name: spec.standby for name, spec in specs.items()})
        anew = []
        for name, spec in specs.items():
            before = known.get(name)
            if before is not None and not runs_alike(before, spec):
                deployment.roll_out(name, RolloutOptions(is_version=self.is_version(spec, deployment)))
                anew.append(name)
            elif deployment.drop_failed(name):
                anew.append(name)
            self.options[name, deployment.targets[name].revision] = spec
        return anew

    def _num_wanted(self, spec: ModelSpec, before: int | None) -> int:
        """A start is bounded by what the day has left: a deployment that is started again and again would not count as scaled."""
        number, budget = spec.num_wanted(before), self.config.day_budget(spec)
        if before is not None or spec.autoscale is None or budget is None:
            return number
        kept, now = read_scaling(self.config.scaling_file).get(spec.name, KeptScaling()), time.time()
        use = (kept.use or DayUse(now)).later(0, now)
        return min(number, spec.autoscale.min + budget.num_more(use, stay_s=kept.load_s))

    def is_version(self, spec: ModelSpec, deployment: Deployment) -> bool:
        """Whether it is another version of the model than the one that serves."""
        known = self.options.get((spec.name, deployment.previous_revision(spec.name)))
        return known is not None and known.folder != spec.folder

    def return_to(self, model: str, revision: int) -> None:
        served = self.options[model, revision]
        self.config = self.config.with_engines({model: served})

    def note_revisions(self, deployment: Deployment) -> None:
        for spec in self.config.models:
            if (target := deployment.targets.get(spec.name)) is not None:
                self.options.setdefault((spec.name, target.revision), spec)
