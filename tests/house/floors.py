"""Lists the floors of the house: who may import whom, and which foreign packages.

docs/architecture.md says the same in prose; test_floors.py holds the source against this table. A module is judged by the longest row that
is a prefix of its name, so `headrace.engine.loop` has stricter rules than `headrace.engine`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Floor:
    """What one package may import.

    ours    prefixes of our own modules, beside the package itself
    third   top-level names of other people's packages
    lazy    the same, but only inside functions (or under TYPE_CHECKING)

    test_floors.py refuses a row without a module, a module of ours that does not exist, and a package that no module of the row imports.
    """

    ours: tuple[str, ...] = ()
    third: tuple[str, ...] = ()
    lazy: tuple[str, ...] = ()


def _ours(*names: str) -> tuple[str, ...]:
    return tuple(f"headrace.{name}" for name in names)


GROUND = _ours("core", "machine", "text", "wire", "observe", "bundled")
EVERYTHING = ("headrace",)

SEAM = ("gateway.upstream.generation_request", "gateway.upstream.seam")

ABOVE_THE_SEAM = (
    "gateway.access",
    "gateway.http",
    *SEAM,
    "gateway.upstream.served_models",
    "observe.finished_request",
    "observe.timeline",
    "policy.admission",
    "policy.holding",
    "policy.routing.wishes",
    "text.logprobs",
    "text.template_switch",
)

RUNNER_SIDE = (
    "engine.adapters",
    "engine.grammar",
    "engine.config",
    "engine.failpoints",
    "engine.kv_sizing",
    "engine.loop",
    "engine.ranks",
    "engine.steps",
)

FLOORS: dict[str, Floor] = {
    # 0 words
    "headrace.core": Floor(),
    # 1 ground
    "headrace.machine": Floor(_ours("core")),
    "headrace.bundled": Floor(),
    "headrace.text": Floor(_ours("core", "machine"), ("tokenizers",), ("jinja2",)),
    "headrace.text.classifier": Floor((), ("numpy",)),
    "headrace.text.chat_renderer": Floor((), ("jinja2",)),  # imported inside functions
    "headrace.wire": Floor(_ours("core", "machine"), ("google", "grpc")),
    "headrace.observe": Floor(_ours("core"), ("prometheus_client",)),
    "headrace.registry": Floor(_ours("core", "machine"), (), ("obstore",)),
    "headrace.registry.archives": Floor(_ours("core", "registry"), ("backports", "compression")),
    "headrace.observe.traces": Floor(_ours("core", "observe"), ("aiohttp", "msgspec", "prometheus_client")),
    # 2 policy, tensors
    "headrace.policy": Floor(_ours("core")),
    "headrace.machine.cache_folder": Floor(),  # what is done while torch is imported imports nothing of others
    "headrace.tensor.host.file_memory": Floor(),
    "headrace.tensor.host.unfinished": Floor(),
    "headrace.tensor.packed.file": Floor(_ours("core", "tensor.checkpoint.header", "tensor.host.file_memory", "tensor.host.unfinished")),
    "headrace.tensor.backends": Floor(_ours("core", "machine", "tensor.host.cpu_features", "tensor.kernels", "tensor.peers")),
    "headrace.tensor": Floor(_ours("core", "machine"), ("torch", "numpy")),
    "headrace.tensor.kernels": Floor(_ours("core", "tensor.batch", "tensor.device", "tensor.host"), ("torch", "numpy")),
    "headrace.tensor.kernels.cpu": Floor(
        _ours("core", "machine.cache_folder", "tensor.batch", "tensor.host", "tensor.kernels"), ("torch", "numpy", "numba", "llvmlite")
    ),
    "headrace.tensor.kernels.gpu": Floor(_ours("core", "machine", "tensor.batch", "tensor.host", "tensor.kernels"), ("torch", "triton")),
    # 3 engine: the loop knows no tensor, the runner no socket
    "headrace.engine": Floor(_ours("core", "machine", "policy", "tensor", "wire", "observe")),
    "headrace.engine.adapters": Floor(_ours("core", "policy")),
    "headrace.engine.config": Floor(_ours("core", "machine", "policy.queues", "tensor.backends", "tensor.checkpoint.formats.names")),
    "headrace.engine.failpoints": Floor(_ours("core")),
    "headrace.engine.grammar": Floor(_ours("core", "machine", "text.tokenizer"), (), ("llguidance",)),
    "headrace.engine.grammar.slots": Floor(
        _ours("core", "tensor.sampling", "engine.failpoints", "engine.grammar", "engine.runner.masks"), ("numpy",), ("llguidance",)
    ),
    "headrace.engine.inbox": Floor(_ours("core")),
    "headrace.engine.load_board": Floor(
        _ours("core", "policy", "engine.adapters", "engine.inbox", "engine.sleeping", "engine.steps", "engine.utilisation")
    ),
    "headrace.engine.loop": Floor(
        _ours(
            "core",
            "policy",
            "engine.adapters",
            "engine.inbox",
            "engine.load_board",
            "engine.preparation",
            "engine.recovery",
            "engine.sleeping",
            "engine.steps",
            "engine.utilisation",
        )
    ),
    "headrace.engine.utilisation": Floor(_ours("core", "machine")),
    "headrace.engine.preparation": Floor(_ours("core", "policy", "engine.recovery")),
    "headrace.engine.recovery": Floor(_ours("core", "policy")),
    "headrace.engine.sleeping": Floor(_ours("core", "policy", "engine.inbox")),
    "headrace.engine.steps": Floor(_ours("core", "policy")),
    "headrace.engine.runner": Floor(_ours("core", "machine", "tensor", *RUNNER_SIDE), ("torch", "numpy")),
    "headrace.engine.ranks": Floor(
        _ours(
            "core",
            "machine",
            "tensor",
            "wire.listening",
            "wire.target",
            "wire.tls",
            "engine.config",
            "engine.kv_sizing",
            "engine.runner",
            "engine.steps",
        ),
        ("torch", "numpy"),
    ),
    "headrace.engine.kv_sizing": Floor(_ours("core", "engine.config")),
    "headrace.engine.build": Floor(
        _ours("core", "machine", "policy", "engine", "tensor.host.threads", "tensor.packed.file", "wire.target")
    ),
    "headrace.engine.server": Floor(
        _ours("core", "machine", "policy", "wire", "observe", "engine.config", "engine.loop", "engine.failpoints"), ("grpc", "google")
    ),
    # 4 edges
    "headrace.gateway": Floor((*GROUND, *_ours("policy")), ("uvicorn", "msgspec"), ("uvloop",)),
    "headrace.gateway.http.connection": Floor(_ours("gateway.http"), ("httptools", "msgspec", "uvicorn")),
    "headrace.gateway.http.content_encoding": Floor(_ours("core", "gateway.http.errors"), ("backports", "compression")),
    # above the seam nobody knows who answers, nor what a prompt becomes
    "headrace.gateway.surfaces": Floor(
        _ours(
            "core",
            *ABOVE_THE_SEAM,
            "gateway.cache.control",
            "gateway.cache.replays",
            "gateway.generation",
            "gateway.ledger.usage_query",
            "gateway.sessions",
        ),
        ("msgspec",),
    ),
    "headrace.gateway.generation.run": Floor(
        _ours("core", *ABOVE_THE_SEAM, "gateway.generation", "gateway.upstream.fallback", "observe.metrics")
    ),
    "headrace.gateway.generation.stages": Floor(
        _ours(
            "core",
            *ABOVE_THE_SEAM,
            "gateway.cache",
            "gateway.generation",
            "gateway.ledger.record",
            "gateway.sessions",
            "observe.metrics",
            "observe.store_metrics",
            "policy.fallbacks",
        )
    ),
    "headrace.gateway.cache": Floor(
        _ours(
            "core",
            *ABOVE_THE_SEAM,
            "gateway.stores",
            "observe",
        ),
        ("msgspec",),
    ),
    "headrace.gateway.sessions": Floor(
        _ours(
            "core",
            *ABOVE_THE_SEAM,
            "gateway.stores",
            "observe.store_metrics",
        ),
        ("msgspec",),
    ),
    "headrace.gateway.generation.kept_streams": Floor(_ours("core", *ABOVE_THE_SEAM, "gateway.stores", "observe"), ("msgspec",)),
    "headrace.gateway.ledger": Floor(
        _ours("core", "gateway.access.principal", "machine", "gateway.stores", "observe", "policy.limits"),
        ("msgspec",),
        ("confluent_kafka",),
    ),
    "headrace.gateway.stores": Floor(_ours("core", "machine"), ("msgspec",), ("redis",)),
    "headrace.gateway.generation.progress": Floor(_ours("core", *SEAM, "observe")),
    **dict.fromkeys(
        _ours(*SEAM),
        Floor(
            _ours(
                "core",
                *SEAM,
                "observe.finished_request",
                "policy.admission",
                "policy.holding",
                "policy.limits.price",
                "policy.routing.wishes",
                "text.logprobs",
                "text.template_switch",
            )
        ),
    ),
    "headrace.gateway.upstream.foreign": Floor(
        _ours(
            "core",
            "machine",
            "gateway.upstream.model_config",
            "gateway.http.content_encoding",
            "gateway.http.config",
            "gateway.http.errors",
            *SEAM,
            "observe.finished_request",
            "observe.reading_metrics",
            "observe.timeline",
            "policy.admission",
            "policy.holding",
            "policy.limits.price",
            "policy.routing",
            "text.logprobs",
        ),
        ("aiohttp", "msgspec"),
    ),
    "headrace.fleet": Floor((*GROUND, *_ours("policy", "registry.cache", "registry.names")), (), ("aiohttp", "cryptography")),
    "headrace.fleet.kubernetes": Floor((*GROUND, *_ours("fleet", "policy.scaling.budget")), ("aiohttp",)),
    "headrace.fleet.kubernetes.endpoints": Floor(),
    "headrace.fleet.kubernetes.service": Floor(_ours("core")),
    "headrace.fleet.ray.cluster": Floor(_ours("core", "fleet.ray"), (), ("ray",)),
    "headrace.fleet.weights": Floor(
        _ours("core", "machine", "bundled", "registry", "tensor.checkpoint.gguf.folder", "tensor.checkpoint.gguf.paths"),
        (),
        ("huggingface_hub",),
    ),
    # 5 roof
    "headrace.lab": Floor(
        _ours(
            "core",
            "machine",
            "text",
            "wire",
            "observe",
            "policy",
            "engine.adapters",
            "engine.config",
            "engine.loop",
            "engine.steps",
            "engine.build",
            "engine.server",
            "gateway",
            "fleet",
        ),
        ("aiohttp",),
    ),
    "headrace.lab.svg": Floor(_ours("core"), (), ("matplotlib",)),
    "headrace.lab.simulate": Floor(
        _ours("core", "policy", "engine.build", "engine.config", "engine.loop", "engine.steps", "lab.datasets", "lab.metrics", "lab.svg"),
        (),
        ("matplotlib",),
    ),
    "headrace.lab.plan": Floor(_ours("core", "bundled", "policy.placement", "tensor.checkpoint.config", "lab.svg"), (), ("matplotlib",)),
    "headrace.lab.plan.here": Floor(_ours("core", "machine.resources", "engine.config", "engine.layout", "lab.plan.catalogue")),
    "headrace.llm": Floor(
        _ours("core", "machine", "text", "observe", "policy", "tensor", "engine", "bundled", "fleet.weights", "lab.plan.here"), (), ()
    ),
    "headrace.__main__": Floor(_ours("cli.main")),
    "headrace.functions": Floor(_ours("core"), ("msgspec",)),
    "headrace.cli": Floor(EVERYTHING, ("typer", "yaml"), ("packaging",)),  # tests/cli: --help imports none
    # the package itself exports lazily
    "headrace": Floor((), (), ()),
}

PACKAGE_EXPORTS = _ours("llm", "core.sampling", "core.structured")
"""What `headrace/__init__` names for people, by string or under TYPE_CHECKING only."""

FOLDERS_WITHOUT_CIRCLES = ("gateway", "policy", "tensor")
"""Packages whose sub-folders and top modules, each taken as a whole, import one another in no circle."""

_OF_RELOAD = ("control.reload", "control.protections")
HOLD_WHOLE_CONFIG = _ours(*(f"gateway.{name}" for name in ("config", "compose", "app", "main", "process", *_OF_RELOAD)))
"""Modules of the gateway that may hold its whole configuration. Any other one takes the sections or the numbers that it reads."""

PRIVATE = _ours("tensor.kernels.cpu", "tensor.kernels.gpu")
"""Packages that no module outside imports: a table finds them by name, where they are used."""

_CONTAINERS = {"array", "bisect", "collections", "dataclasses", "enum", "heapq", "types"}
POLICY_STDLIB = _CONTAINERS | {"__future__", "abc", "functools", "hashlib", "itertools", "math", "operator", "typing"}
"""All that pure decisions need: no clock, no socket, no thread, no randomness of their own."""


def floor_of(module: str) -> tuple[str, Floor]:
    """The longest row that covers `module`. Raises KeyError for a package without a row."""
    rows = [row for row in FLOORS if row != "headrace" and is_within(module, row)]
    if module == "headrace":
        rows = [module]
    if not rows:
        raise KeyError(f"{module} has no floor in tests/house/floors.py")
    row = max(rows, key=len)
    return row, FLOORS[row]


def is_within(module: str, prefix: str) -> bool:
    """`prefix` names the module or a package it lies in."""
    return module == prefix or module.startswith(prefix + ".")
