"""Chooses an engine's kernels. The choice is never silent: its reason is shown at start."""

from __future__ import annotations

from importlib import import_module

from headrace.core.errors import ConfigError
from headrace.tensor.device import ComputeDevice
from headrace.tensor.kernels import IMPLEMENTATIONS


def numba_problem() -> str | None:
    """Why the Numba kernels cannot be used here; None where they can.

    Numba refuses some versions of numpy and of the CPU's libraries while it is imported, with ImportError, OSError or RuntimeError, and
    a partly installed package fails with AttributeError.
    """
    try:
        import_module(IMPLEMENTATIONS["numba"])
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def choose_kernels(requested: str, device: ComputeDevice) -> tuple[str, str]:
    """(name for `load_backend`, reason). requested: "auto" | "numba" | "reference".

    Raises: ConfigError where "numba" is requested and cannot be used.
    """
    if requested == "reference":
        return "reference", "as configured"
    if "numba" not in device.backends:
        if requested == "numba":
            raise ConfigError("kernels", f"numba kernels run on the cpu, not on {device.name}", "Use kernels = auto.")
        return "reference", f"the only kernels for {device.name}"
    problem = numba_problem()
    if problem is None:
        return "numba", "as configured" if requested == "numba" else "compiled for this CPU"
    if requested == "numba":
        raise ConfigError("kernels", f"numba cannot be used ({problem})", "Install numba, or use kernels = auto.")
    return "reference", f"slow: numba cannot be used ({problem})"
