"""Makes choices as another CPU would have them, as a pytest plugin. Instructions stay this machine's.

    HEADRACE_TEST_CPU="sse4_2 avx2" python -m pytest -p tests.support.another_cpu ...

The variable lists the instruction sets of that CPU, an x86_64.
"""

from __future__ import annotations

import os
from pathlib import Path

from headrace.tensor.host import cpu_features

FEATURES = cpu_features.CpuFeatures("x86_64", frozenset(os.environ["HEADRACE_TEST_CPU"].split()))
_read = cpu_features.read_cpu_features


def read_cpu_features(cpuinfo: Path | None = None) -> cpu_features.CpuFeatures:
    return FEATURES if cpuinfo is None else _read(cpuinfo)


cpu_features.read_cpu_features = read_cpu_features  # type: ignore[assignment]  # before anyone has imported the name
