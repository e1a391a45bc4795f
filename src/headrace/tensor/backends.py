"""The kernel backends: which there are, which one an engine computes with, and loading one.

A new backend is a module with `make_backend` and a row of BACKENDS. The option `kernels` offers every row. This module imports neither
torch nor a backend, so that commands can list the names at no cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.tensor.host.cpu_features import CpuFeatures
    from headrace.tensor.kernels import Backend


@dataclass(frozen=True, slots=True)
class BackendModule:
    """Where a backend is found, and what it computes on.

    module   its module, which has `make_backend`
    devices  names of the devices that it computes on
    reason   why "auto" takes it, for the log of a start
    package  what has to be installed; None: nothing beside torch
    """

    module: str
    devices: tuple[str, ...]
    reason: str
    package: str | None = None

    def problem(self) -> str | None:
        """Why it cannot be used in this process; None where it can.

        Numba refuses some versions of numpy and of the CPU's libraries while it is imported, with ImportError, OSError or RuntimeError,
        and a partly installed package fails with AttributeError.
        """
        try:
            import_module(self.module)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        return None


BACKENDS = {
    "numba": BackendModule("headrace.tensor.kernels.cpu.backend", ("cpu",), "compiled for this CPU", package="numba"),
    "triton": BackendModule("headrace.tensor.kernels.gpu.backend", ("cuda",), "compiled for this GPU", package="triton"),
    "reference": BackendModule("headrace.tensor.kernels.reference", ("cpu", "cuda"), "plain torch"),
}
"""By name; "auto" takes the first one that computes on the device and can be used."""


def choose_backend(requested: str, device: str) -> tuple[str, str]:
    """(name for `load_backend`, reason). requested: "auto" or a name of BACKENDS; device: a name of `tensor.device.DEVICES`.

    Raises: ConfigError where the requested backend does not compute on the device, or cannot be used.
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
    """The named backend. Importing its module may take seconds (Numba).

    deterministic  a row's result must not depend on the other rows of its step, to the bit (`kernels.cpu.backend`). Raises ConfigError
                   where the backend cannot promise that.
    features       the CPU for which paths are chosen; None: this machine. Code is compiled for this machine in either case
    """
    from headrace.tensor.host.cpu_features import read_cpu_features

    module = import_module(BACKENDS[name].module)
    backend: Backend = module.make_backend(deterministic=deterministic, features=features or read_cpu_features())
    return backend
