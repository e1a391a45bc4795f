"""Names the machine in the files of results, and finds the files of its figures."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from bench.harness import RESULTS
from headrace.lab.environment import environment
from headrace.tensor.host.cpu_features import read_cpu_features

CPUINFO = Path("/proc/cpuinfo")


@cache
def this_machine() -> str:
    """Figures of different machines are never put together: "amd-epyc-25-1-avx2-2cpus", from the CPU's name, family and model, the
    instruction sets that decide which kernels run, and the number of cores."""
    here, features = environment(), read_cpu_features()
    words = re.findall(r"[a-z0-9.]+", re.sub(r"\((r|tm)\)|@|processor|cpu", " ", here.cpu.lower()))
    with suppress(OSError):
        words += re.findall(r"^(?:cpu family|model)\s*:\s*(\d+)$", CPUINFO.read_text(), re.MULTILINE)[:2]
    dots = ["vnni"] if features.flags & {"avx512_vnni", "avx_vnni"} else []
    return "-".join([*words, features.family, *dots, f"{here.num_cpus}cpus"])


def results_file(name: str) -> Path:
    """Where a figure of this machine is kept: bench/results/MACHINE/NAME.json."""
    return RESULTS / this_machine() / f"{name}.json"
