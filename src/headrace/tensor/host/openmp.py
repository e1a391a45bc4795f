"""Sets how OpenMP threads wait between two parallel regions. It must be set before torch is imported: libgomp reads it once.

By default a libgomp thread spins for tens of milliseconds before it sleeps, and keeps a core from Numba's pool. On two busy cores a region
takes 3.6 ms by default, 0.04 ms with SPINS (docs/experiments.md). OMP_WAIT_POLICY=PASSIVE made torch's operations several times slower.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

SPIN_VARIABLE, SPINS = "GOMP_SPINCOUNT", "1000"
_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "KMP_BLOCKTIME")


def prepare_openmp(environ: MutableMapping[str, str], *, torch_is_loaded: bool | None = None) -> str:
    """Returns what was done, in words.

    torch_is_loaded  None: in this process. A launcher that prepares a child's environment passes False
    """
    for name in (SPIN_VARIABLE, *_WAIT_VARIABLES):
        if name in environ:
            return f"threads wait as {name}={environ[name]} says"
    if torch_is_loaded if torch_is_loaded is not None else "torch" in sys.modules:
        return f"threads spin long between regions: torch was imported before {SPIN_VARIABLE} could be set"
    environ[SPIN_VARIABLE] = SPINS
    return f"threads spin briefly between regions ({SPIN_VARIABLE}={SPINS})"
