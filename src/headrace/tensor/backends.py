"""The kernel backends.

A new backend is a module with `make_backend` and a row of BACKENDS. This module imports neither torch nor a backend, so that commands can
list the names at no cost.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from headrace.core.errors import ConfigError
from headrace.machine.gpus import VISIBLE, Gpus, find_gpus, run_probe, unusable

if TYPE_CHECKING:
    from mmap import mmap

    from headrace.core.parallelism import Parallelism, Place
    from headrace.tensor.host.cpu_features import CpuFeatures
    from headrace.tensor.kernels import Backend
    from headrace.tensor.peers import Peers


@dataclass(frozen=True, slots=True)
class BackendModule:
    """
    reason   why "auto" takes it, for the log of a start
    trial    module whose `find_fault` compiles and runs a first kernel on a GPU; None: there is nothing to try
    """

    module: str
    devices: tuple[str, ...]
    reason: str
    package: str | None = None
    trial: str | None = None

    def problem(self) -> str | None:
        """Numba refuses some versions of numpy and of the CPU's libraries while it is imported, with ImportError, OSError or RuntimeError,
        and a partly installed package fails with AttributeError.
        """
        try:
            import_module(self.module)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        return None


BACKENDS = {
    "numba": BackendModule("headrace.tensor.kernels.cpu.backend", ("cpu",), "compiled for this CPU", package="numba"),
    "triton": BackendModule(
        "headrace.tensor.kernels.gpu.backend",
        ("cuda",),
        "compiled for this GPU",
        package="triton",
        trial="headrace.tensor.kernels.gpu.compiler",
    ),
    "reference": BackendModule("headrace.tensor.kernels.reference", ("cpu", "cuda"), "plain torch"),
}

TRIAL_S = 120.0
"""For importing torch, which takes long from a slow disk, and running a first kernel."""
_TRIAL = """
from headrace.core.errors import ConfigError
from headrace.tensor.backends import try_kernels
from headrace.tensor.device import CUDA
try:
    CUDA.check()
    try_kernels("auto", CUDA.name)
except ConfigError as error:
    print("fault", error.reason, error.remedy, sep="\\n")
else:
    print("works")
"""


@cache
def find_working_gpus() -> Gpus:
    """As `find_gpus`, after a first kernel ran on the first of them, which takes seconds: torch is imported, in a process of its own."""
    gpus = find_gpus()
    if not gpus.names:
        return gpus
    output, error = run_probe(_TRIAL, TRIAL_S, {**os.environ, VISIBLE: gpus.names[0]})
    match output.splitlines():
        case [*_, "works"]:
            return gpus
        case [*_, "fault", problem, remedy]:
            return Gpus(problem=problem, remedy=remedy)
    return unusable(f"a first kernel cannot be tried ({error or 'no output'})", "Mend it")


def try_kernels(requested: str, device: str) -> None:
    """requested, device: as in `choose_backend`. Raises ConfigError."""
    names = [name for name, backend in BACKENDS.items() if device in backend.devices and requested in ("auto", name)]
    backend = BACKENDS[names[0]] if names else None
    if backend is None or backend.trial is None:
        return
    gpus = find_gpus()
    if gpus.problem:
        raise ConfigError("device", gpus.problem, gpus.remedy)
    problem = backend.problem()
    fault = import_module(backend.trial).find_fault(device) if problem is None else f"{names[0]} cannot be used ({problem})"
    if fault:
        raise ConfigError("device", fault, "Mend it, or use device = cpu.")


def choose_backend(requested: str, device: str) -> tuple[str, str]:
    """(name for `load_backend`, reason). requested: "auto" or a name of BACKENDS; device: a name of `tensor.device.DEVICES`.

    Raises ConfigError where the requested backend does not compute on the device, or cannot be used.
    """
    if requested != "auto":
        _check(requested, device)
        return requested, "as configured"
    problems: list[str] = []
    for name, backend in BACKENDS.items():
        if device in backend.devices:
            problem = backend.problem()
            if problem is None:
                slow = f"slow: {'; '.join(problems)}" if problems else ""
                return name, slow or backend.reason
            problems.append(f"{name} cannot be used ({problem})")
    raise ConfigError("device", f"no kernels compute on {device}: {'; '.join(problems)}", "Use device = cpu.")


def _check(name: str, device: str) -> None:
    backend = BACKENDS[name]
    if device not in backend.devices:
        rule = f"{name} kernels run on the {' and '.join(backend.devices)}, not on {device}"
        raise ConfigError("kernels", rule, "Use kernels = auto.")
    problem = backend.problem()
    if problem is not None:
        raise ConfigError("kernels", f"{name} cannot be used ({problem})", f"Install {backend.package}, or use kernels = auto.")


def load_backend(name: str, *, deterministic: bool = False, features: CpuFeatures | None = None) -> Backend:
    """Importing the module may take seconds (Numba).

    deterministic  a row's result must not depend on the other rows of its step, to the bit. Raises ConfigError where the backend cannot
                   promise that
    features       the CPU for which paths are chosen; None: this machine. Code is compiled for this machine in either case
    """
    from headrace.tensor.host.cpu_features import read_cpu_features

    module = import_module(BACKENDS[name].module)
    backend: Backend = module.make_backend(deterministic=deterministic, features=features or read_cpu_features())
    return backend


SHARED_MEMORY = "headrace.tensor.kernels.cpu.peers"


def shared_bytes(parallelism: Parallelism) -> int:
    return int(import_module(SHARED_MEMORY).shared_bytes(parallelism))


def load_peers(memory: mmap, place: Place) -> Peers:
    """memory: the same of all ranks, zeros at first"""
    peers: Peers = import_module(SHARED_MEMORY).SharedMemoryPeers(memory, place)
    return peers
