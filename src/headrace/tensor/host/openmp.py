"""Sets how OpenMP threads wait between two parallel regions. It must be set before torch is imported: libgomp reads it once.

By default a libgomp thread spins for tens of milliseconds before it sleeps. torch and Numba have one thread pool each, so the waiting
threads of one pool keep the cores busy while the other pool computes; on a busy machine a region then waits for a time slice. Spinning
briefly instead costs a wake-up of some ten microseconds per region. Measured on two busy cores: 3.6 ms per region by default, 0.04 ms with
SPINS (docs/experiments.md). Not spinning at all, OMP_WAIT_POLICY=PASSIVE, made torch's operations several times slower.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

SPIN_VARIABLE, SPINS = "GOMP_SPINCOUNT", "1000"
_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "KMP_BLOCKTIME")


def prepare_openmp(environ: MutableMapping[str, str], *, torch_is_loaded: bool | None = None) -> str:
    """Set the spin count in `environ` unless a variable there already decides how threads wait. Returns what was done, in words.

    torch_is_loaded  whether torch is imported; None: in this process. A launcher that prepares a child's environment passes False
    """
    for name in (SPIN_VARIABLE, *_WAIT_VARIABLES):
        if name in environ:
            return f"threads wait as {name}={environ[name]} says"
    if torch_is_loaded if torch_is_loaded is not None else "torch" in sys.modules:
        return f"threads spin long between regions: torch was imported before {SPIN_VARIABLE} could be set"
    environ[SPIN_VARIABLE] = SPINS
    return f"threads spin briefly between regions ({SPIN_VARIABLE}={SPINS})"
