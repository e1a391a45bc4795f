"""`headrace doctor` says what this machine offers, what will be slow or fail, and what to do about it. Nothing is started or changed.

One function per question returns one or more findings.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.bundled import DEFAULT_MODEL, bundled_names
from headrace.cli.exits import CommandExitCode
from headrace.machine.resources import allowed_cpus, cpu_quota

if TYPE_CHECKING:
    from headrace.machine.gpus import Gpus

MIN_PYTHON = (3, 11)
MIN_FILES = 4096
LOW_MEMORY_BYTES = 2 << 30
CPU_FEATURES = {
    "avx2": "the SIMD width the CPU kernels are written for",
    "avx512f": "wider vectors in attention and GEMM",
    "avx512_vnni": "fast int8 GEMM",
    "avx512_bf16": "bfloat16 GEMM in hardware; without it bfloat16 models are computed in float32",
    "amx_bf16": "bfloat16 GEMM in tiles",
}


class Health(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """found: the state of what was checked; remedy: empty if nothing is wrong"""

    name: str
    health: Health
    found: str
    remedy: str = ""


def doctor(
    port: Annotated[int, typer.Option("--port", help="Port that should be free.")] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Check this machine; exit 1 when something will fail."""
    findings = examine(port)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.health.value:>5}  {finding.name}: {finding.found}" + (f"\n       {finding.remedy}" if finding.remedy else ""))
    if any(finding.health is Health.FAIL for finding in findings):
        raise typer.Exit(CommandExitCode.FAILED)


def examine(port: int) -> list[Finding]:
    from headrace.tensor.backends import find_working_gpus

    return [
        check_python(sysconfig.get_config_var("CONFIG_ARGS")),
        check_cpu(_read(Path("/proc/cpuinfo"))),
        check_threads(cpu_quota(), os.environ),
        check_memory(Path("/")),
        check_threading_layer(),
        check_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        check_port(port),
        check_cache(_cache_dir()),
        check_bundled(),
        check_gpus(find_working_gpus()),
        *check_versions(),
    ]


def check_python(build_flags: str | None) -> Finding:
    """build_flags: the arguments CPython was configured with; None where they are not recorded

    Without --enable-optimizations (pyenv's default), everything outside kernels takes half as long again.
    """
    state = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < MIN_PYTHON:
        return Finding("python", Health.FAIL, state, f"Use Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer.")
    if build_flags is not None and "--enable-optimizations" not in build_flags:
        remedy = "Start-up and scheduling take longer. Use a distribution's Python, or configure it with --enable-optimizations."
        return Finding("python", Health.WARN, f"{state}, built without optimizations", remedy)
    return Finding("python", Health.OK, state)


def check_cpu(cpuinfo: str) -> Finding:
    """cpuinfo: text of /proc/cpuinfo; empty where there is none"""
    from headrace.tensor.host.cpu_features import CpuFeatures, parse_cpu_flags

    features = CpuFeatures(platform.machine(), parse_cpu_flags(cpuinfo))
    if not features.flags:
        return Finding("cpu", Health.WARN, platform.processor() or platform.machine(), "Its features cannot be read here.")
    model = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    there = [name for name in CPU_FEATURES if name in features.flags]
    missing = [f"{name} ({use})" for name, use in CPU_FEATURES.items() if name not in features.flags]
    state = f"{model.group(1) if model else platform.machine()}: {', '.join(there) or 'none of the features looked for'}"
    if missing:
        state += f"; without {', '.join(missing)}"
    state += f"; kernels choose as for {features.family}"
    if features.family != "generic" or "asimd" in features.flags:
        return Finding("cpu", Health.OK, state)
    return Finding("cpu", Health.WARN, state, "Kernels will be slow on this machine.")


def check_threads(quota: float | None, environment: Mapping[str, str]) -> Finding:
    """quota: CPUs that the cgroup allows; None: no limit"""
    cpus = allowed_cpus()
    allowed = "which of them are allowed is not measured here" if cpus is None else f"{len(cpus)} allowed"
    state = f"{os.cpu_count()} CPUs, {allowed}" + (f", cgroup quota {quota:g}" if quota is not None else "")
    if environment.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE":
        return Finding(
            "threads", Health.WARN, f"{state}, OMP_WAIT_POLICY=PASSIVE", "Unset it: it makes small operations several times slower."
        )
    pinned = environment.get("OMP_NUM_THREADS")
    return Finding("threads", Health.OK, state + (f", OMP_NUM_THREADS={pinned}" if pinned else ""))


def check_memory(root: Path) -> Finding:
    from headrace.machine.resources import read_available

    available = read_available(root)
    state = f"{available.num_bytes / 2**30:.1f} GiB to be had (bound by {available.source})"
    if not available.is_measured:
        return Finding("memory", Health.WARN, state, "Give --kv-cache-bytes where other programs need much of it.")
    if available.num_bytes < LOW_MEMORY_BYTES:
        return Finding("memory", Health.WARN, state, "Only very small models fit; close something or raise the limit.")
    return Finding("memory", Health.OK, state)


def check_threading_layer() -> Finding:
    """A parallel region of Numba costs 2 us with OpenMP, 50-110 us with the workqueue."""
    layers = []
    for layer, module in (("omp", "omppool"), ("tbb", "tbbpool"), ("workqueue", "workqueue")):
        try:
            import_module(f"numba.np.ufunc.{module}")
        except ImportError:
            continue
        layers.append(layer)
    state = ", ".join(layers) or "none"
    if "omp" in layers:
        return Finding("threading layer", Health.OK, state)
    return Finding("threading layer", Health.WARN, state, "Install an OpenMP runtime (libgomp1): kernels start 25 times faster with it.")


def check_files(soft: int, hard: int) -> Finding:
    if soft == resource.RLIM_INFINITY or soft >= MIN_FILES:
        return Finding("open files", Health.OK, f"limit {soft}")
    remedy = f"A stream takes one: ulimit -n {min(65536, hard) if hard > 0 else 65536}."
    return Finding("open files", Health.WARN, f"limit {soft}", remedy)


def check_port(port: int) -> Finding:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding("port", Health.WARN, f"{port}: {error.strerror}", "Use --port N, or --port 0 for any free one.")
    return Finding("port", Health.OK, f"{port} is free")


def check_cache(folder: Path) -> Finding:
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding("cache", Health.WARN, f"{folder} is not writable", "Kernels are compiled at every start; set HEADRACE_CACHE_DIR.")
    if existing == folder and folder.stat().st_mode & 0o022:
        return Finding("cache", Health.FAIL, f"{folder} can be written by other users", f"chmod 700 {folder}")
    return Finding("cache", Health.OK, str(folder))


def check_bundled() -> Finding:
    names = bundled_names()
    if DEFAULT_MODEL in names:
        return Finding("bundled models", Health.OK, ", ".join(names))
    return Finding("bundled models", Health.WARN, ", ".join(names) or "none", "`headrace serve` needs a MODEL here.")


def check_gpus(gpus: Gpus) -> Finding:
    if gpus.problem:
        return Finding("gpu", Health.WARN, gpus.problem, f"{gpus.remedy} Until then models run on the CPU, and --device cuda is refused.")
    if not gpus.names:
        return Finding("gpu", Health.OK, "none; models run on the CPU")
    from headrace.tensor.device import CUDA

    free = CUDA.free_memory()
    return Finding("gpu", Health.OK, f"{len(gpus.names)} x {CUDA.title}, {free.num_bytes / 2**30:.1f} GiB free on the first")


def check_versions() -> Iterator[Finding]:
    from importlib import metadata

    from packaging.requirements import Requirement

    for line in metadata.requires("headrace") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield Finding(requirement.name, Health.FAIL, "not installed", f"pip install '{requirement}'")
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        yield Finding(requirement.name, Health.OK if fits else Health.FAIL, version, "" if fits else f"pip install '{requirement}'")


def _cache_dir() -> Path:
    from headrace.machine.cache_folder import cache_root

    return cache_root(os.environ)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
